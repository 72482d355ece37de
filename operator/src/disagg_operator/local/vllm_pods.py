"""Pods with real vLLM engines as processes, vLLM's own router, and a single engine beside to compare with."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from disagg_operator.children import Object
from disagg_operator.constants import ENGINE_CONTAINER
from disagg_operator.local.pods import containers, pair, start_agent
from disagg_operator.local.processes import Container, LocalCluster, LocalError, Pod
from disagg_operator.local.vllm_env import ENGINE_ENV
from disagg_operator.types import DeploymentSpec

ENGINE_SECONDS = 300.0
"""How long an engine may take to start; one takes a minute where it has a core to itself."""

_POLL_SECONDS = 0.25

INSTALL = (
    "vLLM is not installed: run `make install-vllm` (about 6.5 GB, several minutes), or name a Python that has it with "
    "DISAGG_VLLM_PYTHON"
)


def find_python() -> Path:
    """The Python that has vLLM: `DISAGG_VLLM_PYTHON`, or `.venv-vllm` beside our own environment.

    Raises:
        LocalError: neither is there; the message says what to install and how large it is.
    """
    named = os.environ.get("DISAGG_VLLM_PYTHON")
    python = Path(named) if named else Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        raise LocalError(INSTALL)
    if not python.is_file() or not os.access(python, os.X_OK):
        raise LocalError(f"DISAGG_VLLM_PYTHON is {named}, which is not a program that can be run")
    return python


@dataclass
class VllmPods:
    """Engines of one deployment on this machine.

    Attributes:
        python: has vLLM installed.
        model: folder of the model, mounted into every pod that has a volume `model`.
        arguments: further engine arguments, for every engine.
        env: further environment of every engine.
        pods: those of the deployment, in the order of their Deployments.
        urls: HTTP address of each pod's engine, by the pod's name.
    """

    cluster: LocalCluster
    python: Path
    model: Path
    spec: DeploymentSpec
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    pods: list[Pod] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)
    _objects: dict[str, Object] = field(default_factory=dict)
    _agents: dict[str, Object] = field(default_factory=dict)

    def role(self, role: str) -> list[Pod]:
        """Pods of a role."""
        return [pod for pod in self.pods if pod.role == role]

    async def start(
        self,
        deployments: Sequence[tuple[Pod, Object]],
        beside: bool = False,
        own: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Start agents first, then all engines at once, then pair.

        Args:
            beside: also start one engine that is not disaggregated, `reference`.
            own: further engine arguments of single pods, by name.

        Raises:
            LocalError: something did not come up, with the end of its log.
        """
        waits: list[Awaitable[object]] = []
        for pod, deployment in deployments:
            agent, engine = containers(deployment)
            self.pods.append(pod)
            self._agents[pod.name] = agent
            self._objects[pod.name] = {
                **engine,
                "args": [*(engine.get("args") or []), *self.arguments, *(own or {}).get(pod.name, ())],
            }
            await start_agent(self.cluster, pod, agent)
            self._place_model(pod)
            self.urls[pod.name] = f"http://127.0.0.1:{free_port()}"
            waits.append(self._wait(pod.name, await self.start_engine(pod)))
        if beside:
            waits.append(self.start_plain("reference"))
        await asyncio.gather(*waits)
        await pair(self.pods)

    async def start_plain(self, name: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Pod:
        """Start an engine with the user's own arguments and nothing of ours, and wait until it serves.

        Raises:
            LocalError: it does not come up.
        """
        pod = Pod(name, "", "plain", {"model": self.cluster.scratch / name})
        self.cluster.pods.append(pod)
        pod.volumes["model"].mkdir()
        self._place_model(pod)
        self.urls[name] = f"http://127.0.0.1:{free_port()}"
        self._objects[name] = self._plain_container(arguments, env or {})
        await self._wait(name, await self.start_engine(pod))
        return pod

    async def start_engine(self, pod: Pod) -> Container:
        """Start a pod's engine, also again after it has ended; where it listens stays the same."""
        container = self._objects[pod.name]
        words = [str(word) for word in container.get("args") or []]
        port = self.urls[pod.name].rpartition(":")[2]
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port]
        described = {**container, "command": command, "args": words}
        return await self.cluster.start(pod, described, {**ENGINE_ENV, **self.env})

    async def restart_engine(self, pod: Pod) -> None:
        """Start a pod's engine again and wait until it serves and its ranks are paired.

        Raises:
            LocalError: it does not come up.
        """
        await self._wait(pod.name, await self.start_engine(pod))
        await pair(self.pods)

    async def warm_up(self) -> None:
        """Let every engine answer once, one after the other: first steps of several would starve each other.

        Raises:
            LocalError: an engine does not answer.
        """
        timeout = aiohttp.ClientTimeout(total=ENGINE_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for name, url in self.urls.items():
                body = {"model": self.spec.model.name, "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0}
                try:
                    async with session.post(f"{url}/v1/completions", json=body) as answer:
                        if answer.status != 200:
                            raise LocalError(f"engine of {name} answers {answer.status}: {await answer.text()}")
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    raise LocalError(f"engine of {name} does not answer: {error or 'timed out'}") from error

    async def restart_agent(self, pod: Pod) -> None:
        """Start a pod's agent again and wait until its engine has found it and its ranks are paired.

        Raises:
            LocalError: it does not come up.
        """
        await start_agent(self.cluster, pod, self._agents[pod.name])
        await pair(self.pods)

    async def start_router(self) -> str:
        """Start vLLM's own router in front of all pods; its address.

        Raises:
            LocalError: it does not come up.
        """
        port, metrics = free_port(), free_port()
        url = f"http://127.0.0.1:{port}"
        command = [str(self.python.parent / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        for pod in self.pods:
            command += [f"--{pod.role}", self.urls[pod.name]]
        command += ["--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(metrics)]
        pod = Pod("router", "", "router", {})
        self.cluster.pods.append(pod)
        await wait_healthy(url, await self.cluster.start(pod, {"name": "router", "command": command}, {}))
        return url

    async def _wait(self, name: str, container: Container) -> None:
        await wait_healthy(self.urls[name], container)

    def _plain_container(self, arguments: Sequence[str], env: Mapping[str, str]) -> Object:
        """The engine as the user wrote it, without anything of ours but the name that clients ask for."""
        template = self.spec.prefill.template["spec"]
        user = next(item for item in template["containers"] if item["name"] == ENGINE_CONTAINER)
        own = ["--served-model-name", self.spec.model.name, "--block-size", str(self.spec.kv_cache.block_size)]
        return {
            "name": ENGINE_CONTAINER,
            "args": [*(user.get("args") or []), *own, *self.arguments, *arguments],
            "env": [{"name": name, "value": value} for name, value in env.items()],
            "volumeMounts": [mount for mount in user.get("volumeMounts") or [] if mount["name"] == "model"],
        }

    def _place_model(self, pod: Pod) -> None:
        """Put the model where the pod template mounts its `model` volume."""
        if "model" in pod.volumes:
            (pod.volumes["model"] / self.model.name).symlink_to(self.model)


async def wait_healthy(url: str, container: Container) -> None:
    """Wait until a server answers on /health.

    Raises:
        LocalError: it ended, or did not start in `ENGINE_SECONDS`; with the end of its log.
    """
    deadline = time.monotonic() + ENGINE_SECONDS
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0)) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            if container.process.returncode is not None:
                raise LocalError(f"{container.log.stem} ended while starting\n{container.tail(15)}")
            if time.monotonic() > deadline:
                raise LocalError(f"{container.log.stem} did not start in {ENGINE_SECONDS:.0f} s\n{container.tail(15)}")
            await asyncio.sleep(_POLL_SECONDS)


async def make_model(python: Path, scratch: Path) -> Path:
    """Make the tiny model of random weights; its folder.

    Raises:
        LocalError: the installed packages cannot make it.
    """
    folder = scratch / "model" / "tiny-llama"
    process = await asyncio.create_subprocess_exec(
        str(python),
        "-m",
        "disagg_agent.engines.vllm.tiny_model",
        str(folder),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise LocalError(f"the tiny model cannot be made:\n{output.decode(errors='replace')[-2000:]}")
    return folder


async def engine_metric(url: str, name: str) -> float:
    """Sum of a metric over its labels, as an engine serves it.

    Raises:
        LocalError: the engine has no such metric.
    """
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        return parse_metric(await answer.text(), name, url)


def parse_metric(text: str, name: str, whose: str) -> float:
    """Sum of a metric over its labels.

    Raises:
        LocalError: there is no such metric.
    """
    found = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    if not found:
        raise LocalError(f"{whose} has no metric {name}")
    return sum(float(line.rsplit(maxsplit=1)[1]) for line in found)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
