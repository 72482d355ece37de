"""Which source serves which demand, where several prefill ranks hold the same units.

The bound that no plan can beat is the larger of the mean over all sources and the bytes of the largest
destination: beyond the latter the destination's network card decides and more edges only cost messages. Demands
are given whole to one source where that meets the bound; otherwise they are cut between layers, which is the
wrap-around rule of McNaughton (Management Science 6:1, 1959): fill sources in order up to the target, and cut only
where a source is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Demand:
    """What one destination rank needs of one run of units in some layers of a group.

    Attributes:
        destination: decode rank.
        group: name of the group.
        parts: names of the parts that move together (equal units and sharding).
        units: half-open interval of units.
        layers: ascending layer ids.
        layer_bytes: bytes per token of one layer.
        candidates: prefill ranks that hold all of it, ascending.
    """

    destination: int
    group: str
    parts: tuple[str, ...]
    units: tuple[int, int]
    layers: tuple[int, ...]
    layer_bytes: int
    candidates: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes per token of all its layers."""
        return self.layer_bytes * len(self.layers)


@dataclass(frozen=True)
class Assignment:
    """A demand, or some of its layers, given to one source."""

    source: int
    demand: Demand


def spread(demands: Iterable[Demand], sources: int) -> tuple[Assignment, ...]:
    """Give every layer of every demand to exactly one of its candidates.

    Args:
        demands: in any order; the result does not depend on it.
        sources: number of prefill ranks, for the mean.

    Returns:
        Assignments sorted by source and destination; one demand may appear with several sources, with
        disjoint layers.
    """
    # By destination first, so that what one rank needs of several groups comes from few sources.
    ordered = sorted(demands, key=lambda d: (d.destination, d.group, d.parts, d.units, d.layers))
    bound = load_bound(ordered, sources)
    loads = dict.fromkeys(range(sources), 0)
    result: list[Assignment] = []
    shared: dict[tuple[int, ...], list[Demand]] = {}
    for demand in ordered:
        if len(demand.candidates) == 1:
            result.append(Assignment(demand.candidates[0], demand))
            loads[demand.candidates[0]] += demand.bytes
        else:
            shared.setdefault(demand.candidates, []).append(demand)
    # Who has less choice comes first: a wider choice can go around what a narrower one filled, not the other way.
    for candidates, several in sorted(shared.items(), key=lambda item: (len(item[0]), item[0])):
        chosen = _spread_shared(several, candidates, loads, bound)
        for assignment in chosen:
            loads[assignment.source] += assignment.demand.bytes
        result.extend(chosen)
    return tuple(sorted(result, key=lambda a: (a.source, a.demand.destination, a.demand.group, a.demand.units)))


def load_bound(demands: Iterable[Demand], sources: int) -> int:
    """The larger of the mean source (rounded up) and the largest destination, in bytes per token."""
    received: dict[int, int] = {}
    for demand in demands:
        received[demand.destination] = received.get(demand.destination, 0) + demand.bytes
    return max(-(-sum(received.values()) // sources), max(received.values(), default=0))


def _spread_shared(
    demands: Sequence[Demand], candidates: tuple[int, ...], loads: dict[int, int], bound: int
) -> list[Assignment]:
    target = max(bound, _water_level([loads[source] for source in candidates], sum(d.bytes for d in demands)))
    for whole in (_in_blocks(demands, candidates), _least_loaded(demands, candidates, loads)):
        if max(_added(whole, candidates, loads).values()) <= target:
            return whole
    cut = _cut_by_layers(demands, candidates, loads, target)
    uncut = _least_loaded(demands, candidates, loads)
    lower = max(_added(cut, candidates, loads).values()) < max(_added(uncut, candidates, loads).values())
    return cut if lower else uncut


def _water_level(levels: list[int], amount: int) -> int:
    """Smallest level up to which `amount` can be poured over vessels that are filled to `levels`."""
    ordered = sorted(levels)
    poured = 0
    for count, level in enumerate(ordered, start=1):
        poured += level
        surface = -(-(amount + poured) // count)
        if count == len(ordered) or surface <= ordered[count]:
            return surface
    return amount


def _added(chosen: Iterable[Assignment], candidates: tuple[int, ...], loads: dict[int, int]) -> dict[int, int]:
    total = {source: loads[source] for source in candidates}
    for assignment in chosen:
        total[assignment.source] += assignment.demand.bytes
    return total


def _in_blocks(demands: Sequence[Demand], candidates: tuple[int, ...]) -> list[Assignment]:
    # Each destination reads all from one source, neighbours from neighbours: what a person expects to see, and what
    # vLLM's mapping does (`floor(r * p / t)`).
    readers = sorted({demand.destination for demand in demands})
    source = {reader: candidates[index * len(candidates) // len(readers)] for index, reader in enumerate(readers)}
    return [Assignment(source[demand.destination], demand) for demand in demands]


def _least_loaded(demands: Sequence[Demand], candidates: tuple[int, ...], loads: dict[int, int]) -> list[Assignment]:
    total = {source: loads[source] for source in candidates}
    chosen = []
    for demand in sorted(demands, key=lambda d: -d.bytes):
        source = min(candidates, key=lambda rank: (total[rank], rank))
        total[source] += demand.bytes
        chosen.append(Assignment(source, demand))
    return chosen


def _cut_by_layers(
    demands: Sequence[Demand], candidates: tuple[int, ...], loads: dict[int, int], target: int
) -> list[Assignment]:
    chosen = []
    place = 0
    room = max(0, target - loads[candidates[0]])
    for demand in demands:
        left = demand.layers
        while left:
            # To the nearest layer; what that is off is carried on, so that no source ends a whole layer off.
            take = min(len(left), (room + demand.layer_bytes // 2) // demand.layer_bytes)
            if place == len(candidates) - 1:
                take = len(left)
            if take > 0:
                chosen.append(Assignment(candidates[place], replace(demand, layers=left[:take])))
                room -= take * demand.layer_bytes
                left = left[take:]
            else:
                place += 1
                room += max(0, target - loads[candidates[place]])
    return chosen
