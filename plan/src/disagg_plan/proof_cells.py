"""Pages expanded to granules: which part, unit, token and place in the cell each of them is.

Part of the proof. A granule is the greatest common divisor of all offsets and lengths of a group's pages and
copies, so no copy begins or ends inside one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from disagg_plan import wire
from disagg_plan.findings import Findings

Ints = NDArray[np.int64]

_WHERE = {"prefill": "source", "decode": "destination"}

_MAX_GRANULES = 1 << 22
"""Largest page, in granules, that is expanded: a real one has a few thousand."""


@dataclass
class Cells:
    """Cells of one page, granule by granule.

    `identity[region]` has one entry per granule: -1 for padding, else a number that is equal on both sides for the
    same part, unit, place in the cell, and token *within a sub-block*; `sub[region]` is the sub-block.
    """

    identity: list[Ints]
    sub: list[Ints]


@dataclass
class CellMap:
    """Expanded pages of one plan, each once."""

    plan: wire.Plan
    findings: Findings
    granules: dict[str, int] = field(init=False)
    _known: dict[tuple[str, str, int], Cells] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.granules = {group.name: self._granule(group.name) for group in self.plan.groups}

    def page(self, side: wire.Side, rank: int, name: str) -> Cells:
        """Cells of the page that a rank has for a group.

        Raises:
            ProofError: its cells overlap or leave their region.
        """
        index = side.ranks[rank].pages[name]
        key = (side.role, name, index)
        if key not in self._known:
            self._known[key] = self._expand_page(
                side.pages[index], self.plan.group(name), f"{_WHERE[side.role]} page {index}"
            )
        return self._known[key]

    def _granule(self, name: str) -> int:
        """Bytes that divide every offset and length of a group's pages and copies."""
        size = 0
        for side in (self.plan.source, self.plan.destination):
            for index in {rank.pages[name] for rank in side.ranks if name in rank.pages}:
                page = side.pages[index]
                for region in page.regions:
                    size = math.gcd(size, region.bytes)
                for part in page.parts:
                    size = math.gcd(size, part.offset, part.unit_stride, part.token_stride, part.cell_bytes)
                    if part.cell_repeat is not None:
                        size = math.gcd(size, part.cell_repeat.stride)
        for shape in self.plan.shapes:
            for copy in shape:
                if copy.group == name:
                    size = math.gcd(size, copy.bytes, copy.src, copy.dst, copy.src_sub, copy.dst_sub)
                    for loop in copy.repeat:
                        size = math.gcd(size, loop.src, loop.dst)
        return max(size, 1)

    def _expand_page(self, page: wire.Page, group: wire.Group, at: str) -> Cells:
        granule = self.granules[group.name]
        sub_tokens = group.sub_tokens or 1
        sizes = [region.bytes // granule for region in page.regions]
        if sum(sizes) > _MAX_GRANULES:
            self.findings.fatal(f"{at}: {sum(sizes)} granules of {granule} bytes are too many to prove")
        identity = [np.full(size, -1, dtype=np.int64) for size in sizes]
        sub = [np.zeros(size, dtype=np.int64) for size in sizes]
        for number, placed in enumerate(page.parts):
            tokens = (page.block_tokens or 1) if placed.token_stride else 1
            per_sub = sub_tokens if placed.token_stride else 1
            repeat = placed.cell_repeat.count if placed.cell_repeat else 1
            repeat_stride = placed.cell_repeat.stride if placed.cell_repeat else 0
            count = placed.units[1] - placed.units[0]
            inner = placed.cell_bytes // granule
            if count < 1 or count * tokens * repeat * inner > sizes[placed.region]:
                self.findings.fatal(
                    f"{at}: units {list(placed.units)} of part {placed.name} do not fit into "
                    f"{page.regions[placed.region].bytes} bytes"
                )
            unit, token, row, byte = np.meshgrid(
                np.arange(count), np.arange(tokens), np.arange(repeat), np.arange(inner), indexing="ij"
            )
            where = (
                placed.offset + unit * placed.unit_stride + token * placed.token_stride + row * repeat_stride
            ) // granule + byte
            if int(where.max()) >= sizes[placed.region]:
                self.findings.fatal(
                    f"{at}: part {placed.name} reaches outside the {page.regions[placed.region].bytes} bytes of "
                    "its region"
                )
            flat = where.ravel()
            if len(np.unique(flat)) != len(flat) or (identity[placed.region][flat] != -1).any():
                self.findings.fatal(f"{at}: cells of part {placed.name} overlap others")
            label = unit + placed.units[0]
            for digit, base in ((token % per_sub, per_sub), (row, repeat), (byte, inner)):
                label = label * base + digit
            identity[placed.region][flat] = (label * len(page.parts) + number).ravel()
            sub[placed.region][flat] = (token // per_sub).ravel()
        return Cells(identity, sub)
