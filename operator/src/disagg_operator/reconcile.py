"""The decision: from what was observed to what should exist. Pure; effects apply it.

The same function serves a cluster and one machine. A refusal or a failed proof yields a status that says why, and
leaves the children that exist as they are: a mistaken edit ends no pod.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from disagg_operator import children
from disagg_operator.children import Object, Site
from disagg_operator.constants import ANNOTATION_RENDERED_DIGEST
from disagg_operator.engine_flags import check_user_args
from disagg_operator.observed import Children, PublishedPlan
from disagg_operator.planning import ConfigMaps, inputs_digest, plan_deployment
from disagg_operator.rollout import leaving_plans, leaving_workloads
from disagg_operator.status import plan_status
from disagg_operator.types import DisaggDeployment
from disagg_plan import wire
from disagg_plan.errors import FormatError, PlanError, ProofError
from disagg_plan.proof import prove


@dataclass(frozen=True)
class Snapshot:
    """What was observed at one moment.

    Attributes:
        config_maps: data of the namespace's ConfigMaps that the deployment refers to.
        children: what exists for it already; nothing in local mode, which starts afresh.
    """

    deployment: DisaggDeployment
    config_maps: ConfigMaps = field(default_factory=dict)
    children: Children = field(default_factory=Children)


@dataclass(frozen=True)
class Desired:
    """What should exist.

    Attributes:
        objects: child objects, in the order in which they are to be applied; empty if the spec is refused.
        scales: name and replicas of Deployments whose templates another operator rendered: they are only scaled.
        leaving: kind and name of objects that are to go, in order, once all of `objects` are applied.
        status: the resource's status as far as the spec alone decides it.
        plan: the published plan, if there is one.
        revision: the current revision; empty if there is none.
        refusal: why there is none.
    """

    objects: tuple[Object, ...]
    status: dict[str, Any]
    plan: wire.Plan | None
    refusal: PlanError | None
    scales: tuple[tuple[str, int], ...] = ()
    leaving: tuple[tuple[str, str], ...] = ()
    revision: str = ""


def reconcile(snapshot: Snapshot, site: Site) -> Desired:
    """Decide what should exist for a deployment."""
    deployment = snapshot.deployment
    try:
        check_user_args(deployment.spec)
        inputs = inputs_digest(deployment.spec, snapshot.config_maps)
        plan = _published(snapshot.children.plans, inputs)
        if plan is None:
            plan, _proof = plan_deployment(deployment.spec, snapshot.config_maps)
    except PlanError as error:
        return Desired((), plan_status(deployment, None, (), error), None, error)
    revision = children.revision_digest(deployment, plan)
    config_map = children.plan_config_map(deployment, plan, inputs)
    roles = [children.role_deployment(deployment, plan, role, revision, site) for role in children.ROLES]
    foreign = [one for one in roles if _rendered_otherwise(snapshot.children, one)]
    scales = tuple((one["metadata"]["name"], one["spec"]["replicas"]) for one in foreign)
    leaving = _leaving(snapshot.children, config_map["metadata"]["name"], revision)
    kept = [name for kind, name in leaving if kind == "ConfigMap"]
    plans = [plan.name for plan in snapshot.children.plans if plan.name not in kept]
    names = dict.fromkeys([config_map["metadata"]["name"], *sorted(plans)])
    status = plan_status(deployment, plan, tuple(names), None)
    ours = (one for one in roles if one not in foreign)
    return Desired((config_map, *ours), status, plan, None, scales, leaving, revision)


def _published(plans: tuple[PublishedPlan, ...], inputs: str) -> wire.Plan | None:
    """A published plan for the same inputs that still proves: another planner's plan restarts no pod."""
    for published in sorted(plans, key=lambda plan: (plan.created, plan.name)):
        plan = _proven(published.text) if published.inputs == inputs else None
        if plan is not None:
            return plan
    return None


@lru_cache(maxsize=64)
def _proven(text: str) -> wire.Plan | None:
    """A published plan that proves. Remembered: every pod that changes is a decision, and a large proof takes long."""
    try:
        plan = wire.decode(text)
        prove(plan)
    except (FormatError, ProofError):
        return None
    return plan


def _rendered_otherwise(observed: Children, rendered: Object) -> bool:
    """Whether a Deployment is there, but from another operator's rendering of the same declaration."""
    digest = rendered["metadata"]["annotations"][ANNOTATION_RENDERED_DIGEST]
    found = next((one for one in observed.workloads if one.name == rendered["metadata"]["name"]), None)
    return found is not None and found.rendered != digest


def _leaving(observed: Children, plan_name: str, revision: str) -> tuple[tuple[str, str], ...]:
    workloads = leaving_workloads(observed.workloads, revision)
    # By the plan's digits and not by the name, which a long deployment name shortens.
    mounted = {one.plan for one in observed.workloads} | {pod.plan for pod in observed.pods}
    used = {plan.name for plan in observed.plans if plan.name.rpartition("-")[2] in mounted} | {plan_name}
    return (
        *(("Deployment", name) for name in workloads),
        *(("ConfigMap", name) for name in leaving_plans(observed.plans, used)),
    )
