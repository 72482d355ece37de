"""One coalesced run per key: marks during a run make one more run, never two at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

_FIRST_RETRY = 0.5
_LAST_RETRY = 60.0

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """Namespace and name of a deployment."""

    namespace: str
    name: str


class WorkQueue:
    """Keys to reconcile, in the order in which they were marked first."""

    def __init__(self) -> None:
        self._waiting: dict[Key, None] = {}
        self._running: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._arrived = asyncio.Event()

    @property
    def depth(self) -> int:
        """Keys that wait or run."""
        return len(self._waiting) + len(self._running)

    def mark(self, key: Key) -> None:
        """Something about a key changed."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._running:
            self._again.add(key)
        else:
            self._waiting.setdefault(key)
            self._arrived.set()

    def mark_later(self, key: Key, seconds: float) -> None:
        """Mark a key after a while, unless it is marked before."""
        if key not in self._timers:
            self._timers[key] = asyncio.get_running_loop().call_later(seconds, self.mark, key)

    async def run(self, handle: Callable[[Key], Awaitable[None]], workers: int) -> None:
        """Handle keys until cancelled. A key whose handling raised an `Exception` is tried again, ever later."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(handle))

    async def _work(self, handle: Callable[[Key], Awaitable[None]]) -> None:
        while True:
            while not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            key = next(iter(self._waiting))
            del self._waiting[key]
            self._running.add(key)
            try:
                await handle(key)
                self._failures.pop(key, None)
            except Exception as error:  # noqa: BLE001 - whatever one key's handling raises, the others go on
                count = self._failures[key] = self._failures.get(key, 0) + 1
                delay = min(_LAST_RETRY, _FIRST_RETRY * 2 ** (count - 1))
                logger.warning(
                    "reconcile failed",
                    extra={"deployment": "/".join(key), "error": f"{type(error).__name__}: {error}", "retry": delay},
                )
                self.mark_later(key, delay)
            finally:
                self._running.discard(key)
                if key in self._again:
                    self._again.discard(key)
                    self.mark(key)
