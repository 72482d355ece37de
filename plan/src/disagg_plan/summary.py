"""Figures and warnings of a plan, computed from its edges alone."""

from __future__ import annotations

from disagg_plan import wire
from disagg_plan.ranges import parse_ranges
from disagg_plan.runs import edge_runs

SHORT_RUN_BYTES = 4096
"""Runs below this move at a fraction of the link's speed: per-descriptor cost outweighs the copy."""

IMBALANCE = 1.05
"""A source above this multiple of the bound is worth a warning."""


def summarise(plan: wire.Plan) -> tuple[wire.Summary, list[wire.Warning_]]:
    """Summary and warnings for a plan, whatever its own `summary` says."""
    sent = dict.fromkeys(range(len(plan.source.ranks)), 0)
    received = dict.fromkeys(range(len(plan.destination.ranks)), 0)
    copies = 0
    shortest: tuple[int, wire.Edge] | None = None
    sub_tokens = {group.name: group.sub_tokens or 1 for group in plan.groups}
    for edge in plan.edges:
        pages = plan.destination.ranks[edge.destination].pages
        for runs in edge_runs(plan, edge):
            per_token = runs.bytes * len(runs.layers) // sub_tokens[runs.group]
            sent[edge.source] += per_token
            received[edge.destination] += per_token
            block = plan.destination.pages[pages[runs.group]].block_tokens or 1
            copies += len(runs.rows) * len(runs.layers) * max(1, block // sub_tokens[runs.group])
            length = int(runs.rows[:, 2].min())
            if shortest is None or length < shortest[0]:
                shortest = (length, edge)
    summary = wire.Summary(
        bytes_per_token=sum(_group_bytes(plan, group) for group in plan.groups if group.kind == "paged"),
        state_bytes_per_request=0,
        copies_per_block=copies,
        max_source_bytes=max(sent.values()),
        mean_source_bytes=sum(sent.values()) // len(sent),
        max_destination_bytes=max(received.values()),
    )
    return summary, _warnings(plan, summary, shortest)


def source_bound(summary: wire.Summary) -> int:
    """Bytes per token below which no plan can bring its busiest source."""
    return max(summary.mean_source_bytes, summary.max_destination_bytes)


def _group_bytes(plan: wire.Plan, group: wire.Group) -> int:
    """Bytes per token of one group over all its layers, each unit once, from any page that holds the part."""
    cells: dict[str, int] = {}
    for rank in plan.destination.ranks:
        if group.name in rank.pages:
            page = plan.destination.pages[rank.pages[group.name]]
            tokens = page.block_tokens or 1
            for placed in page.parts:
                count = placed.cell_repeat.count if placed.cell_repeat else 1
                # A part that is not addressed by token has cells of a whole block.
                cells[placed.name] = placed.cell_bytes * count // (1 if placed.token_stride else tokens)
            break
    layers = len(parse_ranges(group.layers))
    return layers * sum(part.units * cells.get(part.name, 0) for part in group.parts)


def _warnings(plan: wire.Plan, summary: wire.Summary, shortest: tuple[int, wire.Edge] | None) -> list[wire.Warning_]:
    warnings = []
    if shortest is not None and shortest[0] < SHORT_RUN_BYTES:
        length, edge = shortest
        warnings.append(
            wire.Warning_(
                code="ShortRuns",
                message=f"p{edge.source} -> d{edge.destination} moves in runs of {length} bytes, below "
                f"{SHORT_RUN_BYTES}: {summary.copies_per_block} copies per block. {_longer_runs(plan)}",
            )
        )
    bound = source_bound(summary)
    if summary.max_source_bytes > IMBALANCE * bound:
        warnings.append(
            wire.Warning_(
                code="Imbalance",
                message=f"the busiest prefill rank sends {summary.max_source_bytes} bytes per token, "
                f"{summary.max_source_bytes / bound:.2f} times the bound of {bound}",
            )
        )
    return warnings


def _longer_runs(plan: wire.Plan) -> str:
    """What would lengthen the runs of this plan."""
    blocks = [max(page.block_tokens or 1 for page in side.pages) for side in (plan.source, plan.destination)]
    if blocks[0] != blocks[1]:
        return f"Block sizes differ ({blocks[0]} and {blocks[1]}): the same size on both sides makes them longer"
    for side in (plan.source, plan.destination):
        if any(part.token_stride > part.unit_stride > 0 for page in side.pages for part in page.parts):
            return f"The {side.role} side has tokens outside heads: the HND layout on both sides makes them longer"
    return "Larger blocks make them longer"
