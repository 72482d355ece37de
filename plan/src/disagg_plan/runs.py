"""Copies expanded to contiguous runs of bytes, the form that transfers are made of.

A plan states copies per part. Where parts lie side by side on both sides (K and V of a joint page), their
copies interleave and adjoin, so runs are found by sorting all bytes of a layer and joining what adjoins on both
sides. Pure and vectorised; computed once per edge and cached by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disagg_plan.ranges import parse_ranges
from disagg_plan.wire import Copy, Edge, Page, Plan

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Runs:
    """Runs that are alike in all of `layers`.

    Attributes:
        group: name of the group.
        layers: ascending layer ids.
        src_region, dst_region: region of the page on either side.
        src_sub, dst_sub: bytes from one sub-block to the next within a page.
        rows: shape `(n, 3)`: source offset, destination offset and length of each run, for sub-block 0 of
            both pages, ascending by source offset.
    """

    group: str
    layers: tuple[int, ...]
    src_region: int
    dst_region: int
    src_sub: int
    dst_sub: int
    rows: Ints

    @property
    def bytes(self) -> int:
        """Bytes of one sub-block of one layer."""
        return int(self.rows[:, 2].sum())


def edge_runs(plan: Plan, edge: Edge) -> tuple[Runs, ...]:
    """All runs of one edge, joined where they adjoin, in the order group, layers, regions."""
    source_pages = _pages(plan.source.pages, plan.source.ranks[edge.source].pages)
    destination_pages = _pages(plan.destination.pages, plan.destination.ranks[edge.destination].pages)
    result: list[Runs] = []
    for (group, layers), copies in sorted(_by_layers(plan.shapes[edge.shape]).items()):
        placed: dict[tuple[int, int, int, int], list[Ints]] = {}
        for copy in copies:
            key = (
                _region(source_pages[group], copy.part),
                _region(destination_pages[group], copy.part),
                copy.src_sub,
                copy.dst_sub,
            )
            placed.setdefault(key, []).append(expand(copy))
        for (src_region, dst_region, src_sub, dst_sub), rows in sorted(placed.items(), key=lambda kv: kv[0]):
            joined = join(np.concatenate(rows))
            result.append(Runs(group, layers, src_region, dst_region, src_sub, dst_sub, joined))
    return tuple(result)


def expand(copy: Copy) -> Ints:
    """Every run of one copy in one layer and sub-block pair, shape `(n, 3)`: src, dst, bytes."""
    src = np.array([copy.src], dtype=np.int64)
    dst = np.array([copy.dst], dtype=np.int64)
    for loop in copy.repeat:
        steps = np.arange(loop.count, dtype=np.int64)
        src = (src[:, None] + steps * loop.src).ravel()
        dst = (dst[:, None] + steps * loop.dst).ravel()
    return np.stack([src, dst, np.full_like(src, copy.bytes)], axis=1)


def join(rows: Ints) -> Ints:
    """Sort runs by source offset and join those that adjoin on both sides."""
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
    if len(rows) < 2:
        return rows
    end_src = rows[:-1, 0] + rows[:-1, 2]
    end_dst = rows[:-1, 1] + rows[:-1, 2]
    starts = np.concatenate([[True], (rows[1:, 0] != end_src) | (rows[1:, 1] != end_dst)])
    first = np.flatnonzero(starts)
    joined = rows[first].copy()
    joined[:, 2] = np.add.reduceat(rows[:, 2], first)
    return joined


def _by_layers(copies: Iterable[Copy]) -> dict[tuple[str, tuple[int, ...]], tuple[Copy, ...]]:
    """Group layers that are served by the same copies, so that runs are computed once for all of them."""
    served: dict[tuple[str, int], list[int]] = {}
    listed = list(copies)
    for index, copy in enumerate(listed):
        for layer in parse_ranges(copy.layers):
            served.setdefault((copy.group, layer), []).append(index)
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (group, layer), indexes in served.items():
        alike.setdefault((group, tuple(indexes)), []).append(layer)
    return {
        (group, tuple(sorted(layers))): tuple(listed[index] for index in indexes)
        for (group, indexes), layers in alike.items()
    }


def _pages(table: list[Page], indexes: dict[str, int]) -> dict[str, Page]:
    return {group: table[index] for group, index in indexes.items()}


def _region(page: Page, part: str) -> int:
    for placed in page.parts:
        if placed.name == part:
            return placed.region
    raise KeyError(part)


def shortest_run(runs: Iterable[Runs]) -> int:
    """Length in bytes of the shortest run, 0 where there is none."""
    lengths: list[Any] = [found.rows[:, 2].min() for found in runs if len(found.rows)]
    return int(min(lengths)) if lengths else 0
