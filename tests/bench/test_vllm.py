"""Real engines: latency beside vLLM's own NixlConnector, what being idle costs, what others' transfers cost a stream.

Everything is a ratio or a difference within one run; engines that are compared run one after the other, never at the
same time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from disagg_operator.children import LOCAL
from disagg_operator.constants import AGENT_CONTAINER, ENGINE_CONTAINER
from disagg_operator.local.chat import Prompt, ask
from disagg_operator.local.pods import apply_objects
from disagg_operator.local.processes import Pod
from disagg_operator.local.up import local_cluster
from disagg_operator.local.vllm_pods import INSTALL, VllmPods, free_port, make_model
from disagg_operator.reconcile import Snapshot, reconcile
from disagg_operator.types import parse_deployment

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DISAGG_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")
MODEL = "tiny-llama"
WARM, REQUESTS = 5, 25
FIRST_TRIES = 10
IDLE_SECONDS = 10.0
SETTLE_SECONDS = 3.0
ROUNDS = 10
STREAM = 900
PERIOD = 0.6
OTHERS = 10
TO_DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason=f"NO REAL ENGINE IS MEASURED: {INSTALL}"),
]


@dataclass
class Figures:
    """What one pair of engines showed; seconds, and cores for `idle`."""

    latency: list[float] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)


@dataclass
class Engines:
    """A prefill and a decode engine, whatever moves between them."""

    session: aiohttp.ClientSession
    prefill: str
    decode: str

    async def hold(self, tokens: tuple[int, ...]) -> dict[str, Any]:
        """Prefill a prompt."""
        body = {"model": MODEL, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        body["kv_transfer_params"] = TO_DECODE
        async with self.session.post(f"{self.prefill}/v1/completions", json=body) as answer:
            return dict((await answer.json())["kv_transfer_params"])

    async def serve(self, tokens: tuple[int, ...], generate: int = 4) -> float:
        """Both halves; seconds from the first byte sent to the last token."""
        started = time.monotonic()
        params = await self.hold(tokens)
        answer = await ask(self.session, self.decode, MODEL, Prompt(0, tokens), generate, params)
        assert answer.error == ""
        return time.monotonic() - started

    async def first(self, tokens: tuple[int, ...]) -> None:
        """Until one request has worked: NixlConnector's engines meet at their first request, which may fail."""
        for _ in range(FIRST_TRIES):
            params = await self.hold(tokens)
            if not (await ask(self.session, self.decode, MODEL, Prompt(0, tokens), 4, params)).error:
                return
        pytest.fail(f"{FIRST_TRIES} requests have failed")

    async def latency(self) -> list[float]:
        """Requests one after the other."""
        seconds = [await self.serve(prompt(400, salt)) for salt in range(WARM + REQUESTS)]
        return seconds[WARM:]


def prompt(length: int, salt: int) -> tuple[int, ...]:
    source = random.Random(salt)
    return tuple(source.randrange(3, 512) for _ in range(length))


@asynccontextmanager
async def opened(state: Path, replicas: int) -> AsyncIterator[tuple[VllmPods, aiohttp.ClientSession]]:
    """The pods of a 1 -> 1 deployment, started if there are `replicas`; prefill never finds a prompt in its cache."""
    document = yaml.safe_load((ROOT / "examples" / "tiny-llama-vllm.yaml").read_text())
    document["spec"]["decode"]["parallelism"] = {"tensor": 1}
    deployment = parse_deployment(document)
    desired = reconcile(Snapshot(deployment), LOCAL)
    connector = aiohttp.TCPConnector(force_close=True)
    async with local_cluster(state, grace=15.0) as cluster, aiohttp.ClientSession(connector=connector) as session:
        pods = VllmPods(cluster, PYTHON, await make_model(PYTHON, cluster.scratch), deployment.spec)
        if replicas:
            made = apply_objects(cluster, desired, lambda _line: None)
            own = {pod.name: ["--no-enable-prefix-caching"] for pod, _ in made if pod.role == "prefill"}
            await pods.start(made, own=own)
        yield pods, session


async def idle_cores(groups: dict[str, list[int]]) -> dict[str, float]:
    """Cores that process groups use while nothing is asked of them."""
    # vLLM itself spins for a second after each message between its processes.
    await asyncio.sleep(SETTLE_SECONDS)
    before, started = {name: cpu_seconds(pids) for name, pids in groups.items()}, time.monotonic()
    # Idleness can only be measured over time.
    await asyncio.sleep(IDLE_SECONDS)
    passed = time.monotonic() - started
    return {name: (cpu_seconds(pids) - before[name]) / passed for name, pids in groups.items()}


def cpu_seconds(groups: list[int]) -> float:
    """CPU time of all processes of these process groups."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) in groups:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def pids(pod: Pod) -> list[int]:
    return [container.pid for name, container in pod.containers.items() if name in (AGENT_CONTAINER, ENGINE_CONTAINER)]


async def ours(state: Path) -> Figures:
    async with opened(state, 1) as (pods, session):
        (prefill,), (decode,) = pods.role("prefill"), pods.role("decode")
        plain = await pods.start_plain("plain")
        engines = Engines(session, pods.urls[prefill.name], pods.urls[decode.name])
        await engines.serve(prompt(400, 999))
        idle = await idle_cores({"plain": pids(plain), "prefill": pids(prefill), "decode": pids(decode)})
        return Figures(await engines.latency(), idle)


async def nixl_connector(state: Path) -> Figures:
    async with opened(state, 0) as (pods, session):

        async def start(role: str) -> Pod:
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            # One path for both: NixlConnector takes the model's path to be part of what must be equal.
            arguments = ["--model", str(pods.model), "--kv-transfer-config", json.dumps(transfer)]
            return await pods.start_plain(role.replace("_", "-"), arguments, env)

        prefill, decode = await asyncio.gather(start("kv_producer"), start("kv_consumer"))
        engines = Engines(session, pods.urls[prefill.name], pods.urls[decode.name])
        await engines.first(prompt(400, 999))
        idle = await idle_cores({"prefill": pids(prefill), "decode": pids(decode)})
        return Figures(await engines.latency(), idle)


def test_latency_and_idleness_beside_nixl_connector(tmp_path: Path) -> None:
    figures = asyncio.run(ours(tmp_path / "ours"))
    other = asyncio.run(nixl_connector(tmp_path / "nixl"))
    ratio = statistics.median(figures.latency) / statistics.median(other.latency)
    print(
        f"\nlatency of 400 tokens in, 4 out: median {statistics.median(figures.latency) * 1e3:.0f} ms, "
        f"NixlConnector {statistics.median(other.latency) * 1e3:.0f} ms, ratio {ratio:.3f}"
    )
    for role in ("prefill", "decode"):
        print(
            f"idle {role}: engine and agent {figures.idle[role]:.3f} cores, engine alone {figures.idle['plain']:.3f}, "
            f"NixlConnector {other.idle[role]:.3f}"
        )
        assert figures.idle[role] - figures.idle["plain"] < 0.05
    assert ratio <= 0.5


async def stream_beside(engines: Engines, prompts: list[tuple[int, ...]], number: int) -> tuple[float, int]:
    """Seconds per token of a long answer while one of these prompts is sent every `PERIOD` seconds, and how many of
    them were answered meanwhile."""
    tokens = prompt(33, 50_000 + number)
    params = await engines.hold(tokens)

    async def one(position: int) -> None:
        await asyncio.sleep(position * PERIOD)
        await engines.serve(prompts[position], generate=1)

    others = [asyncio.create_task(one(position)) for position in range(len(prompts))]
    answer = await ask(engines.session, engines.decode, MODEL, Prompt(0, tokens), STREAM, params)
    assert answer.error == ""
    served = sum(task.done() for task in others)
    await asyncio.gather(*others)
    return (answer.total_seconds - answer.first_seconds) / (len(answer.tokens) - 1), served


async def rounds(state: Path) -> list[tuple[tuple[float, int], tuple[float, int]]]:
    """Seconds per token and requests answered: beside transfers of whole prompts, and beside the same with all but one
    page cached.

    Decode's prefix cache has every whole block after the first time; prefill computes everything both times. So both
    do the same, except that the second moves one page per request.
    """
    async with opened(state, 1) as (pods, session):
        (prefill,), (decode,) = pods.role("prefill"), pods.role("decode")
        engines = Engines(session, pods.urls[prefill.name], pods.urls[decode.name])
        groups = [[prompt(801, 60_000 + 100 * number + one) for one in range(OTHERS)] for number in range(ROUNDS + 1)]
        await stream_beside(engines, groups[0], 0)
        found = []
        for number in range(1, ROUNDS + 1):
            # In turn, so that neither is always the first: what has been sent once is cached.
            known = groups[number - 1]
            if number % 2:
                nothing = await stream_beside(engines, known, 2 * number)
            whole = await stream_beside(engines, groups[number], 2 * number + 1)
            if not number % 2:
                nothing = await stream_beside(engines, known, 2 * number)
            found.append((whole, nothing))
        return found


def test_transfers_of_others_do_not_slow_a_stream(tmp_path: Path) -> None:
    found = asyncio.run(rounds(tmp_path))
    whole, nothing = (statistics.median(pair[index][0] for pair in found) for index in (0, 1))
    served = [sum(pair[index][1] for pair in found) / ROUNDS for index in (0, 1)]
    print(
        f"\ntime per token beside transfers of 26 pages: {whole * 1e3:.2f} ms, beside the same requests with 1 page: "
        f"{nothing * 1e3:.2f} ms (medians of {ROUNDS} rounds); ratio {whole / nothing:.3f}; "
        f"single rounds {', '.join(f'{one[0] / other[0]:.2f}' for one, other in found)}; "
        f"requests answered beside a stream {served[0]:.1f} and {served[1]:.1f} of {OTHERS}"
    )
    assert min(served) > OTHERS / 2, "too little was going on beside the streams"
    assert whole / nothing <= 1.05
