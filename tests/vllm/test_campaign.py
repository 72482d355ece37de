"""Everything at once: requests of all kinds with aborts and killed engines. Nothing is lost, nothing stays held."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(1800)]

LONG = os.environ.get("DISAGG_PROFILE") == "long"
REQUESTS = 500 if LONG else 80
CONCURRENCY = 8
GENERATE = 16
PROMPTS = 40


@dataclass
class Campaign:
    """Requests by how they ended."""

    fleet: Any
    prompts: list[tuple[int, ...]]
    expected: list[list[int]]
    chance: random.Random
    kills: dict[int, Any]
    restarts: list[asyncio.Task[None]] = field(default_factory=list)
    answered: int = 0
    aborted: int = 0
    failed: list[str] = field(default_factory=list)
    whole: asyncio.Event = field(default_factory=asyncio.Event)

    async def worker(self, numbers: list[int]) -> None:
        while numbers:
            number = numbers.pop()
            if len(numbers) in self.kills:
                self.restarts.append(asyncio.create_task(self.kill(self.kills.pop(len(numbers)))))
            failures = len(self.failed)
            await self.one(number)
            if len(self.failed) > failures:
                # While an engine is away, failing is quick: the others' requests would be over before it is back.
                await self.whole.wait()

    async def one(self, number: int) -> None:
        which = self.chance.randrange(len(self.prompts))
        task = asyncio.create_task(self.send(number, self.prompts[which]))
        if number % 7 == 0:
            await asyncio.wait({task}, timeout=self.chance.uniform(0.0, 0.6))
            if task.cancel():
                await asyncio.gather(task, return_exceptions=True)
                self.aborted += 1
                return
        try:
            tokens, error = await task
        except (aiohttp.ClientError, OSError, KeyError) as failure:
            self.failed.append(f"{type(failure).__name__}: {failure}")
            return
        if error:
            self.failed.append(error)
            return
        assert tokens == self.expected[which], f"request {number} of prompt {which}"
        self.answered += 1

    async def send(self, number: int, tokens: tuple[int, ...]) -> tuple[list[int], str]:
        match number % 4:
            case 0:
                answer = await self.fleet.serve(self.fleet.fails, tokens, GENERATE)
            case 1:
                answer = await self.fleet.serve(self.fleet.recomputes, tokens, GENERATE)
            case 2:
                answer = await self.fleet.through_router(tokens, GENERATE)
            case _:
                params = await self.fleet.hold(tokens)
                document = await self.fleet.post(self.fleet.fails, tokens, GENERATE, params)
                if "error" in document:
                    return [], str(document["error"])
                return document["choices"][0]["token_ids"], ""
        return answer.tokens, answer.error

    async def kill(self, pod: Any) -> None:
        """Kill an engine and start it again."""
        self.whole.clear()
        await self.fleet.kill_engine(pod)
        try:
            await self.fleet.pods.restart_engine(pod)
        finally:
            self.whole.set()


def test_mixed_requests_with_aborts_and_kills(fleet: Any, prompt: Any) -> None:
    async def run() -> Campaign:
        chance = random.Random(11)
        prompts = [prompt(chance.choice([1, 31, 32, 33, 64, 200, 333]), salt=20_000 + n) for n in range(PROMPTS)]
        expected = [await fleet.expected(tokens, GENERATE) for tokens in prompts]
        kills = {350: fleet.prefill, 150: fleet.fails} if LONG else {}
        campaign = Campaign(fleet, prompts, expected, chance, kills)
        campaign.whole.set()
        numbers = list(range(REQUESTS))
        await asyncio.gather(*(campaign.worker(numbers) for _ in range(CONCURRENCY)))
        await asyncio.gather(*campaign.restarts)
        await fleet.settled()
        return campaign

    campaign = fleet.run(run(), seconds=1500.0)
    print(f"{campaign.answered} answered, {campaign.aborted} aborted, {len(campaign.failed)} failed")
    assert campaign.answered + campaign.aborted + len(campaign.failed) == REQUESTS
    assert campaign.aborted > REQUESTS / 20
    assert all(campaign.failed), campaign.failed
    assert LONG or campaign.failed == []
    assert campaign.answered > REQUESTS / 2
