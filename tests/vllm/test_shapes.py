"""What users send: any length, streamed or not, many at once, more than there is room for; and the negative control."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(900)]

BLOCK = 32
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 700]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_of_any_length(fleet: Any, prompt: Any, length: int) -> None:
    async def run() -> None:
        tokens = prompt(length, salt=length)
        expected = await fleet.expected(tokens, 12)
        answer = await fleet.serve(fleet.fails, tokens, 12)
        assert (answer.error, answer.tokens) == ("", expected)
        whole = await fleet.post(fleet.fails, tokens, 12, await fleet.hold(tokens))
        assert whole["choices"][0]["token_ids"] == expected
        await fleet.settled()

    fleet.run(run())


@pytest.mark.parametrize("shared", [0, 1, 3, 5])
def test_a_prefix_that_decode_has_already_is_not_moved(fleet: Any, prompt: Any, shared: int) -> None:
    async def run() -> None:
        first = prompt(5 * BLOCK + 7, salt=1000 + shared)
        second = (*first[: shared * BLOCK], *prompt(6 * BLOCK + 3, salt=2000 + shared)[shared * BLOCK :])
        assert not (await fleet.serve(fleet.fails, first, 4)).error
        before = await moved(fleet)
        answer = await fleet.serve(fleet.fails, second, 12)
        assert (answer.error, answer.tokens) == ("", await fleet.expected(second, 12))
        # 4 layers x 4 heads x (K and V) x 32 elements x 4 bytes, whole blocks.
        assert await moved(fleet) - before == (7 - shared) * BLOCK * 4 * 4 * 2 * 32 * 4
        await fleet.settled()

    fleet.run(run())


def test_two_pages_swapped_change_the_answer(fleet: Any, prompt: Any) -> None:
    async def run() -> None:
        for salt in range(3000, 3003):
            tokens = prompt(3 * BLOCK + 5, salt)
            expected = await fleet.expected(tokens, 12)
            params = await fleet.hold(tokens)
            params["disagg"]["swap"] = True
            wrong = await fleet.decode(fleet.fails, tokens, 12, params)
            assert not wrong.error
            assert wrong.tokens != expected
        await fleet.settled()

    fleet.run(run())


def test_eight_requests_at_once_through_the_router(fleet: Any, prompt: Any) -> None:
    async def run() -> None:
        prompts = [prompt(40 + 60 * number, salt=4000 + number) for number in range(8)]
        answers = await asyncio.gather(*(fleet.through_router(tokens, 16) for tokens in prompts))
        for tokens, answer in zip(prompts, answers, strict=True):
            assert (answer.error, answer.tokens) == ("", await fleet.expected(tokens, 16))
        await fleet.settled()

    fleet.run(run())


def test_more_requests_than_blocks(fleet: Any, prompt: Any) -> None:
    """24 requests of 10 blocks for pools of 160 and 64: some wait, on either side, and none is lost."""

    async def run() -> None:
        prompts = [prompt(9 * BLOCK + number, salt=5000 + number) for number in range(24)]
        answers = await asyncio.gather(*(fleet.through_router(tokens, 8) for tokens in prompts))
        assert [answer.error for answer in answers] == [""] * len(answers)
        for tokens, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == await fleet.expected(tokens, 8)
        await fleet.settled()

    fleet.run(run())


def test_a_preempted_request_is_computed_anew(fleet: Any, prompt: Any) -> None:
    async def run() -> None:
        prompts = [prompt(5 * BLOCK, salt=6000 + number) for number in range(6)]
        before = await fleet.metric(fleet.fails, "vllm:num_preemptions_total")
        answers = await asyncio.gather(*(fleet.serve(fleet.fails, tokens, 8 * BLOCK) for tokens in prompts))
        assert await fleet.metric(fleet.fails, "vllm:num_preemptions_total") > before
        for tokens, answer in zip(prompts, answers, strict=True):
            assert (answer.error, answer.tokens) == ("", await fleet.expected(tokens, 8 * BLOCK))
        await fleet.settled()

    fleet.run(run())


async def moved(fleet: Any) -> int:
    from disagg_operator.local.vllm import moved_bytes

    return await moved_bytes(fleet.fails)
