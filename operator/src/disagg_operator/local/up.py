"""`disagg up`: reconcile a deployment, run its pods here, drive requests through them, check every byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from disagg_operator.children import LOCAL, Object
from disagg_operator.constants import ENGINE_CONTAINER, LABEL_ROLE
from disagg_operator.local.drive import Account, Driver, Endpoint, Outcome, Workload
from disagg_operator.local.pods import (
    answers,
    apply_objects,
    containers,
    engine_socket,
    log_level,
    pair,
    start_agent,
    until,
    write_pods,
)
from disagg_operator.local.processes import Container, LocalCluster, LocalError, Pod
from disagg_operator.local.sizing import Sizes, check_available, keep_layers, size, too_large
from disagg_operator.planning import deployment_geometry
from disagg_operator.reconcile import Desired, Snapshot, reconcile
from disagg_plan import wire
from disagg_plan.errors import Refusal

_LONGEST_TMPDIR = 40
"""A socket's path has at most 107 bytes, and pods add about 60 to the directory."""

SYNTHETIC_ENGINE = "disagg-synthetic-engine"


@dataclass(frozen=True)
class UpOptions:
    """Choices of a run.

    Attributes:
        layers: keep only the first layers; None keeps what fits.
        max_memory: bytes for all pools together.
        placement: where movers live, if not where the deployment says.
        keep: stay up after the requests until interrupted.
    """

    requests: int
    longest: int
    concurrency: int
    max_memory: int
    layers: int | None
    seed: int
    state: Path
    keep: bool


class Reporter(Protocol):
    """How progress is shown."""

    def line(self, text: str) -> None:
        """One line of text."""

    def mapping(self, plan: wire.Plan) -> None:
        """The plan's mapping table."""

    def begin(self, total: int) -> None:
        """Requests start."""

    def advance(self, outcome: Outcome) -> None:
        """One request has ended."""

    def end(self) -> None:
        """Requests are over."""

    def finished(self, account: Any) -> None:
        """The account of the run, as soon as it is known."""


def prepare(snapshot: Snapshot, options: UpOptions) -> tuple[Desired, Sizes]:
    """Choose layers and pages within the memory limit, and reconcile.

    Raises:
        PlanError: the deployment is refused, or not even one layer fits.
    """
    check_replicas(snapshot)
    whole = deployment_geometry(snapshot.deployment.spec, snapshot.config_maps).layers
    if options.layers is not None and options.layers > len(whole):
        raise Refusal(
            "TooManyLayers",
            "--layers",
            f"{options.layers} layers are to be kept, the model has {len(whole)} with a cache",
            f"Use at most {len(whole)}",
        )
    pipeline = max(snapshot.deployment.spec.role(name).parallelism.pipeline for name in ("prefill", "decode"))
    wanted = options.layers or len(whole)
    while True:
        desired = reconcile(keep_layers(snapshot, wanted) if wanted < len(whole) else snapshot, LOCAL)
        if desired.plan is None:
            raise desired.refusal or LocalError("reconcile gave no plan")
        sizes = size(snapshot.deployment, desired.plan, len(whole), options.longest, options.max_memory)
        if sizes is not None:
            return desired, sizes
        if options.layers is not None or wanted <= pipeline:
            raise too_large(snapshot.deployment, desired.plan, wanted, options.longest, options.max_memory)
        wanted = max(pipeline, wanted // 2)


async def up(snapshot: Snapshot, options: UpOptions, reporter: Reporter) -> Account:
    """Run a deployment on this machine.

    Raises:
        PlanError: the deployment is refused.
        LocalError: a pod did not come up, or two of them refuse each other.
    """
    desired, sizes = prepare(snapshot, options)
    if desired.plan is None:
        raise LocalError("reconcile gave no plan")
    reporter.mapping(desired.plan)
    reporter.line(sizes.sentence(options.max_memory))
    check_available(sizes)
    async with local_cluster(options.state) as cluster, _pods(cluster, desired, sizes, options, reporter) as pods:
        account = await _drive(pods, desired.plan, options, reporter)
        reporter.finished(account)
        if options.keep:
            await stay_up(reporter)
        return account


@contextlib.asynccontextmanager
async def local_cluster(state: Path, grace: float = 5.0) -> AsyncIterator[LocalCluster]:
    """A place to run pods; whatever happens, no process and no socket of them is left.

    Raises:
        LocalError: the state directory cannot be used, or another run uses it.
    """
    scratch = make_scratch()
    try:
        cluster = LocalCluster(state, scratch)
        try:
            yield cluster
        finally:
            await cluster.stop(grace)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.asynccontextmanager
async def _pods(
    cluster: LocalCluster, desired: Desired, sizes: Sizes, options: UpOptions, reporter: Reporter
) -> AsyncIterator[list[Pod]]:
    started = time.monotonic()
    deployments = apply_objects(cluster, desired, reporter.line)
    pods = [pod for pod, _ in deployments]
    await asyncio.gather(*(_start_pod(cluster, pod, item, sizes, options) for pod, item in deployments))
    for pod in pods:
        engine = pod.containers[ENGINE_CONTAINER]
        await until(partial(answers, engine_socket(pod), "/health"), engine, f"engine of {pod.name} did not start")
    await pair(pods)
    write_pods(options.state, pods)
    reporter.line(f"{len(pods)} pods ready and paired in {time.monotonic() - started:.1f} s")
    yield pods


async def _start_pod(cluster: LocalCluster, pod: Pod, deployment: Object, sizes: Sizes, options: UpOptions) -> None:
    agent, engine = containers(deployment)
    await start_agent(cluster, pod, agent)
    # A real engine is an image that is not here: its pages, in the layout that it declares, are what counts.
    synthetic = {
        **{key: value for key, value in engine.items() if key in ("name", "env", "volumeMounts")},
        "command": [SYNTHETIC_ENGINE, "--seed", str(options.seed + len(pod.name))],
    }
    pages = {"DISAGG_ENGINE_PAGES": str(sizes.pages[deployment["metadata"]["labels"][LABEL_ROLE]])}
    await cluster.start(pod, synthetic, {**log_level(), **pages})


async def _drive(pods: list[Pod], plan: wire.Plan, options: UpOptions, reporter: Reporter) -> Account:
    endpoints = {
        role: [Endpoint(pod.name, engine_socket(pod)) for pod in pods if pod.role == role]
        for role in ("prefill", "decode")
    }
    driver = Driver(endpoints["prefill"], endpoints["decode"], reporter.advance)
    watchers = [
        asyncio.create_task(_watch(pod, container, driver)) for pod in pods for container in pod.containers.values()
    ]
    block = max(page.block_tokens or 1 for page in plan.destination.pages)
    reporter.begin(options.requests)
    try:
        account = await driver.run(
            Workload(options.requests, options.longest, block, options.seed), options.concurrency
        )
        reporter.end()
        lines = [json.dumps(outcome.document()) for outcome in account.outcomes]
        (options.state / "requests.jsonl").write_text("\n".join(lines) + "\n")
        for endpoint in endpoints["prefill"] + endpoints["decode"]:
            if endpoint.name not in driver.dead:
                try:
                    account.stray_bytes += (await driver.stats(endpoint))["strayBytes"]
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    account.problems.append(f"StrayBytesUnknown: engine {endpoint.name}: {error}")
        account.problems += driver.dead.values()
        return account
    finally:
        reporter.end()
        for watcher in watchers:
            watcher.cancel()
        await driver.close()


async def _watch(pod: Pod, container: Container, driver: Driver) -> None:
    code = await container.process.wait()
    driver.pod_died(pod.name, f"PodDied: container {container.name} of pod {pod.name} ended with {code}")


def check_replicas(snapshot: Snapshot) -> None:
    """Refuse to run a side that has nobody; on a cluster that is a way to pause it.

    Raises:
        Refusal: `NothingToRun`.
    """
    for role in ("prefill", "decode"):
        if snapshot.deployment.spec.role(role).replicas == 0:
            raise Refusal("NothingToRun", f"spec.{role}.replicas", "0 replicas serve no request", "Use at least 1")


async def stay_up(reporter: Reporter) -> None:
    """Wait until interrupted: how a run that is kept ends, and no failure of it."""
    reporter.line("staying up; interrupt to stop")
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


def make_scratch() -> Path:
    """A new directory for sockets, in TMPDIR unless that is too long for a socket's path.

    Raises:
        LocalError: no such directory can be made.
    """
    preferred = tempfile.gettempdir()
    try:
        return Path(tempfile.mkdtemp(prefix="disagg-", dir=preferred if len(preferred) <= _LONGEST_TMPDIR else "/tmp"))
    except OSError as error:
        raise LocalError(f"no directory for sockets can be made: {error}") from error


def with_placement(snapshot: Snapshot, placement: str | None, protocol: str | None) -> Snapshot:
    """The same deployment with movers or transport chosen on the command line."""
    spec = snapshot.deployment.spec
    changes: dict[str, Any] = {}
    if placement is not None:
        changes["agent"] = spec.agent.model_copy(update={"placement": placement})
    if protocol is not None:
        changes["transport"] = spec.transport.model_copy(update={"protocol": protocol})
    deployment = snapshot.deployment.model_copy(update={"spec": spec.model_copy(update=changes)})
    return replace(snapshot, deployment=deployment)
