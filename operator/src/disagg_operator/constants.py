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
ANNOTATION_COMPAT_DIGEST = f"{GROUP}/compat-digest"

CONDITION_SPEC_VALID = "SpecValid"
CONDITION_PLAN_READY = "PlanReady"

REASON_ACCEPTED = "Accepted"
REASON_PROVEN = "Proven"
REASON_NO_PLAN = "NoPlan"

ENGINE_CONTAINER = "engine"
AGENT_CONTAINER = "disagg-agent"
