"""Block allocation as an engine does it: one free list per table, in no helpful order."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class BlockAllocator:
    """Free pages of every block table of a replica; waiters are served in order of arrival.

    Args:
        tables: names of the block tables.
        pages: pages of each.
        seed: order in which pages are handed out; neighbours in a request are rarely neighbours in memory.
    """

    def __init__(self, tables: tuple[str, ...], pages: int, seed: int) -> None:
        order = list(range(pages))
        self._free: dict[str, deque[int]] = {}
        for table in tables:
            random.Random(f"{seed}/{table}").shuffle(order)
            self._free[table] = deque(order)
        self.pages = pages
        self._turn = asyncio.Lock()
        self._returned = asyncio.Condition()

    @property
    def free_pages(self) -> int:
        """Free pages of the fullest table."""
        return min(len(free) for free in self._free.values())

    async def take(self, counts: Mapping[str, int]) -> dict[str, Ids]:
        """Pages for a request, once there are enough.

        Raises:
            ValueError: more than the pool has altogether.
        """
        for table, count in counts.items():
            if count > self.pages:
                raise ValueError(f"{count} blocks are needed in table {table}, the pool has {self.pages}")
        async with self._turn, self._returned:
            await self._returned.wait_for(
                lambda: all(len(self._free[table]) >= count for table, count in counts.items())
            )
            return {
                table: np.array([self._free[table].popleft() for _ in range(count)], dtype=np.int64)
                for table, count in counts.items()
            }

    async def give_back(self, ids: Mapping[str, Ids]) -> None:
        """Return pages."""
        async with self._returned:
            for table, pages in ids.items():
                self._free[table].extend(int(page) for page in pages)
            self._returned.notify_all()
