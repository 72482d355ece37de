"""The planner: geometry and two declared replicas in, a sealed plan out.

    need(d, part, layer)  = units that decode rank d holds
    hold(s, part, layer)  = units that prefill rank s holds
    edge(s, d)            = what of need(d) is taken from hold(s), by interval intersection per part and layer

Never a ratio of TP sizes: one rule covers TP up, down and unequal ratios, replication on either side, pipeline
splits and latents. Where several sources hold the same units, `disagg_plan.spread` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from disagg_plan import canonical, wire
from disagg_plan.errors import Refusal
from disagg_plan.geometry import Geometry, Group, Part, check_geometry
from disagg_plan.profiles import Layout, Profile, build_page, page_parts
from disagg_plan.ranges import format_ranges
from disagg_plan.spread import Assignment, Demand, spread
from disagg_plan.summary import summarise
from disagg_plan.topology import can_hold, check_stages, unit_interval, workable_sizes

PROTOCOL_VERSION = 1
"""Version of everything that two agents say to each other; part of compatibility."""


@dataclass(frozen=True)
class Replica:
    """One side as declared: how it is cut, and how its engine lays out pages.

    Attributes:
        stages: layer ids of each pipeline stage, `pipeline` entries.
        block_tokens: tokens of a block.
    """

    role: Literal["prefill", "decode"]
    parallelism: wire.Parallelism
    stages: tuple[tuple[int, ...], ...]
    profile: Profile
    layout: Layout
    block_tokens: int


def build_plan(geometry: Geometry, prefill: Replica, decode: Replica, factors: Mapping[str, Any]) -> wire.Plan:
    """Compute the plan between one prefill and one decode replica.

    Args:
        factors: what both sides must agree on besides the mapping (model, revision, dtype, engine); block
            sizes, profiles, geometry and protocol version are added here.

    Raises:
        Refusal: the two sides cannot work together; field, numbers and the way out are in it.
    """
    check_geometry(geometry)
    for replica in (prefill, decode):
        _check_replica(geometry, replica)
    groups = _groups(geometry, prefill, decode)
    source, destination = (_Layout.of(replica, groups) for replica in (prefill, decode))
    demands = _demands(groups, prefill, decode)
    assignments = spread(demands, prefill.parallelism.ranks)
    shapes, edges = _edges(assignments, groups, source, destination)
    completions = _completions(edges, prefill.parallelism.ranks, decode.parallelism.ranks)
    full_factors = {**factors, **_factors(groups, prefill, decode)}
    body: dict[str, Any] = {
        "schema": wire.SCHEMA,
        "compat": {"digest": canonical.digest(full_factors), "factors": full_factors},
        "source": _dump(source.side),
        "destination": _dump(destination.side),
        "groups": [_dump(group.wire) for group in groups],
        "shapes": [[_dump(copy) for copy in shape] for shape in shapes],
        "edges": [_dump(edge) for edge in edges],
        "completions": completions,
        "summary": dict.fromkeys(
            (
                "bytesPerToken",
                "stateBytesPerRequest",
                "copiesPerBlock",
                "maxSourceBytes",
                "meanSourceBytes",
                "maxDestinationBytes",
            ),
            0,
        ),
        "warnings": [],
    }
    summary, warnings = summarise(wire.seal(body))
    body["summary"] = _dump(summary)
    body["warnings"] = [_dump(warning) for warning in warnings]
    return wire.seal(body)


@dataclass(frozen=True)
class _PlannedGroup:
    """A group with the parts that its pages really have, and what it pairs by."""

    geometry: Group
    parts: tuple[Part, ...]
    sub_tokens: int

    @property
    def name(self) -> str:
        return self.geometry.name

    @property
    def wire(self) -> wire.Group:
        return wire.Group(
            name=self.name,
            kind=self.geometry.kind,
            layers=format_ranges(self.geometry.layers),
            table=self.geometry.table,
            tokens=wire.Tokens(rule="all"),
            parts=[wire.GroupPart(name=part.name, units=part.units, sharding=part.sharding) for part in self.parts],
            sub_tokens=self.sub_tokens,
        )

    def classes(self) -> list[tuple[Part, ...]]:
        """Parts that are sharded alike travel together, so that their runs can join."""
        alike: dict[tuple[int, str], list[Part]] = {}
        for part in self.parts:
            alike.setdefault((part.units, part.sharding), []).append(part)
        return [tuple(parts) for parts in alike.values()]


@dataclass(frozen=True)
class _Layout:
    """A side on the wire, with the page of each (rank, group) at hand."""

    side: wire.Side
    replica: Replica

    @staticmethod
    def of(replica: Replica, groups: list[_PlannedGroup]) -> _Layout:
        pages: list[wire.Page] = []
        known: dict[bytes, int] = {}
        ranks = []
        for stage in replica.stages:
            for tp_rank in range(replica.parallelism.tensor):
                indexes: dict[str, int] = {}
                layers: dict[str, str] = {}
                for group in groups:
                    held = sorted(set(stage) & set(group.geometry.layers))
                    if not held:
                        continue
                    page = _page(replica, group, tp_rank)
                    key = canonical.dumps(_dump(page))
                    if key not in known:
                        known[key] = len(pages)
                        pages.append(page)
                    indexes[group.name] = known[key]
                    layers[group.name] = format_ranges(held)
                ranks.append(wire.Rank(pages=indexes, layers=layers))
        side = wire.Side(role=replica.role, parallelism=replica.parallelism, pages=pages, ranks=ranks)
        return _Layout(side, replica)

    def placed(self, rank: int, group: str, part: str) -> wire.PagePart:
        page = self.side.pages[self.side.ranks[rank].pages[group]]
        return next(placed for placed in page.parts if placed.name == part)


def _page(replica: Replica, group: _PlannedGroup, tp_rank: int) -> wire.Page:
    units = {
        part.name: unit_interval(part.units, part.sharding, replica.parallelism.tensor, tp_rank) for part in group.parts
    }
    return build_page(replica.profile, replica.layout, group.parts, units, replica.block_tokens)


def _check_replica(geometry: Geometry, replica: Replica) -> None:
    parallelism = replica.parallelism
    if parallelism.decode_context > 1:
        raise Refusal(
            "UnsupportedTopology",
            f"{replica.role}.parallelism.decodeContext",
            f"decode context parallelism of {parallelism.decode_context} is not planned yet",
            "Use 1",
        )
    for group in geometry.groups:
        if group.kind != "paged":
            raise Refusal(
                "UnsupportedCache",
                f"model.geometry.groups[{group.name}].kind",
                f"group {group.name!r} holds {group.kind}, and only paged groups are planned yet",
                "Serve this model without disaggregation",
            )
        for part in group.parts:
            if part.sharding == "split" and not can_hold(part.units, parallelism.tensor):
                sizes = ", ".join(str(size) for size in _workable_sizes(geometry))
                raise Refusal(
                    "IndivisibleUnits",
                    f"{replica.role}.parallelism.tensor",
                    f"{part.units} units of part {part.name!r} cannot be placed on {parallelism.tensor} "
                    "tensor-parallel ranks: neither number divides the other",
                    f"Use a tensor-parallel size of {sizes}",
                )
    stages_field = f"{replica.role}.parallelism.pipelineLayers"
    if len(replica.stages) != parallelism.pipeline:
        raise Refusal(
            "BadStages",
            stages_field,
            f"{len(replica.stages)} stages are given for {parallelism.pipeline} pipeline ranks",
            f"Give {parallelism.pipeline} stages, or set parallelism.pipeline to {len(replica.stages)}",
        )
    check_stages(replica.stages, geometry.layers, stages_field)


def _workable_sizes(geometry: Geometry) -> list[int]:
    """Tensor-parallel sizes that can hold every part of the model."""
    units = {part.units for group in geometry.groups for part in group.parts if part.sharding == "split"}
    return sorted(set.intersection(*(set(workable_sizes(count)) for count in units)))


def _groups(geometry: Geometry, prefill: Replica, decode: Replica) -> list[_PlannedGroup]:
    planned = []
    for group in geometry.groups:
        parts = page_parts(prefill.profile, group)
        opaque = "opaque" in (prefill.profile.arrangement, decode.profile.arrangement)
        if parts != page_parts(decode.profile, group) or (opaque and _inside(prefill) != _inside(decode)):
            raise Refusal(
                "LayoutMismatch",
                "decode.engine.backend",
                f"prefill pages ({prefill.profile.name}) hold {_names(parts)}, decode pages ({decode.profile.name}) "
                f"hold {_names(page_parts(decode.profile, group))}: no copy turns one order of bytes into the other",
                "Use the same attention backend on both sides",
            )
        if opaque and prefill.block_tokens != decode.block_tokens:
            raise Refusal(
                "OpaqueBlockSize",
                "decode.kvCache.blockSize",
                f"{prefill.profile.name} pages can be cut by head only, and block sizes differ: prefill "
                f"{prefill.block_tokens}, decode {decode.block_tokens}",
                f"Use {prefill.block_tokens} on both sides",
            )
        planned.append(_PlannedGroup(group, parts, math.gcd(prefill.block_tokens, decode.block_tokens)))
    return planned


def _inside(replica: Replica) -> tuple[str, str]:
    """Whose order of bytes is inside an opaque run; a profile that is stated is the same as one that is known."""
    return replica.profile.name, replica.profile.arrangement


def _names(parts: tuple[Part, ...]) -> str:
    return "+".join(part.name for part in parts)


def _demands(groups: list[_PlannedGroup], prefill: Replica, decode: Replica) -> list[Demand]:
    demands = []
    for group in groups:
        for parts in group.classes():
            held = _holders(parts[0], prefill.parallelism.tensor)
            layer_bytes = sum(part.cell_bytes for part in parts)
            for stage_index, stage in enumerate(prefill.stages):
                first = stage_index * prefill.parallelism.tensor
                for decode_stage, needed in enumerate(decode.stages):
                    layers = tuple(sorted(set(stage) & set(needed) & set(group.geometry.layers)))
                    if not layers:
                        continue
                    for tp_rank in range(decode.parallelism.tensor):
                        need = unit_interval(parts[0].units, parts[0].sharding, decode.parallelism.tensor, tp_rank)
                        for hold, ranks in held.items():
                            low, high = max(need[0], hold[0]), min(need[1], hold[1])
                            if low >= high:
                                continue
                            demands.append(
                                Demand(
                                    destination=decode_stage * decode.parallelism.tensor + tp_rank,
                                    group=group.name,
                                    parts=tuple(part.name for part in parts),
                                    units=(low, high),
                                    layers=layers,
                                    layer_bytes=(high - low) * layer_bytes,
                                    candidates=tuple(first + rank for rank in ranks),
                                )
                            )
    return demands


def _holders(part: Part, tensor: int) -> dict[tuple[int, int], list[int]]:
    """Tensor-parallel ranks by the interval of units that they hold."""
    holders: dict[tuple[int, int], list[int]] = {}
    for rank in range(tensor):
        holders.setdefault(unit_interval(part.units, part.sharding, tensor, rank), []).append(rank)
    return holders


def _edges(
    assignments: tuple[Assignment, ...], groups: list[_PlannedGroup], source: _Layout, destination: _Layout
) -> tuple[list[list[wire.Copy]], list[wire.Edge]]:
    by_name = {group.name: group for group in groups}
    per_edge: dict[tuple[int, int], list[wire.Copy]] = {}
    for assignment in assignments:
        demand = assignment.demand
        copies = per_edge.setdefault((assignment.source, demand.destination), [])
        for part in demand.parts:
            copies.append(
                _copy(
                    by_name[demand.group],
                    part,
                    demand,
                    source.placed(assignment.source, demand.group, part),
                    source.replica.block_tokens,
                    destination.placed(demand.destination, demand.group, part),
                    destination.replica.block_tokens,
                )
            )
    shapes: list[list[wire.Copy]] = []
    known: dict[bytes, int] = {}
    edges = []
    for (source_rank, destination_rank), copies in sorted(per_edge.items()):
        copies.sort(key=lambda copy: (copy.group, copy.part, copy.layers, copy.src, copy.dst))
        key = canonical.dumps([_dump(copy) for copy in copies])
        if key not in known:
            known[key] = len(shapes)
            shapes.append(copies)
        edges.append(
            wire.Edge.model_validate({"from": source_rank, "to": destination_rank, "shape": known[key]}, by_alias=True)
        )
    return shapes, edges


def _copy(
    group: _PlannedGroup,
    part: str,
    demand: Demand,
    src: wire.PagePart,
    src_block: int,
    dst: wire.PagePart,
    dst_block: int,
) -> wire.Copy:
    """One part's copy for one sub-block pair, its loops joined where bytes adjoin on both sides."""
    units = demand.units[1] - demand.units[0]
    loops = [(units, src.unit_stride, dst.unit_stride)]
    if src.token_stride:
        loops.append((group.sub_tokens, src.token_stride, dst.token_stride))
    # Innermost loop is the one with the smallest step in the source: NHD pages have tokens outside heads.
    loops = sorted((loop for loop in loops if loop[0] > 1), key=lambda loop: -loop[1])
    size = src.cell_bytes
    while loops and loops[-1][1] == size and loops[-1][2] == size:
        size *= loops.pop()[0]
    return wire.Copy(
        group=group.name,
        layers=format_ranges(demand.layers),
        part=part,
        bytes=size,
        src=src.offset + (demand.units[0] - src.units[0]) * src.unit_stride,
        dst=dst.offset + (demand.units[0] - dst.units[0]) * dst.unit_stride,
        repeat=[wire.Repeat(count=count, src=step_src, dst=step_dst) for count, step_src, step_dst in loops],
        src_sub=group.sub_tokens * src.token_stride if src_block > group.sub_tokens else 0,
        dst_sub=group.sub_tokens * dst.token_stride if dst_block > group.sub_tokens else 0,
    )


def _completions(edges: list[wire.Edge], sources: int, destinations: int) -> dict[str, list[int]]:
    readers: dict[int, list[int]] = {rank: [] for rank in range(sources)}
    for edge in edges:
        readers[edge.source].append(edge.destination)
    # A source that nobody reads still holds the request's blocks: one decode rank tells it when to let go.
    return {str(rank): sorted(found) or [rank * destinations // sources] for rank, found in readers.items()}


def _factors(groups: list[_PlannedGroup], prefill: Replica, decode: Replica) -> dict[str, Any]:
    return {
        "protocol": PROTOCOL_VERSION,
        "groups": canonical.digest([_dump(group.wire) for group in groups]),
        **{
            replica.role: {
                "blockTokens": replica.block_tokens,
                "profile": replica.profile.name,
                "layout": replica.layout,
            }
            for replica in (prefill, decode)
        },
    }


def _dump(value: wire.Wire) -> dict[str, Any]:
    return value.model_dump(by_alias=True, exclude_none=True, mode="json")
