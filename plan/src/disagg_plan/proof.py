"""Independent proof that a plan moves every byte right.

Shares nothing with the planner but the wire format. A plan is expanded to granules (the greatest common divisor of all
offsets and lengths of a page) and checked, per destination rank and layer:

1. every cell's granules are written exactly once, from the same part, unit, token and place in the cell, at a source
   rank that holds that layer;
2. nothing outside a page's cells is read or written;
3. completions name exactly the readers of each source rank, and one rank for each source that nobody reads.

It also checks what the two sides themselves claim: units by the sharding rule, layers by stage, cells that do not
overlap, stay inside their region and are the same thing on every page, blocks of one size in a table, compatibility
factors that fit; and that nothing in the document is unused or said twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from disagg_plan import wire
from disagg_plan.findings import Findings
from disagg_plan.proof_cells import CellMap, Cells, Ints
from disagg_plan.proof_document import DocumentCheck
from disagg_plan.ranges import parse_ranges


@dataclass(frozen=True)
class Proof:
    """What was proven.

    Attributes:
        edges: edges checked.
        cells_per_token: cells (unit of a part of a layer) written per token over all destination ranks.
        bytes_per_token: bytes written per token over all destination ranks.
    """

    edges: int
    cells_per_token: int
    bytes_per_token: int


def prove(plan: wire.Plan) -> Proof:
    """Prove a plan.

    Raises:
        ProofError: with every violation found, the first 50 at most.
    """
    findings = Findings()
    DocumentCheck(plan, findings).run()
    return _Coverage(plan, findings, CellMap(plan, findings)).run()


@dataclass
class _Coverage:
    """Every byte of every destination part, written once and from the right place."""

    plan: wire.Plan
    findings: Findings
    cells: CellMap

    def run(self) -> Proof:
        cells, size = self._check_coverage()
        self.findings.stop_if_any()
        self._check_summary(size)
        self.findings.stop_if_any()
        return Proof(edges=len(self.plan.edges), cells_per_token=cells, bytes_per_token=size)

    def _check_coverage(self) -> tuple[int, int]:
        incoming: dict[int, list[wire.Edge]] = {}
        for edge in self.plan.edges:
            incoming.setdefault(edge.destination, []).append(edge)
        cells = size = 0
        for rank in range(len(self.plan.destination.ranks)):
            edges = incoming.get(rank, [])
            for edge in edges:
                self._check_layers_held(edge)
            for name, text in self.plan.destination.ranks[rank].layers.items():
                for layers, copies in self._layer_classes(name, parse_ranges(text), edges):
                    self._check_rank(rank, name, layers, copies)
                page = self.plan.destination.pages[self.plan.destination.ranks[rank].pages[name]]
                for placed in page.parts:
                    units = (placed.units[1] - placed.units[0]) * len(parse_ranges(text))
                    repeat = placed.cell_repeat.count if placed.cell_repeat else 1
                    cells += units
                    size += units * repeat * placed.cell_bytes // (1 if placed.token_stride else page.block_tokens or 1)
        return cells, size

    def _check_layers_held(self, edge: wire.Edge) -> None:
        at = f"edge p{edge.source} -> d{edge.destination}"
        ends = (
            ("prefill", self.plan.source.ranks[edge.source]),
            ("decode", self.plan.destination.ranks[edge.destination]),
        )
        for copy in self.plan.shapes[edge.shape]:
            for role, held in ends:
                layers = set(parse_ranges(held.layers[copy.group])) if copy.group in held.layers else set()
                if not layers >= set(parse_ranges(copy.layers)):
                    self.findings.fatal(
                        f"{at}: copies layers {copy.layers} of {copy.group}, which its {role} rank does not hold"
                    )
            if copy.part not in {part.name for part in self.plan.group(copy.group).parts}:
                self.findings.fatal(f"{at}: group {copy.group} has no part {copy.part}")

    def _layer_classes(
        self, name: str, layers: Iterable[int], edges: Iterable[wire.Edge]
    ) -> list[tuple[list[int], list[tuple[wire.Edge, int]]]]:
        """Layers of one rank and group that are served by the same copies, each with those copies."""
        serving: dict[int, list[tuple[wire.Edge, int]]] = {layer: [] for layer in layers}
        for edge in edges:
            for index, copy in enumerate(self.plan.shapes[edge.shape]):
                if copy.group == name:
                    for layer in parse_ranges(copy.layers):
                        serving[layer].append((edge, index))
        classes: dict[tuple[tuple[int, int], ...], tuple[list[int], list[tuple[wire.Edge, int]]]] = {}
        for layer, copies in serving.items():
            key = tuple((edge.source, index) for edge, index in copies)
            classes.setdefault(key, ([], copies))[0].append(layer)
        return list(classes.values())

    def _check_rank(self, rank: int, name: str, layers: list[int], copies: list[tuple[wire.Edge, int]]) -> None:
        at = f"decode rank {rank} group {name} layers {layers[0]}..{layers[-1]}"
        cells = self.cells.page(self.plan.destination, rank, name)
        written = [np.zeros(len(identity), dtype=np.int64) for identity in cells.identity]
        for edge, index in copies:
            touched = self._check_copy(edge, index, cells, f"edge p{edge.source} -> d{edge.destination}")
            if touched is None:
                return
            region, granules = touched
            np.add.at(written[region], granules, 1)
        for region, (count, identity) in enumerate(zip(written, cells.identity, strict=True)):
            granule = self.cells.granules[name]
            for problem, bad in (
                ("is never written", (count == 0) & (identity >= 0)),
                ("is written more than once", (count > 1) & (identity >= 0)),
                ("is padding and is written", (count > 0) & (identity < 0)),
            ):
                if bad.any():
                    first = int(np.flatnonzero(bad)[0]) * granule
                    self.findings.add(
                        f"{at}: byte {first} of region {region} {problem} ({int(bad.sum()) * granule} bytes in all)"
                    )

    def _check_copy(self, edge: wire.Edge, index: int, dst_cells: Cells, at: str) -> tuple[int, Ints] | None:
        """Granules that one copy writes over all sub-blocks of the destination page, or None if it is wrong."""
        copy = self.plan.shapes[edge.shape][index]
        name = copy.group
        granule = self.cells.granules[name]
        src_page = self.plan.source.pages[self.plan.source.ranks[edge.source].pages[name]]
        dst_page = self.plan.destination.pages[self.plan.destination.ranks[edge.destination].pages[name]]
        src_region = next(part.region for part in src_page.parts if part.name == copy.part)
        dst_region = next(part.region for part in dst_page.parts if part.name == copy.part)
        number = [part.name for part in dst_page.parts].index(copy.part)
        src_cells = self.cells.page(self.plan.source, edge.source, name)
        total = copy.bytes // granule * math.prod(loop.count for loop in copy.repeat)
        if total > min(src_page.regions[src_region].bytes, dst_page.regions[dst_region].bytes) // granule:
            self.findings.fatal(f"{at} copy {index}: {total * granule} bytes are more than a page holds")
        starts_src, starts_dst = np.array([copy.src]), np.array([copy.dst])
        for loop in copy.repeat:
            starts_src = (starts_src[:, None] + np.arange(loop.count) * loop.src).ravel()
            starts_dst = (starts_dst[:, None] + np.arange(loop.count) * loop.dst).ravel()
        inside = np.arange(copy.bytes // granule)
        read = (starts_src[:, None] // granule + inside).ravel()
        write = (starts_dst[:, None] // granule + inside).ravel()
        sub_tokens = self.plan.group(name).sub_tokens or 1
        expected: Ints | None = None
        written = []
        for role, page, region, cells, first, step in (
            ("source", src_page, src_region, src_cells, read, copy.src_sub),
            ("destination", dst_page, dst_region, dst_cells, write, copy.dst_sub),
        ):
            subs = (page.block_tokens or 1) // sub_tokens
            if step and subs == 1:
                self.findings.add(
                    f"{at} copy {index} ({name}.{copy.part}): {'src' if role == 'source' else 'dst'}Sub {step}, "
                    "and the page "
                    "is one sub-block"
                )
                return None
            for sub in range(subs):
                granules = first + sub * step // granule
                if int(granules.max()) >= len(cells.identity[region]):
                    self.findings.add(
                        f"{at} copy {index} ({name}.{copy.part}): sub-block {sub} leaves the "
                        f"{page.regions[region].bytes} bytes of the {role} page"
                    )
                    return None
                found = cells.identity[region][granules]
                if (
                    (found < 0).any()
                    or (cells.sub[region][granules] != sub).any()
                    or (found % len(page.parts) != number).any()
                ):
                    self.findings.add(
                        f"{at} copy {index} ({name}.{copy.part}): touches bytes of the {role} page that are not "
                        f"{copy.part} of sub-block {sub}"
                    )
                    return None
                if expected is None:
                    expected = found
                elif not np.array_equal(found, expected):
                    wrong = int(np.flatnonzero(found != expected)[0])
                    self.findings.add(
                        f"{at} copy {index} ({name}.{copy.part}): byte {wrong * granule} of the copy is another "
                        "unit, token or place "
                        f"in the {role} page"
                    )
                    return None
                if role == "destination":
                    written.append(granules)
        return dst_region, np.concatenate(written)

    def _check_summary(self, moved: int) -> None:
        """The figures that follow from coverage alone; a wrong one would mislead whoever reads the plan."""
        plan = self.plan
        sent = dict.fromkeys(range(len(plan.source.ranks)), 0)
        received = dict.fromkeys(range(len(plan.destination.ranks)), 0)
        for edge in plan.edges:
            for copy in plan.shapes[edge.shape]:
                sub_tokens = plan.group(copy.group).sub_tokens or 1
                size = copy.bytes * math.prod(loop.count for loop in copy.repeat) * len(parse_ranges(copy.layers))
                sent[edge.source] += size // sub_tokens
                received[edge.destination] += size // sub_tokens
        once = 0
        for group in plan.groups:
            holder = next(rank for rank in plan.destination.ranks if group.name in rank.pages)
            page = plan.destination.pages[holder.pages[group.name]]
            for declared, placed in zip(group.parts, page.parts, strict=True):
                repeat = placed.cell_repeat.count if placed.cell_repeat else 1
                size = declared.units * placed.cell_bytes * repeat * len(parse_ranges(group.layers))
                once += size // (1 if placed.token_stride else page.block_tokens or 1)
        figures = {
            "bytesPerToken": (plan.summary.bytes_per_token, once),
            "stateBytesPerRequest": (plan.summary.state_bytes_per_request, 0),
            "maxSourceBytes": (plan.summary.max_source_bytes, max(sent.values())),
            "meanSourceBytes": (plan.summary.mean_source_bytes, moved // len(sent)),
            "maxDestinationBytes": (plan.summary.max_destination_bytes, max(received.values())),
        }
        for name, (said, actual) in figures.items():
            if said != actual:
                self.findings.add(f"summary.{name} is {said}, the edges give {actual}")
