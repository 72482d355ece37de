"""Whatever fails, the engine hears of it, the client gets a reason or the right tokens, and every block comes back."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(900)]

BLOCK = 32


def break_generation(params: dict[str, Any]) -> None:
    params["disagg"]["generation"] = "another"


def break_request(params: dict[str, Any]) -> None:
    params["remote_request_id"] = "nobody"


def break_replica(params: dict[str, Any]) -> None:
    params["remote_engine_id"] = "nobody"


def break_address(params: dict[str, Any]) -> None:
    params["remote_engine_id"] = "nobody"
    params["remote_port"] = 1


def lack_ours(params: dict[str, Any]) -> None:
    del params["disagg"]


def lack_names(params: dict[str, Any]) -> None:
    del params["remote_engine_id"], params["remote_host"]


def odd_types(params: dict[str, Any]) -> None:
    params["remote_port"] = "http"
    params["disagg"] = ["generation"]


BROKEN = [break_generation, break_request, break_replica, break_address, lack_ours, lack_names, odd_types]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_load_that_cannot_be_served(fleet: Any, prompt: Any, broken: Any) -> None:
    """Policy `fail` fails the request, policy `recompute` answers what one engine would; both engines live on."""

    async def run() -> None:
        tokens = prompt(3 * BLOCK + 9, salt=10_000 + BROKEN.index(broken))
        expected = await fleet.expected(tokens, 8)
        params = await fleet.hold(tokens)
        broken(params)
        failed, answered = await asyncio.gather(
            fleet.decode(fleet.fails, tokens, 8, params), fleet.decode(fleet.recomputes, tokens, 8, params)
        )
        assert failed.error
        assert failed.tokens == []
        assert (answered.error, answered.tokens) == ("", expected)
        assert not (await fleet.serve(fleet.fails, tokens, 8)).error

    # That every block comes back, the next test waits for: leases run side by side.
    fleet.run(run())


def test_a_lease_that_ran_out(fleet: Any, prompt: Any) -> None:
    async def run() -> None:
        tokens = prompt(3 * BLOCK + 9, salt=11_000)
        expected = await fleet.expected(tokens, 8)
        params = await fleet.hold(tokens)
        await fleet.settled()
        failed, answered = await asyncio.gather(
            fleet.decode(fleet.fails, tokens, 8, params), fleet.decode(fleet.recomputes, tokens, 8, params)
        )
        assert failed.error
        assert (answered.error, answered.tokens) == ("", expected)

    fleet.run(run())
    fleet.run(fleet.settled())


def test_aborts_at_any_moment(fleet: Any, prompt: Any) -> None:
    """Clients that leave while prefill computes, between the halves, while decode waits, loads or answers."""

    async def leave(coroutine: Any, seconds: float) -> None:
        task = asyncio.create_task(coroutine)
        await asyncio.wait({task}, timeout=seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def run() -> None:
        chance = random.Random(7)
        for number in range(24):
            tokens = prompt(chance.randrange(1, 600), salt=12_000 + number)
            match number % 4:
                case 0:
                    await leave(fleet.hold(tokens), chance.uniform(0.0, 0.2))
                case 1:
                    await fleet.hold(tokens)
                case 2:
                    await leave(fleet.serve(fleet.fails, tokens, 64), chance.uniform(0.0, 1.0))
                case 3:
                    await leave(fleet.through_router(tokens, 64), chance.uniform(0.0, 1.0))
        tokens = prompt(3 * BLOCK, salt=12_999)
        answer = await fleet.serve(fleet.fails, tokens, 8)
        assert (answer.error, answer.tokens) == ("", await fleet.expected(tokens, 8))

    fleet.run(run())
    fleet.run(fleet.settled())


def test_prefill_dies_before_during_and_after_the_read(fleet: Any, prompt: Any) -> None:
    async def run() -> None:
        read, held = prompt(4 * BLOCK + 1, salt=13_000), prompt(4 * BLOCK + 1, salt=13_001)
        during = [prompt(10 * BLOCK + number, salt=13_100 + number) for number in range(8)]
        wanted = {tokens: await fleet.expected(tokens, 24) for tokens in (read, held, *during)}
        long = await fleet.expected(read, 400)

        after = asyncio.create_task(fleet.serve(fleet.fails, read, 400))
        params = await fleet.hold(held)
        running = [
            asyncio.create_task(fleet.serve(pod, tokens, 24))
            for tokens, pod in zip(during, [fleet.fails, fleet.recomputes] * 4, strict=True)
        ]
        # Some have been read, some are being read, some are still prefilled.
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await fleet.kill_engine(fleet.prefill)

        answer = await after
        assert (answer.error, answer.tokens) == ("", long)
        failed, answered = await asyncio.gather(
            fleet.decode(fleet.fails, held, 24, params), fleet.decode(fleet.recomputes, held, 24, params)
        )
        assert failed.error
        assert (answered.error, answered.tokens) == ("", wanted[held])
        for tokens, outcome in zip(during, await asyncio.gather(*running, return_exceptions=True), strict=True):
            # Connections to the killed engine end as such; what decode answers is right or an error.
            if not isinstance(outcome, BaseException) and not outcome.error:
                assert outcome.tokens == wanted[tokens]
        await fleet.settled()

        await fleet.pods.restart_engine(fleet.prefill)
        again = await fleet.serve(fleet.fails, held, 24)
        assert (again.error, again.tokens) == ("", wanted[held])

    fleet.run(run(), seconds=400.0)
    fleet.run(fleet.settled())


def test_decode_is_restarted_under_a_living_prefill(fleet: Any, prompt: Any) -> None:
    async def run() -> None:
        during = [prompt(10 * BLOCK + number, salt=14_100 + number) for number in range(8)]
        wanted = {tokens: await fleet.expected(tokens, 24) for tokens in during}
        running = [asyncio.create_task(fleet.serve(fleet.fails, tokens, 24)) for tokens in during]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await fleet.kill_engine(fleet.fails)
        for tokens, outcome in zip(during, await asyncio.gather(*running, return_exceptions=True), strict=True):
            if not isinstance(outcome, BaseException) and not outcome.error:
                assert outcome.tokens == wanted[tokens]
        # The other decode engine and prefill go on meanwhile, and prefill gets back what was held for the dead one.
        other = await fleet.serve(fleet.recomputes, during[0], 24)
        assert (other.error, other.tokens) == ("", wanted[during[0]])
        await fleet.settled()

        await fleet.pods.restart_engine(fleet.fails)
        for tokens in during:
            answer = await fleet.serve(fleet.fails, tokens, 24)
            assert (answer.error, answer.tokens) == ("", wanted[tokens])

    fleet.run(run(), seconds=400.0)
    fleet.run(fleet.settled())


@pytest.mark.parametrize("role", ["prefill", "fails", "recomputes"])
def test_an_agent_is_restarted_under_a_living_engine(fleet: Any, prompt: Any, role: str) -> None:
    """What was under way fails or is computed anew; the engine finds the next agent by itself."""

    async def run() -> None:
        pod = getattr(fleet, role)
        decode = fleet.recomputes if role == "recomputes" else fleet.fails
        during = [prompt(10 * BLOCK + number, salt=15_000 + number) for number in range(8)]
        wanted = {tokens: await fleet.expected(tokens, 24) for tokens in during}
        running = [asyncio.create_task(fleet.serve(decode, tokens, 24)) for tokens in during]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await fleet.kill_agent(pod)
        for tokens, task in zip(during, running, strict=True):
            answer = await task
            assert answer.error or answer.tokens == wanted[tokens]
            if role == "recomputes":
                assert answer.error == ""
        await fleet.pods.restart_agent(pod)
        for tokens in during:
            answer = await fleet.serve(decode, tokens, 24)
            assert (answer.error, answer.tokens) == ("", wanted[tokens])

    fleet.run(run())
    fleet.run(fleet.settled())
