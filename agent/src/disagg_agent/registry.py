"""What an engine rank registers, compared with what the plan says it must have.

Pure: values in, a typed refusal or the rank's pool out. The refusal names the region and both numbers, because it
is read by someone whose fleet does not come up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from disagg_agent.cards import MoverCard, RankCard, RegionCard, RegionDeclaration, SegmentDeclaration
from disagg_agent.errors import FrameError, RegistrationRefused
from disagg_agent.messages import Pages, Register, unpack_pages
from disagg_agent.placement import check_placement, one_place
from disagg_agent.plan_loader import LoadedPlan
from disagg_plan.pairing import check_blocks
from disagg_plan.ranges import parse_ranges
from disagg_plan.wire import Page


@dataclass(frozen=True)
class Pool:
    """Pages that one rank has, per block table."""

    pages: Mapping[str, int]


def check_registration(loaded: LoadedPlan, role: str, message: Register) -> Pool:
    """Judge a registration.

    Raises:
        RegistrationRefused: `UnknownRank`, `CompatMismatch`, `MixedMemory`, `UnsharableMemory`, `MissingRegion`,
            `UnknownRegion`, `WrongShape`, `OutsideSegment`, `OverlappingRegions` or `UnequalPools`.
    """
    ranks = loaded.side(role).ranks
    if message.rank >= len(ranks):
        raise RegistrationRefused(
            "UnknownRank", f"rank {message.rank} registers, the plan has {role} ranks 0 to {len(ranks) - 1}"
        )
    who = f"{role} rank {message.rank}"
    check_factors(loaded.expected_factors(role), message.factors, who, "the plan")
    check_placement(message.placement, one_place((segment.place for segment in message.segments), who), who)
    expected = expected_regions(loaded, role, message.rank)
    _check_keys(expected, message.regions, who)
    for region in message.regions:
        _check_region(region, expected[region.group, region.layer, region.region], message.segments)
    _check_apart(loaded, message.regions)
    return Pool(_pool_sizes(loaded, message.regions))


def check_mover(loaded: LoadedPlan, role: str, message: Register, pool: Pool) -> MoverCard:
    """The mover that an engine registers with placement `engine`: its memory is stated twice and must be the same.

    Args:
        pool: what the registration itself declares.

    Raises:
        RegistrationRefused: `NoMover`, `WrongMemory`, `UnequalPools`, or as `check_card`.
    """
    if message.mover is None:
        raise RegistrationRefused("NoMover", "placement engine registers without a mover")
    found = check_card(loaded, role, RankCard(message.rank, message.factors, message.mover))
    who = f"{role} rank {message.rank}"
    place = one_place((segment.place for segment in message.segments), who)
    if message.mover.place != place:
        raise RegistrationRefused("WrongMemory", f"{who}: the mover has {message.mover.place}, {place} is registered")
    if found != pool:
        raise RegistrationRefused(
            "UnequalPools", f"the mover has {dict(found.pages)} pages, {dict(pool.pages)} are registered"
        )
    return message.mover


def check_card(loaded: LoadedPlan, role: str, card: RankCard) -> Pool:
    """Judge what a mover elsewhere says of its memory: the same questions, without segments to look into.

    Raises:
        RegistrationRefused: as `check_registration`.
    """
    ranks = loaded.side(role).ranks
    who = f"{role} rank {card.rank}"
    if card.rank >= len(ranks):
        raise RegistrationRefused("UnknownRank", f"{who}: the plan has ranks 0 to {len(ranks) - 1}")
    check_factors(loaded.expected_factors(role), card.factors, who, "the plan")
    expected = expected_regions(loaded, role, card.rank)
    _check_keys(expected, card.mover.regions, who)
    for region in card.mover.regions:
        key = (region.group, region.layer, region.region)
        planned = expected[key].regions[region.region].stride
        if region.stride != planned or region.pages < 1:
            raise RegistrationRefused(
                "WrongShape",
                f"{who}: {_name(key)} has {region.pages} pages, stride {region.stride}; the plan has {planned}",
            )
    return Pool(_pool_sizes(loaded, card.mover.regions))


def check_pages(loaded: LoadedPlan, role: str, rank: int, pool: Pool, tokens: int, pages: Pages) -> None:
    """Judge the page ids of a request on one rank: enough blocks in every table, inside the pool, none twice.

    Tables that only other stages have may come along: an engine's scheduler knows them all.

    Raises:
        FrameError: `BadPages`, a table is missing or unknown.
        RequestError: as `disagg_plan.pairing.check_blocks`.
    """
    side = loaded.side(role)
    blocks = {
        loaded.plan.group(group).table: side.pages[index].block_tokens or 1
        for group, index in side.ranks[rank].pages.items()
    }
    if not set(blocks) <= set(pages) <= set(loaded.plan.tables):
        raise FrameError("BadPages", f"page ids for tables {sorted(pages)}, {role} rank {rank} has {sorted(blocks)}")
    for table, block_tokens in blocks.items():
        what = f"{role} rank {rank} table {table}"
        check_blocks(unpack_pages(pages[table]), tokens, block_tokens, pool.pages[table], what, unique=True)


def expected_regions(loaded: LoadedPlan, role: str, rank: int) -> dict[tuple[str, int, int], Page]:
    """Page of every (group, layer, region) that a rank must register."""
    side = loaded.side(role)
    held = side.ranks[rank]
    return {
        (group, layer, region): side.pages[index]
        for group, index in held.pages.items()
        for layer in parse_ranges(held.layers[group])
        for region in range(len(side.pages[index].regions))
    }


def check_factors(expected: Mapping[str, object], reported: Mapping[str, object], who: str, whose: str) -> None:
    """Compare compatibility factors; each expected one must be reported and equal.

    Raises:
        RegistrationRefused: `CompatMismatch` with every factor that differs and both values.
    """
    wrong = [
        f"{name} is {reported[name]!r}, {whose} has {value!r}"
        if name in reported
        else f"{name} is not reported, {whose} has {value!r}"
        for name, value in sorted(expected.items())
        if reported.get(name) != value
    ]
    if wrong:
        raise RegistrationRefused("CompatMismatch", f"{who}: {'; '.join(wrong)}")


def _check_keys(
    expected: Mapping[tuple[str, int, int], Page], regions: Sequence[RegionCard | RegionDeclaration], who: str
) -> None:
    found = Counter((region.group, region.layer, region.region) for region in regions)
    for key in expected:
        if key not in found:
            raise RegistrationRefused("MissingRegion", f"{who} registers no {_name(key)}")
    for key, count in found.items():
        if key not in expected:
            raise RegistrationRefused("UnknownRegion", f"{who} registers {_name(key)}, which is not in the plan")
        if count > 1:
            raise RegistrationRefused("UnknownRegion", f"{who} registers {_name(key)} twice")


def _check_region(region: RegionDeclaration, page: Page, segments: Sequence[SegmentDeclaration]) -> None:
    what = _name((region.group, region.layer, region.region))
    planned = page.regions[region.region]
    for field, actual, wanted in (("bytes", region.bytes, planned.bytes), ("stride", region.stride, planned.stride)):
        if actual != wanted:
            raise RegistrationRefused("WrongShape", f"{what}: {field} of a page is {actual}, the plan has {wanted}")
    if region.pages < 1:
        raise RegistrationRefused("WrongShape", f"{what}: it has no pages")
    if region.segment >= len(segments):
        raise RegistrationRefused("OutsideSegment", f"{what}: segment {region.segment} of {len(segments)}")
    end = region.offset + (region.pages - 1) * region.stride + region.bytes
    size = segments[region.segment].size
    if end > size:
        raise RegistrationRefused("OutsideSegment", f"{what}: ends at byte {end} of a segment of {size}")


def _check_apart(loaded: LoadedPlan, regions: Sequence[RegionDeclaration]) -> None:
    """Regions of one table must not share bytes: a block would hold two layers at once. Tables may share memory."""
    places: dict[tuple[str, int], list[RegionDeclaration]] = {}
    for region in regions:
        places.setdefault((loaded.plan.group(region.group).table, region.segment), []).append(region)
    for found in places.values():
        for low, high in pairwise(sorted(found, key=lambda region: region.offset)):
            between = high.offset - low.offset
            # Pages may lie in turn, one of each layer, if they are equally far apart.
            in_turn = low.stride == high.stride and low.bytes <= between % low.stride <= low.stride - high.bytes
            if between < (low.pages - 1) * low.stride + low.bytes and not in_turn:
                names = " and ".join(_name((one.group, one.layer, one.region)) for one in (low, high))
                raise RegistrationRefused(
                    "OverlappingRegions",
                    f"{names} begin {between} bytes apart and share memory of segment {low.segment}",
                )


def _pool_sizes(loaded: LoadedPlan, regions: Sequence[RegionCard | RegionDeclaration]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for region in regions:
        table = loaded.plan.group(region.group).table
        if sizes.setdefault(table, region.pages) != region.pages:
            what = _name((region.group, region.layer, region.region))
            raise RegistrationRefused(
                "UnequalPools", f"{what}: {region.pages} pages, other regions of table {table} have {sizes[table]}"
            )
    return sizes


def _name(key: tuple[str, int, int]) -> str:
    return f"group {key[0]} layer {key[1]} region {key[2]}"
