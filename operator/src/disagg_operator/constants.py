"""Names that other programs see: API group, labels, annotations, conditions and reasons."""

from __future__ import annotations

from typing import Final

GROUP = "disagg.dev"
API_VERSION: Final = "disagg.dev/v1alpha1"
KIND: Final = "DisaggDeployment"

LABEL_DEPLOYMENT = f"{GROUP}/deployment"
LABEL_ROLE = f"{GROUP}/role"
LABEL_PLAN = f"{GROUP}/plan"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "disagg-operator"

ANNOTATION_PLAN_DIGEST = f"{GROUP}/plan-digest"
ANNOTATION_INPUTS_DIGEST = f"{GROUP}/inputs-digest"
ANNOTATION_RENDERED_DIGEST = f"{GROUP}/rendered-digest"
ANNOTATION_COMPAT_DIGEST = f"{GROUP}/compat-digest"

FIELD_MANAGER = "disagg-operator"

CONDITION_SPEC_VALID = "SpecValid"
CONDITION_PLAN_READY = "PlanReady"
CONDITION_PREFILL_READY = "PrefillReady"
CONDITION_DECODE_READY = "DecodeReady"
CONDITION_READY = "Ready"

REASON_ACCEPTED = "Accepted"
REASON_PROVEN = "Proven"
REASON_NO_PLAN = "NoPlan"
REASON_NAME_CONFLICT = "NameConflict"
REASON_APPLY_FAILED = "ApplyFailed"
REASON_ALL_READY = "AllReplicasReady"
REASON_SCALED_TO_ZERO = "ScaledToZero"
REASON_STARTING = "ReplicasStarting"
REASON_FAILED_CREATE = "FailedCreate"
REASON_UNSCHEDULABLE = "Unschedulable"
REASON_IMAGE_PULL = "ImagePullFailed"
REASON_CRASH_LOOP = "CrashLoop"
REASON_READY = "Ready"

ENGINE_CONTAINER = "engine"
AGENT_CONTAINER = "disagg-agent"
