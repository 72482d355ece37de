"""What is seen of a deployment's children, reduced to what decisions need: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from disagg_operator.constants import (
    ANNOTATION_RENDERED_DIGEST,
    LABEL_PLAN,
    LABEL_REVISION,
    LABEL_ROLE,
    REASON_CRASH_LOOP,
    REASON_FAILED_CREATE,
    REASON_IMAGE_PULL,
    REASON_UNSCHEDULABLE,
)

Object = dict[str, Any]

_WAITING = {
    "ErrImagePull": REASON_IMAGE_PULL,
    "ImagePullBackOff": REASON_IMAGE_PULL,
    "InvalidImageName": REASON_IMAGE_PULL,
    "CrashLoopBackOff": REASON_CRASH_LOOP,
    "CreateContainerConfigError": REASON_FAILED_CREATE,
    "CreateContainerError": REASON_FAILED_CREATE,
    "RunContainerError": REASON_FAILED_CREATE,
}


@dataclass(frozen=True)
class Problem:
    """What keeps pods from coming up, or a write from being done: one word for programs, a sentence for people."""

    reason: str
    message: str


@dataclass(frozen=True)
class Workload:
    """One Deployment of one role and revision.

    Attributes:
        ready: replicas that are ready.
        current: whether its controller has seen its last change.
        rendered: digest of the template that was rendered into it.
        created: when it was made, as the API server writes times.
    """

    name: str
    role: str
    revision: str
    plan: str
    desired: int
    ready: int
    current: bool
    rendered: str
    created: str
    problem: Problem | None


@dataclass(frozen=True)
class PodView:
    """One pod."""

    name: str
    role: str
    revision: str
    plan: str
    ready: bool
    address: str
    problem: Problem | None


@dataclass(frozen=True)
class PublishedPlan:
    """A plan ConfigMap that exists."""

    name: str
    inputs: str
    text: str
    created: str


@dataclass(frozen=True)
class Children:
    """All children of a deployment that it controls."""

    workloads: tuple[Workload, ...] = ()
    pods: tuple[PodView, ...] = ()
    plans: tuple[PublishedPlan, ...] = ()


def controlled_by(item: Object, uid: str) -> bool:
    """Whether the object of that UID is the controller of an object."""
    owners = _map(item, "metadata").get("ownerReferences") or []
    return any(owner.get("controller") and owner.get("uid") == uid for owner in owners)


def workload(item: Object) -> Workload:
    """Reduce a Deployment."""
    metadata, spec, status = (_map(item, key) for key in ("metadata", "spec", "status"))
    labels = metadata.get("labels") or {}
    return Workload(
        name=metadata["name"],
        role=labels.get(LABEL_ROLE, ""),
        revision=labels.get(LABEL_REVISION, ""),
        plan=labels.get(LABEL_PLAN, ""),
        desired=spec.get("replicas", 1),
        ready=status.get("readyReplicas", 0),
        current=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        rendered=(metadata.get("annotations") or {}).get(ANNOTATION_RENDERED_DIGEST, ""),
        created=metadata.get("creationTimestamp", ""),
        problem=_replica_failure(status.get("conditions") or []),
    )


def pod_view(item: Object) -> PodView:
    """Reduce a pod."""
    metadata, status = _map(item, "metadata"), _map(item, "status")
    labels = metadata.get("labels") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    leaving = "deletionTimestamp" in metadata
    return PodView(
        name=metadata["name"],
        role=labels.get(LABEL_ROLE, ""),
        revision=labels.get(LABEL_REVISION, ""),
        plan=labels.get(LABEL_PLAN, ""),
        ready=not leaving and conditions.get("Ready", {}).get("status") == "True",
        address=status.get("podIP", ""),
        problem=None if leaving else _pod_problem(status, conditions),
    )


def worst(problems: Iterable[Problem | None]) -> Problem | None:
    """The problem to show: what was never admitted first, then what finds no place, then what does not run."""
    order = (REASON_FAILED_CREATE, REASON_UNSCHEDULABLE, REASON_IMAGE_PULL, REASON_CRASH_LOOP)
    found = sorted((one for one in problems if one is not None), key=lambda one: (order.index(one.reason), one.message))
    return found[0] if found else None


def _replica_failure(conditions: Iterable[Mapping[str, Any]]) -> Problem | None:
    for one in conditions:
        if one.get("type") == "ReplicaFailure" and one.get("status") == "True":
            return Problem(REASON_FAILED_CREATE, str(one.get("message", "")))
    return None


def _pod_problem(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> Problem | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return Problem(REASON_UNSCHEDULABLE, str(scheduled.get("message", "")))
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = _WAITING.get(waiting.get("reason", ""))
        if reason is not None:
            detail = waiting.get("message") or waiting["reason"]
            return Problem(reason, f"container {container['name']}: {detail}")
    return None


def _map(item: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = item.get(key)
    return value if isinstance(value, Mapping) else {}
