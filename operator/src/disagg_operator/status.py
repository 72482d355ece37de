"""The status of a deployment and the events of its changes: pure, the clock is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from disagg_operator import constants as names
from disagg_operator.children import ROLES, RoleName, short
from disagg_operator.describe import topology
from disagg_operator.observed import Children, Problem, worst
from disagg_operator.types import DisaggDeployment
from disagg_plan import wire
from disagg_plan.errors import PlanError, Refusal

_LONGEST_MESSAGE = 4096


@dataclass(frozen=True)
class Notice:
    """An event to post on the resource."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def plan_status(
    deployment: DisaggDeployment, plan: wire.Plan | None, config_maps: tuple[str, ...], error: PlanError | None
) -> dict[str, Any]:
    """What the spec alone decides: summary, plan, `SpecValid` and `PlanReady`."""
    status: dict[str, Any] = {"observedGeneration": deployment.metadata.generation}
    if plan is None or error is not None:
        return status | {"conditions": _refused(error)}
    spec = deployment.spec
    return status | {
        "summary": f"{spec.prefill.replicas}P -> {spec.decode.replicas}D, {topology(plan)}",
        "parallelism": f"{spec.prefill.parallelism.tensor}->{spec.decode.parallelism.tensor}",
        "plan": {
            "digest": plan.digest,
            "shortDigest": short(plan.digest),
            "compatDigest": plan.compat.digest,
            "configMaps": list(config_maps),
            "edges": len(plan.edges),
            "bytesPerToken": plan.summary.bytes_per_token,
            "copiesPerBlock": plan.summary.copies_per_block,
        },
        "conditions": [
            _condition(names.CONDITION_SPEC_VALID, True, names.REASON_ACCEPTED, "the two sides can work together"),
            _condition(names.CONDITION_PLAN_READY, True, names.REASON_PROVEN, f"plan {short(plan.digest)} is proven"),
        ],
    }


def cluster_status(
    decided: Mapping[str, Any],
    deployment: DisaggDeployment,
    revision: str,
    observed: Children,
    failures: tuple[Problem, ...],
    now: datetime,
) -> dict[str, Any]:
    """The whole status on a cluster.

    Args:
        decided: what `plan_status` gave.
        revision: the current revision; empty if the spec is refused.
        failures: writes of this run that failed.
        now: when conditions that changed have changed.
    """
    conditions = list(decided["conditions"])
    roles = {}
    plan = (decided.get("plan") or {}).get("shortDigest", "")
    for role in ROLES:
        roles[role], condition = _role(deployment, role, revision, plan, observed)
        conditions.append(condition)
    conditions.append(_ready(conditions, failures))
    previous = (deployment.status or {}).get("conditions") or []
    return {
        **decided,
        "roles": roles,
        "transfer": {"protocolRequested": deployment.spec.transport.protocol},
        "conditions": [_stamped(one, previous, deployment.metadata.generation, now) for one in conditions],
    }


def refused_status(body: Mapping[str, Any], error: Refusal, now: datetime) -> dict[str, Any]:
    """Status of a resource that cannot even be read as a deployment."""
    generation = (body.get("metadata") or {}).get("generation", 1)
    previous = (body.get("status") or {}).get("conditions") or []
    conditions = _refused(error)
    conditions.append(_ready(conditions, ()))
    stamped = [_stamped(one, previous, generation, now) for one in conditions]
    return {"observedGeneration": generation, "conditions": stamped}


def notices(previous: Iterable[Mapping[str, Any]], conditions: Iterable[Mapping[str, Any]]) -> tuple[Notice, ...]:
    """One event for each condition whose status, reason or message changed; progress is not an event.

    Messages with counts change with every pod, so only reasons count for the roles and `Ready`.
    """
    before = {one["type"]: one for one in previous}
    found = []
    for one in conditions:
        old = before.get(one["type"], {})
        keys = ("status", "reason", "message") if one["type"] in _SAID_IN_FULL else ("status", "reason")
        if all(old.get(key) == one[key] for key in keys) or one["reason"] in _SILENT:
            continue
        fine = one["status"] == "True" or one["reason"] in _AS_DECLARED
        found.append(Notice("Normal" if fine else "Warning", one["reason"], one["message"]))
    # Ready repeats the reason of the condition that holds it back.
    return tuple(dict.fromkeys(found))


_SAID_IN_FULL = (names.CONDITION_SPEC_VALID, names.CONDITION_PLAN_READY)
_AS_DECLARED = (names.REASON_SCALED_TO_ZERO,)
_SILENT = (names.REASON_NO_PLAN, names.REASON_STARTING)


def _refused(error: PlanError | None) -> list[dict[str, Any]]:
    # A proof that fails is the planner's fault, not the user's: the spec stays valid and the plan is not published.
    fault = isinstance(error, Refusal)
    code, message = (error.code, str(error)) if error is not None else (names.REASON_NO_PLAN, "there is no plan")
    return [
        _condition(names.CONDITION_SPEC_VALID, False, code, message)
        if fault
        else _condition(names.CONDITION_SPEC_VALID, True, names.REASON_ACCEPTED, "the two sides can work together"),
        _condition(names.CONDITION_PLAN_READY, False, names.REASON_NO_PLAN if fault else code, message),
    ]


def _role(
    deployment: DisaggDeployment, role: RoleName, revision: str, plan: str, observed: Children
) -> tuple[dict[str, Any], dict[str, Any]]:
    desired = deployment.spec.role(role).replicas
    workloads = [one for one in observed.workloads if one.role == role]
    current = [one for one in workloads if revision and one.revision == revision]
    pods = [pod for pod in observed.pods if pod.role == role]
    updated = sum(one.ready for one in current)
    counts: dict[str, Any] = {
        "desired": desired,
        "ready": sum(one.ready for one in workloads),
        "updated": updated,
        "onCurrentPlan": sum(1 for pod in pods if pod.ready and pod.plan == plan),
    }
    counts["summary"] = f"{counts['ready']}/{desired}"
    kind = names.CONDITION_PREFILL_READY if role == "prefill" else names.CONDITION_DECODE_READY
    if not revision:
        return counts, _condition(kind, False, names.REASON_NO_PLAN, "there is no plan to run")
    settled = all(one.current for one in current)
    if current and settled and updated >= desired:
        reason = names.REASON_ALL_READY if desired else names.REASON_SCALED_TO_ZERO
        return counts, _condition(kind, desired > 0, reason, f"{updated} of {desired} replicas are ready")
    problem = worst([*(one.problem for one in current), *(pod.problem for pod in pods if pod.revision == revision)])
    found = problem or Problem(names.REASON_STARTING, "replicas are starting")
    message = f"{updated} of {desired} replicas are ready: {found.message}"
    return counts, _condition(kind, False, found.reason, message)


def _ready(conditions: Iterable[Mapping[str, Any]], failures: tuple[Problem, ...]) -> dict[str, Any]:
    if failures:
        first = failures[0]
        more = f"; {len(failures) - 1} more writes failed" if len(failures) > 1 else ""
        return _condition(names.CONDITION_READY, False, first.reason, first.message + more)
    for one in conditions:
        if one["status"] != "True":
            return _condition(names.CONDITION_READY, False, one["reason"], one["message"])
    return _condition(names.CONDITION_READY, True, names.REASON_READY, "every replica is ready and on the current plan")


def _stamped(
    condition: Mapping[str, Any], previous: Iterable[Mapping[str, Any]], generation: int, now: datetime
) -> dict[str, Any]:
    old = next((one for one in previous if one.get("type") == condition["type"]), None)
    unchanged = old is not None and old.get("status") == condition["status"] and "lastTransitionTime" in old
    time = old["lastTransitionTime"] if old is not None and unchanged else f"{now.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {**condition, "lastTransitionTime": time, "observedGeneration": generation}


def _condition(kind: str, holds: bool, reason: str, message: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": "True" if holds else "False",
        "reason": reason,
        "message": message[:_LONGEST_MESSAGE],
    }
