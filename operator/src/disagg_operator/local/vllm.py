"""`disagg up --engine vllm`: the same pods with real engines, vLLM's own router, and a single engine beside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from disagg_operator.children import LOCAL, Object
from disagg_operator.constants import AGENT_CONTAINER, ENGINE_CONTAINER
from disagg_operator.local.chat import Answer, Comparison, Prompt, ask, compare, make_prompts
from disagg_operator.local.pods import (
    agent_socket,
    apply_objects,
    containers,
    pair,
    start_agent,
    unix_session,
    write_pods,
)
from disagg_operator.local.processes import Container, LocalCluster, LocalError, Pod
from disagg_operator.local.up import Reporter, check_replicas, local_cluster, stay_up
from disagg_operator.reconcile import Snapshot, reconcile

_ENGINE_SECONDS = 300.0
_POLL_SECONDS = 0.25

INSTALL = (
    "vLLM is not installed: run `make install-vllm` (about 6.5 GB, several minutes), or name a Python that has it with "
    "DISAGG_VLLM_PYTHON"
)

_VLLM_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@dataclass(frozen=True)
class VllmOptions:
    """Choices of a run.

    Attributes:
        prompts: how many to send.
        longest: tokens of the longest prompt.
        generate: tokens that each answer has.
        arguments: further engine arguments, for every engine.
    """

    prompts: int
    longest: int
    generate: int
    concurrency: int
    seed: int
    state: Path
    keep: bool
    arguments: tuple[str, ...] = ()


@dataclass
class VllmAccount:
    """What a run found."""

    comparison: Comparison
    moved_bytes: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Every answer is the single engine's, or differs first where two tokens are as good as equal."""
        return self.comparison.good and not self.problems and self.moved_bytes > 0

    def document(self) -> dict[str, Any]:
        """What `-o json` prints."""
        return {
            **self.comparison.document(),
            "movedBytes": self.moved_bytes,
            "seconds": round(self.seconds, 3),
            "problems": self.problems,
        }


def find_python() -> Path:
    """The Python that has vLLM: `DISAGG_VLLM_PYTHON`, or `.venv-vllm` beside our own environment.

    Raises:
        LocalError: neither is there; the message says what to install and how large it is.
    """
    named = os.environ.get("DISAGG_VLLM_PYTHON")
    python = Path(named) if named else Path(sys.prefix).parent / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        raise LocalError(INSTALL)
    return python


async def up_vllm(snapshot: Snapshot, options: VllmOptions, reporter: Reporter) -> VllmAccount:
    """Run a deployment with real engines on this machine and compare every token.

    Raises:
        PlanError: the deployment is refused.
        LocalError: vLLM is not installed, or something did not come up.
    """
    python = find_python()
    check_replicas(snapshot)
    desired = reconcile(snapshot, LOCAL)
    if desired.plan is None:
        raise desired.refusal or LocalError("reconcile gave no plan")
    if snapshot.deployment.spec.engine.name != "vllm":
        raise LocalError(f"the deployment declares engine {snapshot.deployment.spec.engine.name!r}, not vllm")
    reporter.mapping(desired.plan)
    async with local_cluster(options.state, grace=15.0) as cluster:
        model = await _make_model(python, cluster.scratch)
        reporter.line("starting engines, a single engine to compare with, and vllm-router")
        started = time.monotonic()
        run = _Run(cluster, python, model, options, snapshot)
        await run.start(apply_objects(cluster, desired, reporter.line))
        reporter.line(f"{len(run.pods)} pods ready and paired in {time.monotonic() - started:.1f} s")
        account = await run.drive(reporter)
        reporter.finished(account)
        if options.keep:
            reporter.line(f"router at {run.router_url}")
            await stay_up(reporter)
        return account


@dataclass
class _Run:
    cluster: LocalCluster
    python: Path
    model: Path
    options: VllmOptions
    snapshot: Snapshot
    pods: list[Pod] = field(default_factory=list)
    router_url: str = ""
    reference_url: str = ""

    async def start(self, deployments: list[tuple[Pod, Object]]) -> None:
        """Agents first, then all engines at once, then pairing, then the router."""
        self.pods = [pod for pod, _ in deployments]
        urls: dict[str, list[str]] = {"prefill": [], "decode": []}
        waits = []
        for pod, deployment in deployments:
            agent, engine = containers(deployment)
            await start_agent(self.cluster, pod, agent)
            self._place_model(pod)
            port = free_port()
            urls[pod.role].append(f"http://127.0.0.1:{port}")
            waits.append((urls[pod.role][-1], await self._engine(pod, engine, port)))
        reference = Pod("reference", "", "reference", {"model": self.cluster.scratch / "reference"})
        self.cluster.pods.append(reference)
        reference.volumes["model"].mkdir()
        self._place_model(reference)
        port = free_port()
        self.reference_url = f"http://127.0.0.1:{port}"
        plain = self._reference_container(deployments[0][1])
        waits.append((self.reference_url, await self._engine(reference, plain, port)))
        await asyncio.gather(*(self._healthy(url, container) for url, container in waits))
        await pair(self.pods)
        write_pods(self.options.state, self.pods)
        await self._router(urls)

    async def drive(self, reporter: Reporter) -> VllmAccount:
        """Send every prompt through the router, and to the single engine."""
        prompts = make_prompts(self.options.prompts, self.options.longest, self.options.seed)
        model = self.snapshot.deployment.spec.model.name
        gate = asyncio.Semaphore(self.options.concurrency)
        started = time.monotonic()
        reporter.begin(len(prompts))
        timeout = aiohttp.ClientTimeout(total=120.0)
        # A server may close an idle connection just when it is used again: a fresh one for each prompt.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

            async def one(prompt: Prompt) -> tuple[Answer, Answer]:
                async with gate:
                    answer = await ask(session, self.router_url, model, prompt, self.options.generate)
                    reference = await ask(session, self.reference_url, model, prompt, self.options.generate)
                reporter.advance(answer.outcome(prompt))
                return answer, reference

            answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        reporter.end()
        account = VllmAccount(compare(prompts, answers), seconds=time.monotonic() - started)
        for pod in self.pods:
            if pod.role == "decode":
                account.moved_bytes += await _moved_bytes(pod)
        account.problems = [
            f"PodDied: container {container.name} of pod {pod.name} ended with {container.process.returncode}"
            for pod in self.cluster.pods
            for container in pod.containers.values()
            if container.process.returncode is not None
        ]
        return account

    async def _engine(self, pod: Pod, container: Object, port: int) -> Container:
        words = [str(word) for word in container.get("args") or []]
        tensor = int(words[words.index("--tensor-parallel-size") + 1]) if "--tensor-parallel-size" in words else 1
        command = [
            str(self.python),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ]
        env = {**_VLLM_ENV, "VLLM_CPU_OMP_THREADS_BIND": "nobind" if tensor == 1 else _binding(tensor)}
        arguments = [*words, *self.options.arguments]
        started = await self.cluster.start(pod, {**container, "command": command, "args": arguments}, env)
        return started

    def _reference_container(self, deployment: Object) -> Object:
        """The engine as the user wrote it, without anything of ours but the name that clients ask for."""
        _, engine = containers(deployment)
        spec = self.snapshot.deployment.spec
        user = next(item for item in spec.prefill.template["spec"]["containers"] if item["name"] == ENGINE_CONTAINER)
        own = ["--served-model-name", spec.model.name, "--block-size", str(spec.kv_cache.block_size)]
        mounts = [mount for mount in engine["volumeMounts"] if mount["name"] == "model"]
        return {"name": "engine", "args": [*(user.get("args") or []), *own], "volumeMounts": mounts}

    def _place_model(self, pod: Pod) -> None:
        """Put the model where the pod template mounts its `model` volume."""
        if "model" in pod.volumes:
            (pod.volumes["model"] / self.model.name).symlink_to(self.model)

    async def _router(self, urls: dict[str, list[str]]) -> None:
        port, metrics = free_port(), free_port()
        self.router_url = f"http://127.0.0.1:{port}"
        command = [str(self.python.parent / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        for url in urls["prefill"]:
            command += ["--prefill", url]
        for url in urls["decode"]:
            command += ["--decode", url]
        command += ["--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(metrics)]
        pod = Pod("router", "", "router", {})
        self.cluster.pods.append(pod)
        container = await self.cluster.start(pod, {"name": "router", "command": command}, {})
        await self._healthy(self.router_url, container)

    async def _healthy(self, url: str, container: Container) -> None:
        deadline = time.monotonic() + _ENGINE_SECONDS
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError):
                    async with session.get(f"{url}/health") as answer:
                        if answer.status == 200:
                            return
                if container.process.returncode is not None:
                    raise LocalError(f"{container.log.stem} ended while starting\n{container.tail(15)}")
                if time.monotonic() > deadline:
                    raise LocalError(
                        f"{container.log.stem} did not start in {_ENGINE_SECONDS:.0f} s\n{container.tail(15)}"
                    )
                await asyncio.sleep(_POLL_SECONDS)


async def _make_model(python: Path, scratch: Path) -> Path:
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


async def _moved_bytes(pod: Pod) -> int:
    async with unix_session(agent_socket(pod)) as session, session.get("http://agent/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("disagg_moved_bytes_total "):
                return int(float(line.split()[1]))
    raise LocalError(f"agent of {pod.name} has no metric disagg_moved_bytes_total ({AGENT_CONTAINER})")


def _binding(tensor: int) -> str:
    """One core for each worker, as far as there are cores."""
    cores = os.cpu_count() or 1
    return "|".join(str(rank % cores) for rank in range(tensor))


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe(account: VllmAccount) -> list[tuple[str, str]]:
    """Rows of the summary."""
    document = account.document()
    latency = document["timeToFirstToken"]
    rows = [
        ("prompts", f"{document['prompts']} ({document['failed']} failed)"),
        ("token for token", f"{document['identical']} identical, {document['tied']} differ first at a tie"),
        ("different", str(document["different"])),
        ("first token", f"p50 {latency['p50'] * 1e3:.1f} ms, p99 {latency['p99'] * 1e3:.1f} ms"),
        ("single engine", f"p50 {document['referenceTimeToFirstToken']['p50'] * 1e3:.1f} ms to the first token"),
        ("per token", f"p50 {document['timePerToken']['p50'] * 1e3:.2f} ms"),
        ("moved bytes", f"{document['movedBytes']:,}"),
    ]
    rows += [("failed", json.dumps(reason)) for reason in document["failures"][:5]]
    return rows + [("problem", problem) for problem in account.problems]
