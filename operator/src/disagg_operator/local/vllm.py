"""`disagg up --engine vllm`: real engines behind vLLM's own router, compared token for token with a single engine."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from disagg_operator.children import LOCAL
from disagg_operator.engine_flags import check_extra_args
from disagg_operator.local.chat import Answer, Comparison, Prompt, ask, compare, make_prompts
from disagg_operator.local.pods import agent_socket, apply_objects, unix_session, write_pods
from disagg_operator.local.processes import LocalError, Pod
from disagg_operator.local.up import Reporter, check_replicas, local_cluster, stay_up
from disagg_operator.local.vllm_pods import VllmPods, find_python, make_model, parse_metric
from disagg_operator.reconcile import Snapshot, reconcile


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


async def up_vllm(snapshot: Snapshot, options: VllmOptions, reporter: Reporter) -> VllmAccount:
    """Run a deployment with real engines on this machine and compare every token.

    Raises:
        PlanError: the deployment is refused.
        LocalError: vLLM is not installed, or something did not come up.
    """
    python = find_python()
    check_replicas(snapshot)
    check_extra_args(snapshot.deployment.spec, "--engine-arg", options.arguments)
    desired = reconcile(snapshot, LOCAL)
    if desired.plan is None:
        raise desired.refusal or LocalError("reconcile gave no plan")
    if snapshot.deployment.spec.engine.name != "vllm":
        raise LocalError(f"the deployment declares engine {snapshot.deployment.spec.engine.name!r}, not vllm")
    reporter.mapping(desired.plan)
    async with local_cluster(options.state, grace=15.0) as cluster:
        spec = snapshot.deployment.spec
        pods = VllmPods(cluster, python, await make_model(python, cluster.scratch), spec, options.arguments)
        reporter.line("starting engines, a single engine to compare with, and vllm-router")
        started = time.monotonic()
        await pods.start(apply_objects(cluster, desired, reporter.line), beside=True)
        write_pods(options.state, pods.pods)
        router = await pods.start_router()
        reporter.line(f"{len(pods.pods)} pods ready and paired in {time.monotonic() - started:.1f} s")
        reporter.line("one answer from each engine by itself: the first takes long")
        await pods.warm_up()
        account = await _drive(pods, spec.model.name, (router, pods.urls["reference"]), options, reporter)
        reporter.finished(account)
        if options.keep:
            reporter.line(f"router at {router}")
            await stay_up(reporter)
        return account


async def _drive(
    pods: VllmPods, model: str, urls: tuple[str, str], options: VllmOptions, reporter: Reporter
) -> VllmAccount:
    """Send every prompt through the router, and to the single engine."""
    prompts = make_prompts(options.prompts, options.longest, options.seed)
    gate = asyncio.Semaphore(options.concurrency)
    started = time.monotonic()
    reporter.begin(len(prompts))
    timeout = aiohttp.ClientTimeout(total=120.0)
    # A server may close an idle connection just when it is used again: a fresh one for each prompt.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def one(prompt: Prompt) -> tuple[Answer, Answer]:
            async with gate:
                answer, reference = [await ask(session, url, model, prompt, options.generate) for url in urls]
            reporter.advance(answer.outcome(prompt))
            return answer, reference

        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
    reporter.end()
    account = VllmAccount(compare(prompts, answers), seconds=time.monotonic() - started)
    for pod in pods.role("decode"):
        account.moved_bytes += await moved_bytes(pod)
    account.problems = [
        f"PodDied: container {container.name} of pod {pod.name} ended with {container.process.returncode}"
        for pod in pods.cluster.pods
        for container in pod.containers.values()
        if container.process.returncode is not None
    ]
    return account


async def moved_bytes(pod: Pod) -> int:
    """Bytes that a decode pod's agent has moved so far."""
    async with unix_session(agent_socket(pod)) as session, session.get("http://agent/metrics") as answer:
        return int(parse_metric(await answer.text(), "disagg_moved_bytes_total", f"agent of {pod.name}"))


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
