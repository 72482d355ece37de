"""Which revision's workloads go, and which plans: pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from disagg_operator.children import ROLES
from disagg_operator.observed import PublishedPlan, Workload

KEPT_PLANS = 3
"""Plans that stay though nothing uses them: people look at what changed."""


def is_ready(workloads: Iterable[Workload]) -> bool:
    """Whether workloads of one revision serve: every role is there, and has all of its replicas."""
    found = {one.role: one for one in workloads}
    return all(role in found and found[role].current and found[role].ready >= found[role].desired for role in ROLES)


def leaving_workloads(workloads: Iterable[Workload], revision: str) -> tuple[str, ...]:
    """Names of the Deployments that are to go.

    The current revision stays, and until it is ready the newest older one that serves at all; what never came up
    goes at once, so that an edit during a rollout does not leave its pods behind.
    """
    by_revision: dict[str, list[Workload]] = defaultdict(list)
    for one in workloads:
        by_revision[one.revision].append(one)
    current = by_revision.pop(revision, [])
    kept = None
    if not is_ready(current):
        serving = [name for name, found in by_revision.items() if _serves(found)]
        kept = max(serving, key=lambda name: (max(one.created for one in by_revision[name]), name), default=None)
    return tuple(sorted(one.name for name, found in by_revision.items() if name != kept for one in found))


def leaving_plans(plans: Iterable[PublishedPlan], used: Iterable[str]) -> tuple[str, ...]:
    """Names of the plan ConfigMaps that are to go: the oldest, but none that is used.

    Args:
        used: names that the current revision or a workload that is still there mounts.
    """
    used = set(used)
    newest = sorted(plans, key=lambda plan: (plan.created, plan.name), reverse=True)
    spare = [plan.name for plan in newest if plan.name not in used]
    return tuple(sorted(spare[max(0, KEPT_PLANS - len(used)) :]))


def _serves(workloads: Iterable[Workload]) -> bool:
    ready = {one.role for one in workloads if one.ready > 0}
    return ready >= set(ROLES)
