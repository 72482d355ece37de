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
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from disagg_plan import canonical, wire
from disagg_plan.errors import ProofError
from disagg_plan.ranges import parse_ranges

Ints = NDArray[np.int64]

_MAX_FINDINGS = 50
_MAX_GRANULES = 1 << 22
"""Largest page, in granules, that is expanded: a real one has a few thousand."""


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
    return _Prover(plan).run()


@dataclass
class _Cells:
    """Cells of one page, granule by granule.

    `identity[region]` has one entry per granule: -1 for padding, else a number that is equal on both sides for the
    same part, unit, place in the cell, and token *within a sub-block*; `sub[region]` is the sub-block.
    """

    identity: list[Ints]
    sub: list[Ints]


@dataclass
class _Prover:
    plan: wire.Plan
    findings: list[str] = field(default_factory=list)
    _cells: dict[tuple[str, str, int], _Cells] = field(default_factory=dict)

    def run(self) -> Proof:
        self._check_groups()
        self._check_side(self.plan.source, "source")
        self._check_side(self.plan.destination, "destination")
        self._stop_on_findings()
        self._check_blocks()
        self._check_cells()
        self._check_factors()
        self._stop_on_findings()
        self._check_references()
        self._check_completions()
        self._stop_on_findings()
        self._granules = {group.name: self._granule(group.name) for group in self.plan.groups}
        cells, size = self._check_coverage()
        self._stop_on_findings()
        self._check_summary(size)
        self._stop_on_findings()
        return Proof(edges=len(self.plan.edges), cells_per_token=cells, bytes_per_token=size)

    def _stop_on_findings(self) -> None:
        if self.findings:
            raise ProofError(self.findings)

    def _find(self, message: str) -> None:
        self.findings.append(message)
        if len(self.findings) >= _MAX_FINDINGS:
            raise ProofError(self.findings)

    def _fatal(self, message: str) -> NoReturn:
        self.findings.append(message)
        raise ProofError(self.findings)

    # What the document says of itself.

    def _check_groups(self) -> None:
        names = [group.name for group in self.plan.groups]
        for name in {name for name in names if names.count(name) > 1}:
            self._find(f"group {name} stands twice")
        owner: dict[tuple[int, str], str] = {}
        for group in self.plan.groups:
            if group.kind != "paged" or group.tokens.rule != "all":
                self._fatal(
                    f"group {group.name}: kind {group.kind} with rule {group.tokens.rule} cannot be proven by this version"
                )
            if group.sub_tokens is None:
                self._fatal(f"group {group.name}: a paged group needs subTokens")
            parts = [part.name for part in group.parts]
            for part in parts:
                if parts.count(part) > 1:
                    self._fatal(f"group {group.name}: part {part} stands twice")
                for layer in parse_ranges(group.layers):
                    other = owner.setdefault((layer, part), group.name)
                    if other != group.name:
                        self._find(f"part {part} of layer {layer} is in groups {other} and {group.name}")

    def _check_side(self, side: wire.Side, where: str) -> None:
        expected_role = "prefill" if where == "source" else "decode"
        parallelism = side.parallelism
        if side.role != expected_role:
            self._find(f"{where}: role is {side.role}")
        if parallelism.decode_context != 1:
            self._fatal(f"{where}: decodeContext {parallelism.decode_context} cannot be proven by this version")
        if len(side.ranks) != parallelism.tensor * parallelism.pipeline:
            self._fatal(
                f"{where}: {len(side.ranks)} ranks, parallelism {parallelism.tensor} x {parallelism.pipeline} has "
                f"{parallelism.tensor * parallelism.pipeline}"
            )
        used: set[int] = set()
        for rank, held in enumerate(side.ranks):
            used |= set(held.pages.values())
            if set(held.pages) != set(held.layers):
                self._fatal(f"{where} rank {rank}: pages and layers name different groups")
            for name, index in held.pages.items():
                if name not in {group.name for group in self.plan.groups}:
                    self._fatal(f"{where} rank {rank}: group {name} is not declared")
                if index >= len(side.pages):
                    self._fatal(f"{where} rank {rank}: page {index} of {len(side.pages)}")
                self._check_page(side, where, rank, name)
        for index in range(len(side.pages)):
            if index not in used:
                self._find(f"{where}: page {index} is used by no rank")
        self._check_layers(side, where)

    def _check_layers(self, side: wire.Side, where: str) -> None:
        tensor = side.parallelism.tensor
        for group in self.plan.groups:
            stages: list[tuple[int, ...]] = []
            for rank, held in enumerate(side.ranks):
                layers = parse_ranges(held.layers[group.name]) if group.name in held.layers else ()
                if rank % tensor == 0:
                    stages.append(layers)
                elif layers != stages[-1]:
                    self._find(
                        f"{where} rank {rank}: holds other layers of {group.name} than rank {rank - rank % tensor} of its stage"
                    )
            together = [layer for stage in stages for layer in stage]
            if sorted(together) != list(parse_ranges(group.layers)):
                self._find(f"{where}: the stages do not hold each layer of {group.name} ({group.layers}) exactly once")

    def _check_page(self, side: wire.Side, where: str, rank: int, name: str) -> None:
        group = self.plan.group(name)
        page = side.pages[side.ranks[rank].pages[name]]
        at = f"{where} rank {rank} group {name}"
        if page.block_tokens is None or page.per_block is not None:
            self._fatal(f"{at}: this version proves pages with blockTokens and without perBlock")
        if page.block_tokens % (group.sub_tokens or 1):
            self._find(f"{at}: subTokens {group.sub_tokens} does not divide the block of {page.block_tokens} tokens")
        if [part.name for part in page.parts] != [part.name for part in group.parts]:
            self._fatal(f"{at}: its page has other parts than the group")
        for index, region in enumerate(page.regions):
            if region.stride < region.bytes:
                self._find(f"{at}: stride {region.stride} is below the {region.bytes} bytes of a page")
            if index not in {part.region for part in page.parts}:
                self._find(f"{at}: no part lies in region {index}")
        tensor = side.parallelism.tensor
        for declared, placed in zip(group.parts, page.parts, strict=True):
            expected = _held_units(declared, tensor, rank % tensor)
            if expected is None:
                self._find(f"{at}: {declared.units} units of {declared.name} cannot be placed on {tensor} ranks")
            elif placed.units != expected:
                self._find(
                    f"{at}: holds units {list(placed.units)} of {declared.name}, the sharding rule gives {list(expected)}"
                )
            if placed.region >= len(page.regions):
                self._fatal(f"{at}: part {placed.name} lies in region {placed.region} of {len(page.regions)}")
            if not placed.token_stride and page.block_tokens != group.sub_tokens:
                self._find(
                    f"{at}: part {placed.name} cannot be cut by token, and subTokens is {group.sub_tokens} of {page.block_tokens}"
                )

    def _sides(self) -> tuple[tuple[str, wire.Side], tuple[str, wire.Side]]:
        return (("source", self.plan.source), ("destination", self.plan.destination))

    def _check_blocks(self) -> None:
        """One list of block ids serves a table on all ranks of a side, so its blocks hold equally many tokens."""
        for table in self.plan.tables:
            groups = [group for group in self.plan.groups if group.table == table]
            sizes: list[int] = []
            for where, side in self._sides():
                pages = {rank.pages[group.name] for rank in side.ranks for group in groups if group.name in rank.pages}
                found = sorted({side.pages[index].block_tokens or 1 for index in pages})
                if len(found) > 1:
                    several = " and ".join(str(size) for size in found)
                    self._find(f"table {table}: the ranks of the {where} have blocks of {several} tokens")
                sizes += found
            for group in groups:
                if len(sizes) == 2 and group.sub_tokens != math.gcd(*sizes):
                    self._find(
                        f"table {table}: subTokens {group.sub_tokens} of {group.name}, blocks of {sizes[0]} and {sizes[1]} "
                        f"tokens have {math.gcd(*sizes)}"
                    )

    def _check_cells(self) -> None:
        """A cell is the same thing on every page of both sides; only where it lies may differ."""
        known: dict[tuple[str, str], tuple[str, str]] = {}
        for where, side in self._sides():
            for rank, held in enumerate(side.ranks):
                for name, index in held.pages.items():
                    for placed in side.pages[index].parts:
                        here = (f"{where} rank {rank}", _cell(placed))
                        first = known.setdefault((name, placed.name), here)
                        if first[1] != here[1]:
                            self._find(
                                f"{here[0]} group {name}: cells of {placed.name} are {here[1]}, those of {first[0]} are "
                                f"{first[1]}"
                            )

    def _check_factors(self) -> None:
        """Peers compare compatibility factors: where these repeat what the plan says, they must say the same."""
        factors = self.plan.compat.factors
        groups = [group.model_dump(by_alias=True, exclude_none=True, mode="json") for group in self.plan.groups]
        if factors.get("groups", canonical.digest(groups)) != canonical.digest(groups):
            self._find("compat.factors.groups is not the digest of the plan's groups")
        for where, side in self._sides():
            stated = factors.get(side.role)
            if isinstance(stated, dict) and "blockTokens" in stated:
                for index, page in enumerate(side.pages):
                    if page.block_tokens != stated["blockTokens"]:
                        self._find(
                            f"{where}: page {index} has blocks of {page.block_tokens} tokens, compat.factors say "
                            f"{stated['blockTokens']}"
                        )

    def _check_references(self) -> None:
        plan = self.plan
        seen: set[tuple[int, int]] = set()
        for edge in plan.edges:
            pair = (edge.source, edge.destination)
            if edge.source >= len(plan.source.ranks) or edge.destination >= len(plan.destination.ranks):
                self._fatal(f"edge p{pair[0]} -> d{pair[1]}: no such rank")
            if edge.shape >= len(plan.shapes):
                self._fatal(f"edge p{pair[0]} -> d{pair[1]}: shape {edge.shape} of {len(plan.shapes)}")
            if pair in seen:
                self._find(f"edge p{pair[0]} -> d{pair[1]} stands twice")
            seen.add(pair)
        used = {edge.shape for edge in plan.edges}
        texts = [tuple(shape) for shape in plan.shapes]
        for index, shape in enumerate(plan.shapes):
            if index not in used:
                self._find(f"shape {index} is used by no edge")
            if not shape:
                self._find(f"shape {index} is empty")
            if texts.index(tuple(shape)) != index:
                self._find(f"shape {index} is the same as shape {texts.index(tuple(shape))}")

    def _check_completions(self) -> None:
        plan = self.plan
        ranks = len(plan.source.ranks)
        if set(plan.completions) != {str(rank) for rank in range(ranks)}:
            self._fatal(f"completions name {sorted(plan.completions)}, the prefill side has ranks 0 to {ranks - 1}")
        for rank in range(ranks):
            told = plan.completions[str(rank)]
            readers = sorted(edge.destination for edge in plan.edges if edge.source == rank)
            if readers and told != readers:
                self._find(f"prefill rank {rank} waits for decode ranks {told}, its readers are {readers}")
            if not readers and (len(told) != 1 or told[0] >= len(plan.destination.ranks)):
                self._find(f"prefill rank {rank} is read by nobody and needs one decode rank to tell it, not {told}")

    # Granules.

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

    def _page_cells(self, side: wire.Side, where: str, rank: int, name: str) -> _Cells:
        index = side.ranks[rank].pages[name]
        key = (where, name, index)
        if key not in self._cells:
            self._cells[key] = self._expand_page(side.pages[index], self.plan.group(name), f"{where} page {index}")
        return self._cells[key]

    def _expand_page(self, page: wire.Page, group: wire.Group, at: str) -> _Cells:
        granule = self._granules[group.name]
        sub_tokens = group.sub_tokens or 1
        sizes = [region.bytes // granule for region in page.regions]
        if sum(sizes) > _MAX_GRANULES:
            self._fatal(f"{at}: {sum(sizes)} granules of {granule} bytes are too many to prove")
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
                self._fatal(
                    f"{at}: units {list(placed.units)} of part {placed.name} do not fit into {page.regions[placed.region].bytes} bytes"
                )
            unit, token, row, byte = np.meshgrid(
                np.arange(count), np.arange(tokens), np.arange(repeat), np.arange(inner), indexing="ij"
            )
            where = (
                placed.offset + unit * placed.unit_stride + token * placed.token_stride + row * repeat_stride
            ) // granule + byte
            if int(where.max()) >= sizes[placed.region]:
                self._fatal(
                    f"{at}: part {placed.name} reaches outside the {page.regions[placed.region].bytes} bytes of its region"
                )
            flat = where.ravel()
            if len(np.unique(flat)) != len(flat) or (identity[placed.region][flat] != -1).any():
                self._fatal(f"{at}: cells of part {placed.name} overlap others")
            label = unit + placed.units[0]
            for digit, base in ((token % per_sub, per_sub), (row, repeat), (byte, inner)):
                label = label * base + digit
            identity[placed.region][flat] = (label * len(page.parts) + number).ravel()
            sub[placed.region][flat] = (token // per_sub).ravel()
        return _Cells(identity, sub)

    # Coverage.

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
                    self._fatal(
                        f"{at}: copies layers {copy.layers} of {copy.group}, which its {role} rank does not hold"
                    )
            if copy.part not in {part.name for part in self.plan.group(copy.group).parts}:
                self._fatal(f"{at}: group {copy.group} has no part {copy.part}")

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
        cells = self._page_cells(self.plan.destination, "destination", rank, name)
        written = [np.zeros(len(identity), dtype=np.int64) for identity in cells.identity]
        for edge, index in copies:
            touched = self._check_copy(edge, index, cells, f"edge p{edge.source} -> d{edge.destination}")
            if touched is None:
                return
            region, granules = touched
            np.add.at(written[region], granules, 1)
        for region, (count, identity) in enumerate(zip(written, cells.identity, strict=True)):
            granule = self._granules[name]
            for problem, bad in (
                ("is never written", (count == 0) & (identity >= 0)),
                ("is written more than once", (count > 1) & (identity >= 0)),
                ("is padding and is written", (count > 0) & (identity < 0)),
            ):
                if bad.any():
                    first = int(np.flatnonzero(bad)[0]) * granule
                    self._find(
                        f"{at}: byte {first} of region {region} {problem} ({int(bad.sum()) * granule} bytes in all)"
                    )

    def _check_copy(self, edge: wire.Edge, index: int, dst_cells: _Cells, at: str) -> tuple[int, Ints] | None:
        """Granules that one copy writes over all sub-blocks of the destination page, or None if it is wrong."""
        copy = self.plan.shapes[edge.shape][index]
        name = copy.group
        granule = self._granules[name]
        src_page = self.plan.source.pages[self.plan.source.ranks[edge.source].pages[name]]
        dst_page = self.plan.destination.pages[self.plan.destination.ranks[edge.destination].pages[name]]
        src_region = next(part.region for part in src_page.parts if part.name == copy.part)
        dst_region = next(part.region for part in dst_page.parts if part.name == copy.part)
        number = [part.name for part in dst_page.parts].index(copy.part)
        src_cells = self._page_cells(self.plan.source, "source", edge.source, name)
        total = copy.bytes // granule * math.prod(loop.count for loop in copy.repeat)
        if total > min(src_page.regions[src_region].bytes, dst_page.regions[dst_region].bytes) // granule:
            self._fatal(f"{at} copy {index}: {total * granule} bytes are more than a page holds")
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
                self._find(
                    f"{at} copy {index} ({name}.{copy.part}): {'src' if role == 'source' else 'dst'}Sub {step}, and the page "
                    "is one sub-block"
                )
                return None
            for sub in range(subs):
                granules = first + sub * step // granule
                if int(granules.max()) >= len(cells.identity[region]):
                    self._find(
                        f"{at} copy {index} ({name}.{copy.part}): sub-block {sub} leaves the {page.regions[region].bytes} bytes of the {role} page"
                    )
                    return None
                found = cells.identity[region][granules]
                if (
                    (found < 0).any()
                    or (cells.sub[region][granules] != sub).any()
                    or (found % len(page.parts) != number).any()
                ):
                    self._find(
                        f"{at} copy {index} ({name}.{copy.part}): touches bytes of the {role} page that are not {copy.part} of sub-block {sub}"
                    )
                    return None
                if expected is None:
                    expected = found
                elif not np.array_equal(found, expected):
                    wrong = int(np.flatnonzero(found != expected)[0])
                    self._find(
                        f"{at} copy {index} ({name}.{copy.part}): byte {wrong * granule} of the copy is another unit, token or place "
                        f"in the {role} page"
                    )
                    return None
                if role == "destination":
                    written.append(granules)
        return dst_region, np.concatenate(written)

    # Figures.

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
                self._find(f"summary.{name} is {said}, the edges give {actual}")


def _cell(placed: wire.PagePart) -> str:
    rows = f"{placed.cell_repeat.count} x " if placed.cell_repeat and placed.cell_repeat.count > 1 else ""
    return f"{rows}{placed.cell_bytes} bytes a {'token' if placed.token_stride else 'block'}"


def _held_units(part: wire.GroupPart, tensor: int, rank: int) -> tuple[int, int] | None:
    if part.sharding == "replicated":
        return (0, part.units)
    if part.units % tensor == 0:
        return (rank * (part.units // tensor), (rank + 1) * (part.units // tensor))
    if tensor % part.units == 0:
        return (rank // (tensor // part.units), rank // (tensor // part.units) + 1)
    return None
