"""The cache of one synthetic rank: memory in exactly the layout that the plan declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from disagg_agent.cards import RegionDeclaration
from disagg_agent.engines.synthetic.content import Words, cell_words, part_key
from disagg_agent.segments import Segment, create_segment
from disagg_plan.ranges import parse_ranges
from disagg_plan.wire import Page, PagePart, Side

Ids = NDArray[np.int64]

POISON = 0xA5
"""What a page holds that no request owns."""

_ALIGN = 4096


@dataclass(frozen=True)
class _Layer:
    """One part of one layer: an array view `(pages, units, tokens, words)` over the segment."""

    group: str
    layer: int
    part: PagePart
    block: int
    view: NDArray[Any]


class RankPool:
    """Memory of one rank.

    Args:
        side: the replica.
        rank: the rank within it.
        pages: pages of every block table.
        tables: block table of each group.
    """

    def __init__(self, side: Side, rank: int, pages: int, tables: Mapping[str, str]) -> None:
        held = side.ranks[rank]
        self.pages = pages
        self.regions: list[RegionDeclaration] = []
        self._tables = tables
        size = 0
        for group, index in sorted(held.pages.items()):
            for layer in parse_ranges(held.layers[group]):
                for number, region in enumerate(side.pages[index].regions):
                    self.regions.append(
                        RegionDeclaration(group, layer, number, 0, size, region.bytes, region.stride, pages)
                    )
                    size += -(-region.stride * pages // _ALIGN) * _ALIGN
        self.fd, self.segment = create_segment(f"synthetic-{side.role}-{rank}", size)
        self.segment.bytes.fill(POISON)
        self._layers = list(self._views(side, rank))

    def _views(self, side: Side, rank: int) -> Iterator[_Layer]:
        held = side.ranks[rank]
        for region in self.regions:
            page = side.pages[held.pages[region.group]]
            for part in page.parts:
                if part.region == region.region:
                    block = page.block_tokens or 1
                    yield _Layer(
                        region.group, region.layer, part, block, _view(self.segment, region, page, part, self.pages)
                    )

    @staticmethod
    def bytes_per_page(side: Side, rank: int) -> int:
        """Bytes that one page of every layer takes on a rank."""
        held = side.ranks[rank]
        return sum(
            region.stride * len(parse_ranges(held.layers[group]))
            for group, index in held.pages.items()
            for region in side.pages[index].regions
        )

    def fill(self, seed: int, ids: Mapping[str, Ids], start: int, end: int) -> None:
        """Write the content of positions `[start, end)`; ids are those of the blocks from position 0."""
        for layer in self._layers:
            for blocks, tokens, rows in self._spans(layer, ids, start, end):
                words = self._content(seed, layer, tokens)
                layer.view[blocks, :, rows] = words.reshape(len(tokens), -1, words.shape[-1])

    def verify(self, seed: int, ids: Mapping[str, Ids], tokens: int) -> tuple[int, int]:
        """Bytes checked and bytes wrong over positions `[0, tokens)`."""
        checked = wrong = 0
        for layer in self._layers:
            for blocks, positions, rows in self._spans(layer, ids, 0, tokens):
                found = layer.view[blocks, :, rows]
                expected = self._content(seed, layer, positions)
                checked += found.nbytes
                if not np.array_equal(found, expected):
                    wrong += int((_as_bytes(found) != _as_bytes(expected)).sum())
        return checked, wrong

    def poison(self, ids: Mapping[str, Ids]) -> None:
        """Overwrite whole pages, padding included."""
        for region in self.regions:
            self._rows(region)[ids[self._tables[region.group]]] = POISON

    def stray_bytes(self, owned: Mapping[str, Ids]) -> int:
        """Bytes outside the owned pages that are not poison any more: somebody wrote where nobody may."""
        stray = 0
        for region in self.regions:
            free = np.ones(self.pages, dtype=bool)
            free[owned[self._tables[region.group]]] = False
            rows = self._rows(region)
            for first in range(0, self.pages, 256):
                some = rows[first : first + 256][free[first : first + 256]]
                stray += int((some != POISON).sum())
        return stray

    def corrupt(self, table: str, page: int) -> None:
        """Flip one byte of a page: the negative control of every check."""
        region = next(region for region in self.regions if self._tables[region.group] == table)
        self._rows(region)[page, 0] ^= 0xFF

    def _rows(self, region: RegionDeclaration) -> NDArray[np.uint8]:
        end = region.offset + region.stride * self.pages
        return self.segment.bytes[region.offset : end].reshape(self.pages, region.stride)

    def _spans(self, layer: _Layer, ids: Mapping[str, Ids], start: int, end: int) -> Iterator[tuple[Ids, Words, Ids]]:
        """Blocks, token positions and rows in the block of a span, in bounded batches."""
        table = ids[self._tables[layer.group]]
        if layer.part.token_stride:
            positions = np.arange(start, end, dtype=np.int64)
            rows = positions % layer.block
        else:
            # Not addressed by token: whole blocks, each with the position of its first token.
            first, last = start // layer.block, -(-end // layer.block)
            positions = np.arange(first, last, dtype=np.int64) * layer.block
            rows = np.zeros_like(positions)
        for low in range(0, len(positions), 4096):
            some = slice(low, low + 4096)
            yield table[positions[some] // layer.block], positions[some].astype(np.uint64), rows[some]

    @staticmethod
    def _content(seed: int, layer: _Layer, tokens: Words) -> NDArray[Any]:
        key = part_key(seed, layer.group, layer.layer, layer.part.name)
        units = np.arange(layer.part.units[0], layer.part.units[1], dtype=np.uint64)
        words = cell_words(key, units, tokens, -(-layer.part.cell_bytes // 8))
        if layer.view.dtype == np.uint64:
            return words
        return np.ascontiguousarray(words).view(np.uint8)[:, :, : layer.part.cell_bytes]


def _view(segment: Segment, region: RegionDeclaration, page: Page, part: PagePart, pages: int) -> NDArray[Any]:
    tokens = (page.block_tokens or 1) if part.token_stride else 1
    sizes = (part.cell_bytes, region.offset, part.offset, part.unit_stride, part.token_stride, region.stride)
    dtype = np.dtype(np.uint64) if all(size % 8 == 0 for size in sizes) else np.dtype(np.uint8)
    start = segment.bytes[region.offset + part.offset :]
    whole = start[: len(start) // dtype.itemsize * dtype.itemsize].view(dtype)
    return as_strided(
        whole,
        shape=(pages, part.units[1] - part.units[0], tokens, part.cell_bytes // dtype.itemsize),
        strides=(region.stride, part.unit_stride, part.token_stride, dtype.itemsize),
    )


def _as_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)
