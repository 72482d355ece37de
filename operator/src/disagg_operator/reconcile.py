"""The decision: from what was observed to what should exist. Pure; effects apply it.

The same function serves a cluster and one machine. A refusal or a failed proof yields a status that says why, and
no objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from disagg_operator import children
from disagg_operator.children import Object, Site
from disagg_operator.constants import (
    CONDITION_PLAN_READY,
    CONDITION_SPEC_VALID,
    REASON_ACCEPTED,
    REASON_NO_PLAN,
    REASON_PROVEN,
)
from disagg_operator.describe import topology
from disagg_operator.engine_flags import check_user_args
from disagg_operator.planning import ConfigMaps, plan_deployment
from disagg_operator.types import DisaggDeployment
from disagg_plan import wire
from disagg_plan.errors import PlanError, Refusal


@dataclass(frozen=True)
class Snapshot:
    """What was observed at one moment.

    Attributes:
        config_maps: data of the namespace's ConfigMaps that the deployment refers to.
    """

    deployment: DisaggDeployment
    config_maps: ConfigMaps = field(default_factory=dict)


@dataclass(frozen=True)
class Desired:
    """What should exist.

    Attributes:
        objects: child objects, in the order in which they are to be applied; empty if the spec is refused.
        status: the resource's whole status.
        plan: the published plan, if there is one.
        refusal: why there is none.
    """

    objects: tuple[Object, ...]
    status: dict[str, Any]
    plan: wire.Plan | None
    refusal: PlanError | None


def reconcile(snapshot: Snapshot, site: Site) -> Desired:
    """Decide what should exist for a deployment."""
    deployment = snapshot.deployment
    try:
        check_user_args(deployment.spec)
        plan, _proof = plan_deployment(deployment.spec, snapshot.config_maps)
    except PlanError as error:
        return Desired((), _refused(deployment, error), None, error)
    revision = children.revision_digest(deployment, plan, site)
    objects = (
        children.plan_config_map(deployment, plan),
        children.role_deployment(deployment, plan, "prefill", revision, site),
        children.role_deployment(deployment, plan, "decode", revision, site),
    )
    return Desired(objects, _accepted(deployment, plan, objects), plan, None)


def _accepted(deployment: DisaggDeployment, plan: wire.Plan, objects: tuple[Object, ...]) -> dict[str, Any]:
    spec = deployment.spec
    return {
        "observedGeneration": deployment.metadata.generation,
        "summary": f"{spec.prefill.replicas}P -> {spec.decode.replicas}D, {topology(plan)}",
        "plan": {
            "digest": plan.digest,
            "compatDigest": plan.compat.digest,
            "configMaps": [item["metadata"]["name"] for item in objects if item["kind"] == "ConfigMap"],
            "edges": len(plan.edges),
            "bytesPerToken": plan.summary.bytes_per_token,
            "copiesPerBlock": plan.summary.copies_per_block,
        },
        "conditions": [
            _condition(CONDITION_SPEC_VALID, "True", REASON_ACCEPTED, "the two sides can work together"),
            _condition(CONDITION_PLAN_READY, "True", REASON_PROVEN, f"plan {children.short(plan.digest)} is proven"),
        ],
    }


def _refused(deployment: DisaggDeployment, error: PlanError) -> dict[str, Any]:
    # A proof that fails is the planner's fault, not the user's: the spec stays valid and the plan is not published.
    fault = isinstance(error, Refusal)
    return {
        "observedGeneration": deployment.metadata.generation,
        "conditions": [
            _condition(CONDITION_SPEC_VALID, "False", error.code, str(error))
            if fault
            else _condition(CONDITION_SPEC_VALID, "True", REASON_ACCEPTED, "the two sides can work together"),
            _condition(CONDITION_PLAN_READY, "False", REASON_NO_PLAN if fault else error.code, str(error)),
        ],
    }


def _condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}
