"""The operator's process: kopf watches the resources, reflectors their children, one queue reconciles."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import kopf

from disagg_operator.cluster.api import Api, ApiError, connect
from disagg_operator.cluster.controller import Controller, Owned, Sources, owned
from disagg_operator.cluster.health import Health, serving
from disagg_operator.cluster.leader import lead
from disagg_operator.cluster.reflector import Reflector
from disagg_operator.cluster.work import Key, WorkQueue
from disagg_operator.constants import GROUP, KIND, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, MANAGED_BY
from disagg_operator.crd import PLURAL, VERSION
from disagg_operator.observed import Object, PodView, pod_view

WORKERS = 8
_WAIT_SECONDS = 2.0
_OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_DEPLOYMENT}"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """How the operator runs.

    Attributes:
        namespace: the only one that it looks at; all if None.
        election: namespace of the Lease that operators elect their leader by; None to work without.
        http: host (empty for all addresses) and port of health and metrics; None to serve none.
    """

    namespace: str | None = None
    election: str | None = None
    http: tuple[str, int] | None = None


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run until `stop` is set.

    Raises:
        ApiError: no API server is configured.
        LeadershipLost: another operator may work now.
        OSError: the HTTP address cannot be had.
    """
    health = Health()
    api = await connect(lambda verb, kind: health.writes.labels(verb, kind).inc())
    work = partial(_run, api, settings, stop, health)
    try:
        async with serving(health, *settings.http) if settings.http else contextlib.nullcontext():
            if settings.election is None:
                await work()
            else:
                identity = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
                await lead(api.client, settings.election, identity, stop, work)
    finally:
        await api.close()


async def _run(api: Api, settings: Settings, stop: asyncio.Event, health: Health) -> None:
    await _until_served(api, settings, stop)
    if stop.is_set():
        return
    queue = WorkQueue()
    resources: dict[Key, Object] = {}
    health.depth.set_function(lambda: queue.depth)
    health.beat()
    health.working = True
    where = (settings.namespace, _OURS)
    deployments: Reflector[Owned] = Reflector(api, "Deployment", *where, owned, queue.mark, health.beat)
    config_maps: Reflector[Owned] = Reflector(api, "ConfigMap", *where, owned, queue.mark, health.beat)
    pods: Reflector[PodView] = Reflector(
        api, "Pod", settings.namespace, LABEL_DEPLOYMENT, pod_view, queue.mark, health.beat
    )
    sources = Sources(resources, deployments, config_maps, pods)
    controller = Controller(api, sources, lambda: datetime.now(UTC), queue.mark_later)

    async def reconcile(key: Key) -> None:
        async with health.measured():
            await controller.reconcile(key)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one.run()) for one in (deployments, config_maps, pods)]
        # Decisions made before everything is known would create what exists and delete what is used.
        for one in (deployments, config_maps, pods):
            await one.synced.wait()
        health.synced = True
        tasks.append(group.create_task(queue.run(reconcile, WORKERS)))
        await _watch_resources(api, settings, resources, queue.mark, stop)
        for task in tasks:
            task.cancel()


async def _until_served(api: Api, settings: Settings, stop: asyncio.Event) -> None:
    """Wait for the resource and for the right to read it; kopf looks for a resource only once."""
    while not stop.is_set():
        try:
            await api.list_all(KIND, settings.namespace)
        except ApiError as error:
            remedy = "install the resource: disagg crds | kubectl apply -f -" if error.not_found else "tried again"
            logger.warning("cannot read deployments", extra={"error": str(error), "remedy": remedy})
        else:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _WAIT_SECONDS)


async def _watch_resources(
    api: Api, settings: Settings, resources: dict[Key, Object], mark: Callable[[Key], None], stop: asyncio.Event
) -> None:
    """Keep the resources' latest bodies. kopf lists and watches, and asks again whatever the server does."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection_info(api)

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def seen(event: Any, **_: Any) -> None:
        body = dict(event["object"])
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        if event["type"] == "DELETED":
            resources.pop(key, None)
        else:
            resources[key] = body
        mark(key)

    options = kopf.OperatorSettings()
    options.posting.enabled = False
    options.scanning.disabled = True
    # One worker per object keeps their order; a batch would only hold back what the queue coalesces anyway.
    options.queueing.idle_timeout = 5.0
    await kopf.operator(
        registry=registry,
        settings=options,
        standalone=True,
        clusterwide=settings.namespace is None,
        namespaces=[settings.namespace] if settings.namespace else (),
        stop_flag=stop,
    )


async def connection_info(api: Api) -> kopf.ConnectionInfo:
    """kopf's form of our connection: both go to the same API server as the same user."""
    configuration = api.configuration
    key = configuration.get_api_key_with_prefix("BearerToken")
    scheme, _, token = ((await key if inspect.isawaitable(key) else key) or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        scheme=scheme or None,
        token=token or None,
    )
