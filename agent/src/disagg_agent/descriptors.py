"""From plan and registered memory to NIXL descriptors: pure numpy, no per-block Python.

For each edge the strided rows are made once: one row `(address, length, device, stride, count)` per layer and run
covers a whole pool, so a pool of any size costs one row. A request then is two index lists, made by one broadcast
addition.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disagg_agent.cards import RegionCard
from disagg_agent.errors import MoverError
from disagg_plan.pairing import Pairs
from disagg_plan.runs import Runs, edge_runs
from disagg_plan.wire import Edge, Plan

Rows = NDArray[np.uint64]
Index = NDArray[np.int32]
Ints = NDArray[np.int64]

MAX_PIECE_BYTES = 64 << 20
"""Most bytes of one post: a post may block for its whole copy."""

_MAX_INDEX = 2**31 - 1


@dataclass(frozen=True)
class TableRows:
    """Rows of one block table within an edge's descriptor lists.

    Attributes:
        src_first: shape `(rows, source sub-blocks)`: flat index of page 0 of each row.
        dst_first: the same on the destination side.
        lengths: shape `(rows,)`: bytes of each run.
    """

    src_first: Ints
    dst_first: Ints
    lengths: Ints


@dataclass(frozen=True)
class EdgeDescriptors:
    """Everything about one edge that does not depend on a request.

    Attributes:
        src_rows, dst_rows: shape `(n, 5)`, for `prep_xfer_dlist`.
        tables: rows by block table.
    """

    src_rows: Rows
    dst_rows: Rows
    tables: Mapping[str, TableRows]


@dataclass(frozen=True)
class Piece:
    """One post: index lists into the two prepared lists, of equal length."""

    src: Index
    dst: Index
    bytes: int


def build_edge(
    plan: Plan,
    edge: Edge,
    source: Sequence[RegionCard],
    destination: Sequence[RegionCard],
    src_device: int = 0,
    dst_device: int = 0,
) -> EdgeDescriptors:
    """Descriptor rows of one edge.

    Args:
        source, destination: registered regions of the two ranks.
        src_device, dst_device: the devices under which the two ranks registered their memory.

    Raises:
        MoverError: `MissingRegion` if a side lacks memory that the edge touches, `TooManyDescriptors`.
    """
    src = _Side(source, src_device)
    dst = _Side(destination, dst_device)
    source_pages = plan.source.ranks[edge.source].pages
    destination_pages = plan.destination.ranks[edge.destination].pages
    by_table: dict[str, list[tuple[Ints, Ints, Ints]]] = {}
    for runs in edge_runs(plan, edge):
        group = plan.group(runs.group)
        sub_tokens = group.sub_tokens or 1
        src_subs = (plan.source.pages[source_pages[runs.group]].block_tokens or 1) // sub_tokens
        dst_subs = (plan.destination.pages[destination_pages[runs.group]].block_tokens or 1) // sub_tokens
        src_first = src.add(runs, runs.src_region, runs.rows[:, 0], runs.src_sub, src_subs)
        dst_first = dst.add(runs, runs.dst_region, runs.rows[:, 1], runs.dst_sub, dst_subs)
        lengths = np.tile(runs.rows[:, 2], len(runs.layers))
        by_table.setdefault(group.table, []).append((src_first, dst_first, lengths))
    tables = {
        table: TableRows(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
        for table, found in by_table.items()
    }
    return EdgeDescriptors(src.rows(), dst.rows(), tables)


class _Side:
    """Collects the rows of one side and hands out flat indexes, which run over rows times pages."""

    def __init__(self, regions: Sequence[RegionCard], device: int) -> None:
        self._regions = {(region.group, region.layer, region.region): region for region in regions}
        self._device = device
        self._rows: list[NDArray[np.int64]] = []
        self._next = 0

    def add(self, runs: Runs, region: int, offsets: Ints, sub_stride: int, subs: int) -> Ints:
        """Append rows for every layer, run and sub-block; flat index of page 0, shape `(layers * runs, subs)`."""
        cards = [self._card(runs.group, layer, region) for layer in runs.layers]
        bases = np.array([card.base for card in cards], dtype=np.int64)
        strides = np.array([card.stride for card in cards], dtype=np.int64)
        pages = np.array([card.pages for card in cards], dtype=np.int64)
        shape = (len(cards), len(offsets), subs)
        address = bases[:, None, None] + offsets[None, :, None] + (np.arange(subs) * sub_stride)[None, None, :]
        columns = (
            address,
            np.broadcast_to(runs.rows[:, 2][None, :, None], shape),
            np.full(shape, self._device, dtype=np.int64),
            np.broadcast_to(strides[:, None, None], shape),
            np.broadcast_to(pages[:, None, None], shape),
        )
        counts = columns[4].ravel()
        first = self._next + np.concatenate([[0], np.cumsum(counts)[:-1]])
        self._next += int(counts.sum())
        if self._next > _MAX_INDEX:
            raise MoverError("TooManyDescriptors", f"{self._next} descriptors on one edge exceed {_MAX_INDEX}")
        self._rows.append(np.stack([column.ravel() for column in columns], axis=1))
        return first.reshape(len(cards) * len(offsets), subs)

    def rows(self) -> Rows:
        """All rows, C-contiguous: NIXL refuses anything else."""
        return np.ascontiguousarray(np.concatenate(self._rows).astype(np.uint64))

    def _card(self, group: str, layer: int, region: int) -> RegionCard:
        try:
            return self._regions[group, layer, region]
        except KeyError:
            raise MoverError(
                "MissingRegion", f"group {group} layer {layer} region {region} is not registered"
            ) from None


def indexes(rows: TableRows, pairs: Pairs) -> tuple[Index, Index, Ints]:
    """Flat indexes of every run of every pair, row by row, pairs in their order; and the bytes of each."""
    src = rows.src_first[:, pairs.src_sub] + pairs.src_page
    dst = rows.dst_first[:, pairs.dst_sub] + pairs.dst_page
    lengths = np.broadcast_to(rows.lengths[:, None], src.shape)
    return src.astype(np.int32).ravel(), dst.astype(np.int32).ravel(), lengths.ravel()


def pieces(found: Sequence[tuple[Index, Index, Ints]], limit: int = MAX_PIECE_BYTES) -> list[Piece]:
    """Cut the index lists of a request into posts of at most `limit` bytes (a longer run is a post of its own)."""
    src = np.concatenate([one[0] for one in found])
    dst = np.concatenate([one[1] for one in found])
    lengths = np.concatenate([one[2] for one in found])
    if not len(src):
        return []
    ends = np.cumsum(lengths)
    cuts = [0]
    while cuts[-1] < len(src):
        before = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        cuts.append(max(int(np.searchsorted(ends, before + limit, side="right")), cuts[-1] + 1))
    return [Piece(src[a:b], dst[a:b], int(lengths[a:b].sum())) for a, b in itertools.pairwise(cuts)]
