"""Drives requests through prefill and decode as a router does, and keeps the account."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

REQUEST_SECONDS = 120.0
"""Longest that one request may take before it counts as failed; queueing for pages included."""


@dataclass(frozen=True)
class Workload:
    """What to send.

    Attributes:
        requests: how many.
        longest: tokens of the longest prompt.
        block: decode's block size; prefix hits are multiples of it.
        seed: the same seed gives the same requests.
    """

    requests: int
    longest: int
    block: int
    seed: int

    def prompts(self) -> list[tuple[int, int]]:
        """`(tokens, cached tokens)` of every request: around the block size, then log-uniform; some with a hit."""
        source = random.Random(self.seed)
        edges = [1, self.block - 1, self.block, self.block + 1, 2 * self.block, self.longest]
        lengths = [min(max(1, edge), self.longest) for edge in edges]
        while len(lengths) < self.requests:
            lengths.append(max(1, round(math.exp(source.uniform(0.0, math.log(self.longest))))))
        result = []
        for number, tokens in enumerate(lengths[: self.requests]):
            cached = 0
            if number % 5 == 4:
                blocks = source.randint(0, tokens // self.block)
                cached = tokens if number % 10 == 9 else blocks * self.block
            result.append((tokens, cached))
        source.shuffle(result)
        return result


@dataclass(frozen=True)
class Endpoint:
    """An engine's HTTP interface on a Unix socket."""

    name: str
    socket: Path


@dataclass
class Outcome:
    """One request."""

    request: str
    tokens: int
    cached: int
    error: str = ""
    started: float = 0.0
    finished: float = 0.0
    moved_bytes: int = 0
    verified_bytes: int = 0
    wrong_bytes: int = 0
    transfer_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """From the first byte sent to the answer or failure."""
        return self.finished - self.started

    def document(self) -> dict[str, Any]:
        """A line of `requests.jsonl`; times are those of the monotonic clock."""
        return {
            "request": self.request,
            "tokens": self.tokens,
            "cachedTokens": self.cached,
            "error": self.error,
            "started": self.started,
            "finished": self.finished,
            "movedBytes": self.moved_bytes,
            "verifiedBytes": self.verified_bytes,
            "wrongBytes": self.wrong_bytes,
            "transferSeconds": self.transfer_seconds,
        }


@dataclass
class Account:
    """All requests of a run.

    Attributes:
        problems: what went wrong besides requests: pods that died, engines that could not be asked.
        stray_bytes: bytes found written outside any request's pages.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    stray_bytes: int = 0
    seconds: float = 0.0

    @property
    def failed(self) -> list[Outcome]:
        """Requests that were not served."""
        return [outcome for outcome in self.outcomes if outcome.error]

    @property
    def wrong_bytes(self) -> int:
        """Bytes that decode found wrong, and bytes written outside any request's pages."""
        return self.stray_bytes + sum(outcome.wrong_bytes for outcome in self.outcomes)

    @property
    def good(self) -> bool:
        """Everything was served, every byte was right, and no pod died."""
        return not self.failed and not self.wrong_bytes and not self.problems

    def document(self) -> dict[str, Any]:
        """What `-o json` prints."""
        served = [outcome for outcome in self.outcomes if not outcome.error]
        moving = [outcome for outcome in served if outcome.moved_bytes]
        reasons: dict[str, int] = {}
        for outcome in self.failed:
            reasons[outcome.error.split(":")[0]] = reasons.get(outcome.error.split(":")[0], 0) + 1
        return {
            "requests": len(self.outcomes),
            "failedRequests": len(self.failed),
            "failureReasons": reasons,
            "problems": self.problems,
            "movedBytes": sum(outcome.moved_bytes for outcome in served),
            "verifiedBytes": sum(outcome.verified_bytes for outcome in served),
            "wrongBytes": self.wrong_bytes,
            "strayBytes": self.stray_bytes,
            "seconds": round(self.seconds, 3),
            "gigabytesPerSecond": {
                "transferP50": _round(
                    percentile([outcome.moved_bytes / outcome.transfer_seconds / 1e9 for outcome in moving], 50)
                ),
                "run": _round(sum(outcome.moved_bytes for outcome in served) / self.seconds / 1e9)
                if self.seconds
                else 0.0,
            },
            "transferSeconds": {
                f"p{rank}": _round(percentile([outcome.transfer_seconds for outcome in moving], rank), 6)
                for rank in (50, 99)
            },
            "requestSeconds": {
                f"p{rank}": _round(percentile([outcome.seconds for outcome in served], rank), 6) for rank in (50, 99)
            },
        }


def percentile(values: Sequence[float], rank: float) -> float:
    """Nearest-rank percentile; 0.0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(rank / 100 * len(ordered)) - 1)] if ordered else 0.0


class Driver:
    """Sends each request to a prefill engine, hands its answer to a decode engine: what a P/D router does.

    Args:
        done: called with each outcome.
    """

    def __init__(
        self, prefills: Sequence[Endpoint], decodes: Sequence[Endpoint], done: Callable[[Outcome], None]
    ) -> None:
        self._prefills = prefills
        self._decodes = decodes
        self._done = done
        self._sessions: dict[Path, aiohttp.ClientSession] = {}
        self.dead: dict[str, str] = {}

    async def run(self, workload: Workload, concurrency: int) -> Account:
        """Send everything; a request that cannot be served is counted, never retried."""
        account = Account()
        queue = list(enumerate(workload.prompts()))[::-1]
        started = time.monotonic()

        async def worker() -> None:
            while queue:
                number, (tokens, cached) = queue.pop()
                outcome = await self._one(number, tokens, cached)
                account.outcomes.append(outcome)
                self._done(outcome)
                # A request that fails without waiting for anything must not keep others from being answered.
                await asyncio.sleep(0)

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        account.seconds = time.monotonic() - started
        return account

    def pod_died(self, name: str, reason: str) -> None:
        """Send nothing more to a pod."""
        self.dead.setdefault(name, reason)

    def _living(self, endpoints: Sequence[Endpoint], number: int) -> Endpoint | str:
        """An endpoint for a request, or why there is none."""
        living = [endpoint for endpoint in endpoints if endpoint.name not in self.dead]
        return living[number % len(living)] if living else self.dead[endpoints[0].name]

    async def stats(self, endpoint: Endpoint) -> dict[str, Any]:
        """An engine's own figures."""
        async with self._session(endpoint).get("http://engine/stats") as answer:
            return dict(await answer.json())

    async def close(self) -> None:
        """Close all connections."""
        for session in self._sessions.values():
            await session.close()

    async def _one(self, number: int, tokens: int, cached: int) -> Outcome:
        outcome = Outcome(f"request-{number}", tokens, cached)
        outcome.started = time.monotonic()
        try:
            await self._serve(number, outcome)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"EngineUnreachable: {error or 'timed out'}"
        outcome.finished = time.monotonic()
        return outcome

    async def _serve(self, number: int, outcome: Outcome) -> None:
        prefill = self._living(self._prefills, number)
        decode = self._living(self._decodes, number)
        if isinstance(prefill, str) or isinstance(decode, str):
            outcome.error = prefill if isinstance(prefill, str) else str(decode)
            return
        # The prompt's length is all that a synthetic engine reads of it; one token id is one character here.
        prompt = "x" * outcome.tokens
        body = {
            "request_id": outcome.request,
            "prompt": prompt,
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        answer = await self._post(prefill, body)
        if "error" in answer:
            outcome.error = _reason(answer)
            return
        params = answer["kv_transfer_params"]
        params["disagg"]["cached_tokens"] = outcome.cached
        body = {"request_id": outcome.request, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
        answer = await self._post(decode, body)
        if "error" in answer:
            outcome.error = _reason(answer)
            return
        own = answer["disagg"]
        outcome.moved_bytes = own["movedBytes"]
        outcome.verified_bytes = own["verifiedBytes"]
        outcome.wrong_bytes = own["wrongBytes"]
        outcome.transfer_seconds = own["transferSeconds"]

    async def _post(self, endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session(endpoint).post("http://engine/v1/completions", json=body) as answer:
            try:
                return dict(json.loads(await answer.text()))
            except ValueError:
                return {"error": {"code": "BadAnswer", "message": f"{endpoint.name} answers {answer.status}"}}

    def _session(self, endpoint: Endpoint) -> aiohttp.ClientSession:
        if endpoint.socket not in self._sessions:
            self._sessions[endpoint.socket] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path=str(endpoint.socket)),
                timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            )
        return self._sessions[endpoint.socket]


def _reason(answer: dict[str, Any]) -> str:
    error = answer["error"]
    return f"{error.get('code')}: {error.get('message')}"


def _round(value: float, digits: int = 3) -> float:
    return round(value, digits)
