"""A fleet of real engines that all tests here share: starting one takes a minute, so it is started once.

One prefill engine with chunked prefill and few blocks; two decode engines with few blocks, one that fails a request
whose cache did not come and one that computes it anew. Tests talk to engines as a router does, or through the router.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
import yaml

from disagg_operator.children import LOCAL
from disagg_operator.constants import AGENT_CONTAINER, ENGINE_CONTAINER
from disagg_operator.local.chat import Answer, Prompt, ask
from disagg_operator.local.pods import apply_objects, ask_agent
from disagg_operator.local.processes import Container, LocalCluster, Pod
from disagg_operator.local.up import local_cluster
from disagg_operator.local.vllm_pods import INSTALL, VllmPods, engine_metric, make_model
from disagg_operator.reconcile import Snapshot, reconcile
from disagg_operator.types import parse_deployment

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DISAGG_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
MODEL = "tiny-llama"
BLOCK = 32
LEASE_SECONDS = 15
POLL_SECONDS = 0.05
PREFILL_ARGUMENTS = ["--num-gpu-blocks-override", "160", "--max-num-batched-tokens", "128", "--max-num-seqs", "16"]
DECODE_ARGUMENTS = ["--num-gpu-blocks-override", "64", "--max-num-seqs", "16"]

T = TypeVar("T")


@dataclass
class Fleet:
    """Engines, and what tests do with them."""

    pods: VllmPods
    router: str
    session: aiohttp.ClientSession
    loop: asyncio.AbstractEventLoop
    known: dict[tuple[tuple[int, ...], int], Answer] = field(default_factory=dict)

    @property
    def prefill(self) -> Pod:
        return self.pods.role("prefill")[0]

    @property
    def fails(self) -> Pod:
        """The decode pod whose engine fails a request whose cache did not come."""
        return self.pods.role("decode")[0]

    @property
    def recomputes(self) -> Pod:
        """The decode pod whose engine computes anew what did not come."""
        return self.pods.role("decode")[1]

    def run(self, work: Coroutine[Any, Any, T], seconds: float = 240.0) -> T:
        """Run on the fleet's event loop."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self.loop).result()

    async def hold(self, tokens: tuple[int, ...]) -> dict[str, Any]:
        """Prefill a prompt as a router does; the `kv_transfer_params` for decode."""
        answer = await self.post(self.prefill, tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        return dict(answer["kv_transfer_params"])

    async def post(self, pod: Pod, tokens: tuple[int, ...], generate: int, params: Any = None) -> dict[str, Any]:
        """One completion that is not streamed; the answer's document, errors too."""
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": generate, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "kv_transfer_params": params}
        async with self.session.post(f"{self.pods.urls[pod.name]}/v1/completions", json=body) as answer:
            return dict(json.loads(await answer.text()))

    async def decode(self, pod: Pod, tokens: tuple[int, ...], generate: int, params: Any) -> Answer:
        """Stream a completion from a decode engine."""
        return await ask(self.session, self.pods.urls[pod.name], MODEL, Prompt(0, tokens), generate, params)

    async def serve(self, pod: Pod, tokens: tuple[int, ...], generate: int) -> Answer:
        """Both halves of a request."""
        return await self.decode(pod, tokens, generate, await self.hold(tokens))

    async def through_router(self, tokens: tuple[int, ...], generate: int) -> Answer:
        """A request as a user sends it."""
        return await ask(self.session, self.router, MODEL, Prompt(0, tokens), generate)

    async def expected(self, tokens: tuple[int, ...], generate: int) -> list[int]:
        """What one engine answers that computes everything by itself."""
        key = (tokens, generate)
        if key not in self.known:
            self.known[key] = await ask(
                self.session, self.pods.urls[self.prefill.name], MODEL, Prompt(0, tokens), generate
            )
            assert not self.known[key].error
        return self.known[key].tokens

    async def settled(self, seconds: float = 3 * LEASE_SECONDS) -> None:
        """Wait until no living engine uses a block and no agent has a hold or a load."""
        deadline = time.monotonic() + seconds
        while left := await self.left():
            if time.monotonic() > deadline:
                pytest.fail(f"{seconds:.0f} s after the last request: {left}")
            await asyncio.sleep(POLL_SECONDS)

    async def left(self) -> dict[str, Any]:
        """What is not given back yet."""
        found: dict[str, Any] = {}
        for pod in self.pods.pods:
            transfers = await ask_agent(pod, "/transfers")
            if any(transfers.values()):
                found[f"{pod.name} agent"] = transfers
            if pod.containers[ENGINE_CONTAINER].process.returncode is None:
                usage = await self.metric(pod, "vllm:kv_cache_usage_perc")
                if usage:
                    found[f"{pod.name} engine"] = usage
        return found

    async def metric(self, pod: Pod, name: str) -> float:
        """A metric of a pod's engine."""
        return await engine_metric(self.pods.urls[pod.name], name)

    async def kill_engine(self, pod: Pod) -> None:
        """`kill -9` of everything that the engine container runs."""
        await self._kill(pod.containers[ENGINE_CONTAINER])

    async def kill_agent(self, pod: Pod) -> None:
        """`kill -9` of a pod's agent."""
        await self._kill(pod.containers[AGENT_CONTAINER])

    async def _kill(self, container: Container) -> None:
        os.killpg(container.pid, signal.SIGKILL)
        await container.process.wait()


def prompt(length: int, salt: int) -> tuple[int, ...]:
    """A prompt that begins like no other salt's, but like a longer one of the same salt."""
    source = random.Random(salt)
    return tuple(source.randrange(3, 512) for _ in range(length))


@pytest.fixture(name="prompt", scope="session")
def prompt_fixture() -> Any:
    return prompt


def _overrides(args: list[str], policy: str) -> list[str]:
    """The rendered transfer config with another policy, and the connector that can be wrong on demand."""
    config = json.loads(args[args.index("--kv-transfer-config") + 1])
    config |= {"kv_load_failure_policy": policy}
    config |= {"kv_connector": "SwappedPages", "kv_connector_module_path": "swapped_pages"}
    return ["--kv-transfer-config", json.dumps(config)]


async def _start(cluster: LocalCluster) -> tuple[VllmPods, str]:
    document = yaml.safe_load((ROOT / "examples" / "tiny-llama-vllm.yaml").read_text())
    document["spec"]["decode"] |= {"replicas": 2, "parallelism": {"tensor": 1}}
    document["spec"]["transport"] = {"leaseSeconds": LEASE_SECONDS, "deadlineSeconds": 2 * LEASE_SECONDS}
    deployment = parse_deployment(document)
    desired = reconcile(Snapshot(deployment), LOCAL)
    assert desired.plan is not None
    made = apply_objects(cluster, desired, lambda _line: None)
    path = [str(ROOT / "tests" / "vllm" / "connectors"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"PYTHONPATH": os.pathsep.join(path)}
    pods = VllmPods(cluster, PYTHON, await make_model(PYTHON, cluster.scratch), deployment.spec, env=env)
    own: dict[str, list[str]] = {}
    policies = iter(["fail", "recompute"])
    for pod, item in made:
        if pod.role == "prefill":
            own[pod.name] = PREFILL_ARGUMENTS
        else:
            args = item["spec"]["template"]["spec"]["containers"][0]["args"]
            own[pod.name] = [*DECODE_ARGUMENTS, *_overrides(args, next(policies))]
    await pods.start(made, own=own)
    return pods, await pods.start_router()


async def _live(state: Path, ready: futures.Future[Fleet], stop: asyncio.Event) -> None:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=120.0)
    async with (
        local_cluster(state, grace=15.0) as cluster,
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        starting = asyncio.create_task(_start(cluster))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        pods, router = starting.result()
        ready.set_result(Fleet(pods, router, session, asyncio.get_running_loop()))
        await stopped


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    if not PYTHON.exists():
        pytest.skip(f"NO REAL ENGINE IS TESTED: {INSTALL}")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fleet")
    thread.start()
    stop = asyncio.Event()
    ready: futures.Future[Fleet] = futures.Future()
    life = asyncio.run_coroutine_threadsafe(_live(tmp_path_factory.mktemp("fleet"), ready, stop), loop)
    try:
        futures.wait([life, ready], return_when=futures.FIRST_COMPLETED)
        if not ready.done():
            life.result()
        yield ready.result()
    finally:
        loop.call_soon_threadsafe(stop.set)
        futures.wait([life])
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    life.result()
