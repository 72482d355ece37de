"""One reconcile of one deployment on the cluster: gather, decide, apply, report."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from disagg_operator.children import CLUSTER
from disagg_operator.cluster.api import Api, ApiError
from disagg_operator.cluster.drift import holds
from disagg_operator.cluster.reflector import Reflector
from disagg_operator.cluster.work import Key
from disagg_operator.constants import (
    ANNOTATION_INPUTS_DIGEST,
    API_VERSION,
    KIND,
    MANAGED_BY,
    REASON_APPLY_FAILED,
    REASON_NAME_CONFLICT,
)
from disagg_operator.observed import (
    Children,
    Object,
    PodView,
    Problem,
    PublishedPlan,
    Workload,
    controlled_by,
    workload,
)
from disagg_operator.reconcile import Desired, Snapshot, reconcile
from disagg_operator.status import Notice, cluster_status, notices, refused_status
from disagg_operator.types import DisaggDeployment, parse_deployment
from disagg_plan.errors import Refusal

CONFIG_RECHECK_SECONDS = 10.0
"""A ConfigMap that a spec refers to has none of our labels, so its arrival is looked for."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owned:
    """A child as the API server has it, without what only the API server needs."""

    item: Object

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.item["metadata"]["name"])

    @property
    def uid(self) -> str:
        """Its UID."""
        return str(self.item["metadata"]["uid"])


def owned(item: Object) -> Owned:
    """Keep of a child what is compared with what should be."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    return Owned({**item, "metadata": metadata})


@dataclass(frozen=True)
class Sources:
    """Local copies of what is on the cluster."""

    resources: Mapping[Key, Object]
    deployments: Reflector[Owned]
    config_maps: Reflector[Owned]
    pods: Reflector[PodView]


class Controller:
    """Reconciles deployments by key.

    Args:
        clock: the time of day; only status and events show it.
        later: asks for another run of a key after some seconds.
    """

    def __init__(
        self, api: Api, sources: Sources, clock: Callable[[], datetime], later: Callable[[Key, float], None]
    ) -> None:
        self._api = api
        self._sources = sources
        self._clock = clock
        self._later = later

    async def reconcile(self, key: Key) -> None:
        """Bring one deployment nearer to what it should be.

        Raises:
            ApiError: the API server did not take the status; nothing else is raised on purpose.
        """
        try:
            await self._reconcile(key)
        except ApiError as error:
            if not error.terminating:
                raise
            logger.info("namespace is going", extra={"deployment": "/".join(key)})

    async def _reconcile(self, key: Key) -> None:
        body = self._sources.resources.get(key)
        # Owner references clean up after a resource that is going: anything made now would be made in vain.
        if body is None or "deletionTimestamp" in body["metadata"]:
            return
        try:
            deployment = parse_deployment({name: body[name] for name in _READ if name in body})
        except Refusal as refusal:
            await self._report(body, refused_status(body, refusal, self._clock()))
            return
        uid = deployment.metadata.uid
        deployments = {one.name: one for one in self._sources.deployments.of(key) if controlled_by(one.item, uid)}
        config_maps = {one.name: one for one in self._sources.config_maps.of(key) if controlled_by(one.item, uid)}
        children = Children(
            workloads=tuple(workload(one.item) for one in deployments.values()),
            pods=tuple(self._sources.pods.of(key)),
            plans=tuple(_plan(one.item) for one in config_maps.values()),
        )
        snapshot = Snapshot(deployment, await self._referenced(key, deployment), children)
        desired = reconcile(snapshot, CLUSTER)
        known = {("Deployment", one.name): one for one in deployments.values()}
        known |= {("ConfigMap", one.name): one for one in config_maps.values()}
        applied, failures = await self._apply(key, desired, known, uid)
        seen = replace(children, workloads=_merged(children.workloads, applied))
        await self._report(
            body, cluster_status(desired.status, deployment, desired.revision, seen, failures, self._clock())
        )
        if failures:
            raise ApiError(0, failures[0].reason, failures[0].message)
        if deployment.spec.model.config_from is not None:
            self._later(key, CONFIG_RECHECK_SECONDS)

    async def _referenced(self, key: Key, deployment: DisaggDeployment) -> dict[str, dict[str, str]]:
        source = deployment.spec.model.config_from
        if source is None:
            return {}
        name = source.config_map_key_ref.name
        found = await self._api.get("ConfigMap", key.namespace, name)
        return {} if found is None else {name: found.get("data") or {}}

    async def _apply(
        self, key: Key, desired: Desired, known: Mapping[tuple[str, str], Owned], uid: str
    ) -> tuple[list[Object], tuple[Problem, ...]]:
        """Write what differs; objects that only others need go last, and only if everything else went well."""
        applied: list[Object] = []
        for item in desired.objects:
            kind, name = item["kind"], item["metadata"]["name"]
            try:
                failure = await self._apply_one(key, item, known.get((kind, name)), uid, applied)
            except ApiError as error:
                if error.terminating:
                    raise
                failure = Problem(REASON_APPLY_FAILED, f"{kind} {name}: {error}")
            if failure is not None:
                # What follows may mount what failed: it would only make pods that cannot start.
                return applied, (failure,)
        try:
            for name, replicas in desired.scales:
                if known["Deployment", name].item["spec"].get("replicas") != replicas:
                    await self._api.scale("Deployment", key.namespace, name, replicas)
            for kind, name in desired.leaving:
                await self._api.delete(kind, key.namespace, name, known[kind, name].uid)
        except ApiError as error:
            return applied, (Problem(REASON_APPLY_FAILED, f"{name}: {error}"),)
        return applied, ()

    async def _apply_one(
        self, key: Key, item: Object, found: Owned | None, uid: str, applied: list[Object]
    ) -> Problem | None:
        kind, name = item["kind"], item["metadata"]["name"]
        if found is not None and holds(found.item, item):
            return None
        # A label can be taken off or put on by anyone: whose an object is, only its owner reference says.
        current = await self._api.get(kind, key.namespace, name)
        if current is not None and not controlled_by(current, uid):
            return Problem(
                REASON_NAME_CONFLICT,
                f"{kind} {name} exists and is not of this deployment: remove it, or give the deployment another name",
            )
        if current is None or not holds(current, item):
            applied.append(await self._api.apply(item, force=current is not None))
            logger.info("applied", extra={"deployment": "/".join(key), "object": f"{kind}/{name}"})
        return None

    async def _report(self, body: Object, status: dict[str, Any]) -> None:
        before = body.get("status") or {}
        if before == status:
            return
        metadata = body["metadata"]
        identity = {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]}
        item = {"apiVersion": API_VERSION, "kind": KIND, "metadata": identity, "status": status}
        try:
            await self._api.apply(item, force=True, subresource="status")
        except ApiError as error:
            # Gone, or another of the same name: there is nobody to tell.
            if error.status in (404, 409):
                return
            raise
        for notice in notices(before.get("conditions") or [], status["conditions"]):
            await self._post(body, notice)

    async def _post(self, body: Object, notice: Notice) -> None:
        metadata = body["metadata"]
        now = f"{self._clock():%Y-%m-%dT%H:%M:%SZ}"
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": notice.type,
            "reason": notice.reason,
            "message": notice.message[:1024],
            "source": {"component": MANAGED_BY},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._api.create(event)
        except ApiError as error:
            logger.warning("event not posted", extra={"deployment": metadata["name"], "error": str(error)})


_READ = ("apiVersion", "kind", "metadata", "spec", "status")


def _plan(item: Object) -> PublishedPlan:
    metadata = item["metadata"]
    return PublishedPlan(
        name=metadata["name"],
        inputs=(metadata.get("annotations") or {}).get(ANNOTATION_INPUTS_DIGEST, ""),
        text=(item.get("data") or {}).get("plan.json", ""),
        created=metadata.get("creationTimestamp", ""),
    )


def _merged(workloads: tuple[Workload, ...], applied: list[Object]) -> tuple[Workload, ...]:
    """What was seen, with what this run just wrote: the watch is a moment behind."""
    newer = {one["metadata"]["name"]: workload(one) for one in applied if one["kind"] == "Deployment"}
    return (*(one for one in workloads if one.name not in newer), *newer.values())
