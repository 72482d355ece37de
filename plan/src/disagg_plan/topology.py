"""Who holds what: the placement rules of tensor and pipeline parallelism.

The rules are those of the engines: a part with `U` units over `T` tensor-parallel ranks puts units
`[r*U/T, (r+1)*U/T)` on rank `r` if `T` divides `U`, unit `r*U // T` if `U` divides `T` (replicated), and nothing
else is possible. Pipeline stages hold explicit layer ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from disagg_plan.errors import Refusal
from disagg_plan.ranges import format_ranges

Sharding = Literal["split", "replicated"]


def can_hold(units: int, tensor: int) -> bool:
    """Whether `tensor` ranks can hold a split part of `units` units at all."""
    return units % tensor == 0 or tensor % units == 0


def unit_interval(units: int, sharding: Sharding, tensor: int, tp_rank: int) -> tuple[int, int]:
    """Half-open interval of units that one tensor-parallel rank holds.

    Args:
        units: units of the part in the whole model.
        sharding: `replicated` puts every unit on every rank.
        tensor: number of tensor-parallel ranks.
        tp_rank: rank within them, `0 <= tp_rank < tensor`.

    Raises:
        ValueError: neither number divides the other; callers refuse that earlier, with the field's name.
    """
    if sharding == "replicated":
        return (0, units)
    if units % tensor == 0:
        share = units // tensor
        return (tp_rank * share, (tp_rank + 1) * share)
    if tensor % units == 0:
        unit = tp_rank * units // tensor
        return (unit, unit + 1)
    raise ValueError(f"{units} units cannot be placed on {tensor} ranks")


def workable_sizes(units: int, limit: int = 64) -> list[int]:
    """Tensor-parallel sizes up to `limit` that can hold `units` units, ascending."""
    return [size for size in range(1, limit + 1) if can_hold(units, size)]


def default_stages(layers: Sequence[int], pipeline: int) -> tuple[tuple[int, ...], ...]:
    """Split layers over pipeline stages as vLLM does when nothing else is said.

    Every stage gets `len // pipeline` layers; what is left over goes one each to the stages before the last,
    backwards, because the last one also holds the output head (vLLM `distributed/utils.py`, `get_pp_indices`).

    Raises:
        Refusal: `TooManyStages`, more stages than layers.
    """
    ordered = sorted(layers)
    if pipeline > len(ordered):
        raise Refusal(
            "TooManyStages",
            "parallelism.pipeline",
            f"{pipeline} pipeline stages for {len(ordered)} layers leave a stage empty",
            f"Use at most {len(ordered)} stages",
        )
    sizes = [len(ordered) // pipeline] * pipeline
    for back in range(2, len(ordered) % pipeline + 2):
        sizes[-back] += 1
    stages: list[tuple[int, ...]] = []
    start = 0
    for size in sizes:
        stages.append(tuple(ordered[start : start + size]))
        start += size
    return tuple(stages)


def check_stages(stages: Sequence[Sequence[int]], layers: Sequence[int], field: str) -> None:
    """Refuse stages that do not hold every layer exactly once.

    Raises:
        Refusal: `BadStages`, with the layers that are missing, repeated or unknown.
    """
    wanted = set(layers)
    seen: set[int] = set()
    for index, stage in enumerate(stages):
        twice = {layer for layer, count in Counter(stage).items() if count > 1 or layer in seen}
        unknown = set(stage) - wanted
        if not stage or twice or unknown:
            what = (
                "is empty"
                if not stage
                else f"repeats layers {format_ranges(twice)}"
                if twice
                else f"names layers {format_ranges(unknown)} that the model lacks"
            )
            raise Refusal(
                "BadStages",
                field,
                f"stage {index} {what}",
                f"Give every layer of {format_ranges(wanted)} to one stage",
            )
        seen |= set(stage)
    if wanted - seen:
        raise Refusal(
            "BadStages",
            field,
            f"no stage holds layers {format_ranges(wanted - seen)}",
            f"Give every layer of {format_ranges(wanted)} to one stage",
        )
