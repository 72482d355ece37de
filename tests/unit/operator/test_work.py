"""The queue: one run per key at a time, marks coalesced, failures tried again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from disagg_operator.cluster.work import Key, WorkQueue

A, B = Key("ns", "a"), Key("ns", "b")


async def drain(queue: WorkQueue, handle: Callable[[Key], Awaitable[None]], done: Callable[[], bool]) -> None:
    task = asyncio.create_task(queue.run(handle, 4))
    async with asyncio.timeout(5):
        while not done():  # noqa: ASYNC110 - any of many things may make it true
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})


def test_marks_during_a_run_make_one_more_and_never_two_at_once() -> None:
    async def scenario() -> None:
        queue = WorkQueue()
        runs: Counter[Key] = Counter()
        running: set[Key] = set()

        async def handle(key: Key) -> None:
            assert key not in running
            running.add(key)
            runs[key] += 1
            if runs[key] == 1:
                for _ in range(5):
                    queue.mark(key)
                    await asyncio.sleep(0)
            running.remove(key)

        queue.mark(A)
        queue.mark(A)
        queue.mark(B)
        await drain(queue, handle, lambda: runs == {A: 2, B: 2} and queue.depth == 0)

    asyncio.run(scenario())


def test_a_failure_is_tried_again_and_holds_up_nobody() -> None:
    async def scenario() -> None:
        queue = WorkQueue()
        runs: Counter[Key] = Counter()

        async def handle(key: Key) -> None:
            runs[key] += 1
            if key == A and runs[A] == 1:
                raise ValueError("not this time")

        queue.mark(A)
        queue.mark(B)
        await drain(queue, handle, lambda: runs[A] == 2)
        assert runs == {A: 2, B: 1}

    asyncio.run(scenario())


def test_a_mark_takes_the_place_of_a_later_one() -> None:
    async def scenario() -> None:
        queue = WorkQueue()
        runs: Counter[Key] = Counter()

        async def handle(key: Key) -> None:
            runs[key] += 1

        queue.mark_later(A, 3600.0)
        queue.mark(A)
        queue.mark_later(B, 0.01)
        await drain(queue, handle, lambda: runs == {A: 1, B: 1} and queue.depth == 0)

    asyncio.run(scenario())
