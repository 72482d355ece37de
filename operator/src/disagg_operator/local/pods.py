"""What local mode does with every pod, whatever its engine: start the agent, wait, introduce, wait for pairing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from disagg_operator.children import Object
from disagg_operator.constants import AGENT_CONTAINER, ENGINE_CONTAINER
from disagg_operator.local.processes import Container, LocalCluster, LocalError, Pod
from disagg_operator.reconcile import Desired

READY_SECONDS = 60.0
_POLL_SECONDS = 0.02


def apply_objects(cluster: LocalCluster, desired: Desired, line: Callable[[str], None]) -> list[tuple[Pod, Object]]:
    """Write every object to disk and make the pods of its Deployments; each pod with its Deployment."""
    deployments: list[tuple[Pod, Object]] = []
    for item in desired.objects:
        path = cluster.apply_object(item)
        if item["kind"] == "ConfigMap":
            line(f"plan ConfigMap written to {path}")
        else:
            deployments += [(pod, item) for pod in cluster.create_pods(item)]
    return deployments


def containers(deployment: Object) -> tuple[Object, Object]:
    """Agent and engine container of a Deployment's pod template."""
    template = deployment["spec"]["template"]["spec"]
    agent = next(item for item in template["initContainers"] if item["name"] == AGENT_CONTAINER)
    engine = next(item for item in template["containers"] if item["name"] == ENGINE_CONTAINER)
    return agent, engine


def log_level() -> dict[str, str]:
    """Quiet unless the user's environment says otherwise."""
    return {"DISAGG_LOG_LEVEL": os.environ.get("DISAGG_LOG_LEVEL", "warning")}


async def start_agent(cluster: LocalCluster, pod: Pod, agent: Object) -> None:
    """Start a pod's agent and wait until it serves: native sidecars start before the engine."""
    container = await cluster.start(pod, agent, log_level())
    await until(lambda: answers(agent_socket(pod), "/healthz"), container, f"agent of {pod.name} did not start")


async def pair(pods: list[Pod], seconds: float = READY_SECONDS) -> None:
    """Wait for every engine's ranks, introduce all agents to each other, wait until every pair is probed."""
    for pod in pods:
        agent = pod.containers[AGENT_CONTAINER]
        failure = f"agent of {pod.name} did not get ready"
        await until(partial(answers, agent_socket(pod), "/readyz"), agent, failure, seconds)
    await introduce(pods)
    await asyncio.gather(*(wait_paired(pod, pods) for pod in pods if pod.role == "decode"))


async def introduce(pods: list[Pod]) -> None:
    """Tell every agent of all agents, as the operator does on a cluster."""
    peers = []
    for pod in pods:
        identity = await ask_agent(pod, "/identity")
        peers.append({key: identity[key] for key in ("role", "replica", "host", "port")})
    for pod in pods:
        await ask_agent(pod, "/peers", {"peers": peers})


async def wait_paired(pod: Pod, pods: list[Pod]) -> None:
    """Wait until a decode pod has probed every prefill pod."""
    expected = sum(1 for other in pods if other.role == "prefill")
    deadline = time.monotonic() + READY_SECONDS
    while True:
        peers = [peer for peer in (await ask_agent(pod, "/peers"))["peers"] if peer["role"] == "prefill"]
        refused = [peer for peer in peers if peer["state"] == "refused"]
        if refused:
            raise LocalError(
                f"pod {pod.name} and {refused[0]['replica']}: {refused[0]['code']}: {refused[0]['message']}"
            )
        if sum(1 for peer in peers if peer["state"] == "ready") == expected:
            return
        if time.monotonic() > deadline:
            states = [(peer["replica"], peer["state"], peer["code"], peer["message"]) for peer in peers]
            raise LocalError(f"pod {pod.name} is not paired after {READY_SECONDS:.0f} s: {states}")
        await asyncio.sleep(_POLL_SECONDS)


async def ask_agent(pod: Pod, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """GET from a pod's agent, or POST a body to it.

    Raises:
        LocalError: it does not answer, with how it ended and the end of its log if it has.
    """
    try:
        async with (
            unix_session(agent_socket(pod)) as session,
            session.request("GET" if body is None else "POST", f"http://pod{path}", json=body) as answer,
        ):
            if answer.status == 200:
                return dict(await answer.json())
            failure = f"answers {path} with {answer.status}: {await answer.text()}"
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        failure = f"does not answer: {error or 'timed out'}"
    container = pod.containers[AGENT_CONTAINER]
    with contextlib.suppress(TimeoutError):
        # Its end may be a moment behind its silence.
        async with asyncio.timeout(1.0):
            await container.process.wait()
    if container.process.returncode is not None:
        failure = f"ended with {container.process.returncode}\n{container.tail()}"
    raise LocalError(f"agent of {pod.name} {failure}")


async def until(
    check: Callable[[], Awaitable[bool]], container: Container, failure: str, seconds: float = READY_SECONDS
) -> None:
    """Wait for a condition; fail at once if the process it waits for has ended."""
    deadline = time.monotonic() + seconds
    while not await check():
        if container.process.returncode is not None:
            raise LocalError(f"{failure}: it ended with {container.process.returncode}\n{container.tail()}")
        if time.monotonic() > deadline:
            raise LocalError(f"{failure} within {seconds:.0f} s\n{container.tail()}")
        await asyncio.sleep(_POLL_SECONDS)


async def answers(socket: Path, path: str) -> bool:
    """Whether a GET on a Unix socket succeeds."""
    try:
        async with unix_session(socket) as session, session.get(f"http://pod{path}") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError):
        return False


def unix_session(socket: Path) -> aiohttp.ClientSession:
    """An HTTP session over a Unix socket."""
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(path=str(socket)), timeout=aiohttp.ClientTimeout(total=10.0)
    )


def agent_socket(pod: Pod) -> Path:
    """Where a pod's agent serves HTTP."""
    return pod.volumes["disagg-run"] / "agent-http.sock"


def engine_socket(pod: Pod) -> Path:
    """Where a synthetic engine serves HTTP."""
    return pod.volumes["disagg-run"] / "engine-http.sock"


def write_pods(state: Path, pods: list[Pod]) -> None:
    """Where the pods are, for whoever wants to look at them while they run."""
    document = [
        {
            "name": pod.name,
            "role": pod.role,
            "agentHttp": str(agent_socket(pod)),
            "engineHttp": str(engine_socket(pod)),
            "pids": {container.name: container.pid for container in pod.containers.values()},
        }
        for pod in pods
    ]
    (state / "pods.json").write_text(json.dumps(document, indent=2) + "\n")
