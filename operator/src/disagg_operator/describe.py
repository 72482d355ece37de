"""A plan as a person wants to see it: pure functions from a plan to rows and text."""

from __future__ import annotations

from dataclasses import dataclass

from disagg_plan import wire
from disagg_plan.ranges import format_ranges, parse_ranges
from disagg_plan.runs import edge_runs, shortest_run
from disagg_plan.summary import source_bound


@dataclass(frozen=True)
class MappingRow:
    """What one decode rank reads from one prefill rank.

    Attributes:
        units: units of each part, e.g. `k,v 2-3`.
        copies: runs per block over all layers.
    """

    destination: int
    source: int
    group: str
    layers: str
    units: str
    bytes_per_token: int
    copies: int
    shortest: int


def mapping(plan: wire.Plan) -> list[MappingRow]:
    """Rows ordered by decode rank, then prefill rank."""
    rows = []
    for edge in sorted(plan.edges, key=lambda edge: (edge.destination, edge.source)):
        runs = edge_runs(plan, edge)
        copies = plan.shapes[edge.shape]
        groups = sorted({copy.group for copy in copies})
        for group in groups:
            own = [copy for copy in copies if copy.group == group]
            of_group = [found for found in runs if found.group == group]
            layers = {layer for copy in own for layer in parse_ranges(copy.layers)}
            rows.append(
                MappingRow(
                    destination=edge.destination,
                    source=edge.source,
                    group=group,
                    layers=format_ranges(layers),
                    units=_units(plan, edge, own),
                    bytes_per_token=sum(
                        found.bytes * len(found.layers) // (plan.group(group).sub_tokens or 1) for found in of_group
                    ),
                    copies=sum(len(found.rows) * len(found.layers) for found in of_group),
                    shortest=shortest_run(of_group),
                )
            )
    return rows


def text_summary(plan: wire.Plan) -> str:
    """`summary.txt` of the plan ConfigMap: mapping, figures, warnings, in plain text."""
    header = ("DECODE", "PREFILL", "GROUP", "LAYERS", "UNITS", "B/TOKEN", "COPIES", "SHORTEST")
    table = [header, *(_cells(row) for row in mapping(plan))]
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    lines = [
        topology(plan),
        "",
        *("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table),
        "",
        *figures(plan),
    ]
    return "\n".join(lines) + "\n"


def topology(plan: wire.Plan) -> str:
    """One line: `prefill TP2 -> decode TP4, 4 edges`."""
    return f"prefill {_shape(plan.source)} -> decode {_shape(plan.destination)}, {len(plan.edges)} edges"


def figures(plan: wire.Plan) -> list[str]:
    """The figures and warnings, a line each."""
    summary = plan.summary
    bound = source_bound(summary)
    lines = [
        f"KV cache: {summary.bytes_per_token} bytes per token; {summary.copies_per_block} copies per block",
        f"busiest prefill rank sends {summary.max_source_bytes} bytes per token, mean {summary.mean_source_bytes}, "
        f"bound {bound}, ratio {summary.max_source_bytes / bound:.2f}",
        f"largest decode rank receives {summary.max_destination_bytes} bytes per token",
        f"plan {plan.digest}",
        f"compat {plan.compat.digest}",
    ]
    return lines + [f"warning {warning.code}: {warning.message}" for warning in plan.warnings]


def _cells(row: MappingRow) -> tuple[str, ...]:
    return (
        f"d{row.destination}",
        f"p{row.source}",
        row.group,
        row.layers,
        row.units,
        str(row.bytes_per_token),
        str(row.copies),
        f"{row.shortest} B",
    )


def _shape(side: wire.Side) -> str:
    pipeline = f" PP{side.parallelism.pipeline}" if side.parallelism.pipeline > 1 else ""
    return f"TP{side.parallelism.tensor}{pipeline}"


def _units(plan: wire.Plan, edge: wire.Edge, copies: list[wire.Copy]) -> str:
    """Which units an edge moves: what its decode rank needs and its prefill rank holds."""
    group = copies[0].group
    source = plan.source.pages[plan.source.ranks[edge.source].pages[group]]
    destination = plan.destination.pages[plan.destination.ranks[edge.destination].pages[group]]
    moved = {copy.part for copy in copies}
    names: dict[str, list[str]] = {}
    for held, needed in zip(source.parts, destination.parts, strict=True):
        if needed.name in moved:
            first, last = max(held.units[0], needed.units[0]), min(held.units[1], needed.units[1]) - 1
            names.setdefault(str(first) if first == last else f"{first}-{last}", []).append(needed.name)
    return "; ".join(f"{','.join(parts)} {units}" for units, parts in names.items())
