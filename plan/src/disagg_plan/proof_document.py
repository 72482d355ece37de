"""What a plan says of itself: groups, ranks, pages, references and completions, checked against each other.

Part of the proof, and as independent of the planner: nothing here looks at how bytes move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from disagg_plan import canonical, wire
from disagg_plan.findings import Findings
from disagg_plan.ranges import parse_ranges


@dataclass
class DocumentCheck:
    """Checks of one plan; findings are shared with the rest of the proof."""

    plan: wire.Plan
    findings: Findings

    def run(self) -> None:
        """All checks, in an order in which none stumbles over what an earlier one found.

        Raises:
            ProofError: with what was found.
        """
        self._check_groups()
        self._check_side(self.plan.source, "source")
        self._check_side(self.plan.destination, "destination")
        self.findings.stop_if_any()
        self._check_blocks()
        self._check_cells()
        self._check_factors()
        self.findings.stop_if_any()
        self._check_references()
        self._check_completions()
        self.findings.stop_if_any()

    def _check_groups(self) -> None:
        names = [group.name for group in self.plan.groups]
        for name in {name for name in names if names.count(name) > 1}:
            self.findings.add(f"group {name} stands twice")
        owner: dict[tuple[int, str], str] = {}
        for group in self.plan.groups:
            if group.kind != "paged" or group.tokens.rule != "all":
                self.findings.fatal(
                    f"group {group.name}: kind {group.kind} with rule {group.tokens.rule} cannot be proven by "
                    "this version"
                )
            if group.sub_tokens is None:
                self.findings.fatal(f"group {group.name}: a paged group needs subTokens")
            parts = [part.name for part in group.parts]
            for part in parts:
                if parts.count(part) > 1:
                    self.findings.fatal(f"group {group.name}: part {part} stands twice")
                for layer in parse_ranges(group.layers):
                    other = owner.setdefault((layer, part), group.name)
                    if other != group.name:
                        self.findings.add(f"part {part} of layer {layer} is in groups {other} and {group.name}")

    def _check_side(self, side: wire.Side, where: str) -> None:
        expected_role = "prefill" if where == "source" else "decode"
        parallelism = side.parallelism
        if side.role != expected_role:
            self.findings.add(f"{where}: role is {side.role}")
        if parallelism.decode_context != 1:
            self.findings.fatal(f"{where}: decodeContext {parallelism.decode_context} cannot be proven by this version")
        if len(side.ranks) != parallelism.tensor * parallelism.pipeline:
            self.findings.fatal(
                f"{where}: {len(side.ranks)} ranks, parallelism {parallelism.tensor} x {parallelism.pipeline} has "
                f"{parallelism.tensor * parallelism.pipeline}"
            )
        used: set[int] = set()
        for rank, held in enumerate(side.ranks):
            used |= set(held.pages.values())
            if set(held.pages) != set(held.layers):
                self.findings.fatal(f"{where} rank {rank}: pages and layers name different groups")
            for name, index in held.pages.items():
                if name not in {group.name for group in self.plan.groups}:
                    self.findings.fatal(f"{where} rank {rank}: group {name} is not declared")
                if index >= len(side.pages):
                    self.findings.fatal(f"{where} rank {rank}: page {index} of {len(side.pages)}")
                self._check_page(side, where, rank, name)
        for index in range(len(side.pages)):
            if index not in used:
                self.findings.add(f"{where}: page {index} is used by no rank")
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
                    self.findings.add(
                        f"{where} rank {rank}: holds other layers of {group.name} than rank "
                        f"{rank - rank % tensor} of its stage"
                    )
            together = [layer for stage in stages for layer in stage]
            if sorted(together) != list(parse_ranges(group.layers)):
                self.findings.add(
                    f"{where}: the stages do not hold each layer of {group.name} ({group.layers}) exactly once"
                )

    def _check_page(self, side: wire.Side, where: str, rank: int, name: str) -> None:
        group = self.plan.group(name)
        page = side.pages[side.ranks[rank].pages[name]]
        at = f"{where} rank {rank} group {name}"
        if page.block_tokens is None or page.per_block is not None:
            self.findings.fatal(f"{at}: this version proves pages with blockTokens and without perBlock")
        if page.block_tokens % (group.sub_tokens or 1):
            self.findings.add(
                f"{at}: subTokens {group.sub_tokens} does not divide the block of {page.block_tokens} tokens"
            )
        if [part.name for part in page.parts] != [part.name for part in group.parts]:
            self.findings.fatal(f"{at}: its page has other parts than the group")
        for index, region in enumerate(page.regions):
            if region.stride < region.bytes:
                self.findings.add(f"{at}: stride {region.stride} is below the {region.bytes} bytes of a page")
            if index not in {part.region for part in page.parts}:
                self.findings.add(f"{at}: no part lies in region {index}")
        tensor = side.parallelism.tensor
        for declared, placed in zip(group.parts, page.parts, strict=True):
            expected = _held_units(declared, tensor, rank % tensor)
            if expected is None:
                self.findings.add(f"{at}: {declared.units} units of {declared.name} cannot be placed on {tensor} ranks")
            elif placed.units != expected:
                self.findings.add(
                    f"{at}: holds units {list(placed.units)} of {declared.name}, the sharding rule gives "
                    f"{list(expected)}"
                )
            if placed.region >= len(page.regions):
                self.findings.fatal(f"{at}: part {placed.name} lies in region {placed.region} of {len(page.regions)}")
            if not placed.token_stride and page.block_tokens != group.sub_tokens:
                self.findings.add(
                    f"{at}: part {placed.name} cannot be cut by token, and subTokens is {group.sub_tokens} of "
                    f"{page.block_tokens}"
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
                    self.findings.add(f"table {table}: the ranks of the {where} have blocks of {several} tokens")
                sizes += found
            for group in groups:
                if len(sizes) == 2 and group.sub_tokens != math.gcd(*sizes):
                    self.findings.add(
                        f"table {table}: subTokens {group.sub_tokens} of {group.name}, blocks of {sizes[0]} and "
                        f"{sizes[1]} "
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
                            self.findings.add(
                                f"{here[0]} group {name}: cells of {placed.name} are {here[1]}, those of "
                                f"{first[0]} are "
                                f"{first[1]}"
                            )

    def _check_factors(self) -> None:
        """Peers compare compatibility factors: where these repeat what the plan says, they must say the same."""
        factors = self.plan.compat.factors
        groups = [group.model_dump(by_alias=True, exclude_none=True, mode="json") for group in self.plan.groups]
        if factors.get("groups", canonical.digest(groups)) != canonical.digest(groups):
            self.findings.add("compat.factors.groups is not the digest of the plan's groups")
        for where, side in self._sides():
            stated = factors.get(side.role)
            if isinstance(stated, dict) and "blockTokens" in stated:
                for index, page in enumerate(side.pages):
                    if page.block_tokens != stated["blockTokens"]:
                        self.findings.add(
                            f"{where}: page {index} has blocks of {page.block_tokens} tokens, compat.factors say "
                            f"{stated['blockTokens']}"
                        )

    def _check_references(self) -> None:
        plan = self.plan
        seen: set[tuple[int, int]] = set()
        for edge in plan.edges:
            pair = (edge.source, edge.destination)
            if edge.source >= len(plan.source.ranks) or edge.destination >= len(plan.destination.ranks):
                self.findings.fatal(f"edge p{pair[0]} -> d{pair[1]}: no such rank")
            if edge.shape >= len(plan.shapes):
                self.findings.fatal(f"edge p{pair[0]} -> d{pair[1]}: shape {edge.shape} of {len(plan.shapes)}")
            if pair in seen:
                self.findings.add(f"edge p{pair[0]} -> d{pair[1]} stands twice")
            seen.add(pair)
        used = {edge.shape for edge in plan.edges}
        texts = [tuple(shape) for shape in plan.shapes]
        for index, shape in enumerate(plan.shapes):
            if index not in used:
                self.findings.add(f"shape {index} is used by no edge")
            if not shape:
                self.findings.add(f"shape {index} is empty")
            if texts.index(tuple(shape)) != index:
                self.findings.add(f"shape {index} is the same as shape {texts.index(tuple(shape))}")

    def _check_completions(self) -> None:
        plan = self.plan
        ranks = len(plan.source.ranks)
        if set(plan.completions) != {str(rank) for rank in range(ranks)}:
            self.findings.fatal(
                f"completions name {sorted(plan.completions)}, the prefill side has ranks 0 to {ranks - 1}"
            )
        for rank in range(ranks):
            told = plan.completions[str(rank)]
            readers = sorted(edge.destination for edge in plan.edges if edge.source == rank)
            if readers and told != readers:
                self.findings.add(f"prefill rank {rank} waits for decode ranks {told}, its readers are {readers}")
            if not readers and (len(told) != 1 or told[0] >= len(plan.destination.ranks)):
                self.findings.add(
                    f"prefill rank {rank} is read by nobody and needs one decode rank to tell it, not {told}"
                )


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
