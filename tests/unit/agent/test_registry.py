"""What an engine registers is compared with the plan; a refusal names the place and both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from disagg_agent.cards import HOST, Place, RankCard, SegmentDeclaration
from disagg_agent.errors import FrameError, RegistrationRefused
from disagg_agent.messages import Register, pack_pages
from disagg_agent.plan_loader import LoadedPlan, check_plan
from disagg_agent.registry import (
    Pool,
    check_card,
    check_factors,
    check_mover,
    check_pages,
    check_registration,
    expected_regions,
)
from disagg_plan import wire
from disagg_plan.errors import RequestError

replace = msgspec.structs.replace


def change(message: Register, index: int, **fields: Any) -> Register:
    """The registration with one region changed."""
    regions = list(message.regions)
    regions[index] = replace(regions[index], **fields)
    return replace(message, regions=regions)


def resized(message: Register, by: int) -> SegmentDeclaration:
    """The registration's segment, larger or smaller."""
    return replace(message.segments[0], size=message.segments[0].size + by)


def change_card(card: RankCard, index: int, **fields: Any) -> RankCard:
    regions = list(card.mover.regions)
    regions[index] = replace(regions[index], **fields)
    return replace(card, mover=replace(card.mover, regions=regions))


def refused(code: str, call: Callable[[], object], *parts: object) -> None:
    with pytest.raises(RegistrationRefused) as caught:
        call()
    assert caught.value.code == code
    for part in parts:
        assert str(part) in caught.value.message, caught.value.message


@pytest.fixture
def right(kit: Any, loaded: LoadedPlan) -> Register:
    return kit.register(loaded, "decode", 1, pages=8)


@pytest.fixture
def right_card(kit: Any, loaded: LoadedPlan) -> RankCard:
    return kit.card(loaded, "prefill", 1, pages=8)


# Registrations.


@pytest.mark.parametrize(("role", "ranks"), [("prefill", 2), ("decode", 4)])
def test_every_rank_can_register(kit: Any, loaded: LoadedPlan, role: str, ranks: int) -> None:
    for rank in range(ranks):
        message = kit.register(loaded, role, rank, pages=5 + rank)
        assert check_registration(loaded, role, message) == Pool({"attention": 5 + rank})


def test_the_order_of_regions_and_the_size_of_the_segment_are_free(loaded: LoadedPlan, right: Register) -> None:
    message = replace(right, regions=right.regions[::-1], segments=[resized(right, +1)])
    assert check_registration(loaded, "decode", message) == Pool({"attention": 8})


def test_unknown_rank(loaded: LoadedPlan, right: Register) -> None:
    refused("UnknownRank", lambda: check_registration(loaded, "decode", replace(right, rank=4)), "rank 4", "0 to 3")
    refused("UnknownRank", lambda: check_registration(loaded, "prefill", replace(right, rank=2)), "rank 2", "0 to 1")


def test_unequal_factor(loaded: LoadedPlan, right: Register) -> None:
    message = replace(right, factors={**right.factors, "blockTokens": 32, "model": "other"})
    refused(
        "CompatMismatch",
        lambda: check_registration(loaded, "decode", message),
        "decode rank 1",
        "blockTokens is 32, the plan has 16",
        "model is 'other', the plan has 'test'",
    )


def test_factor_that_is_not_reported(loaded: LoadedPlan, right: Register) -> None:
    factors = {name: value for name, value in right.factors.items() if name != "layout"}
    refused(
        "CompatMismatch",
        lambda: check_registration(loaded, "decode", replace(right, factors=factors)),
        "layout is not reported, the plan has 'HND'",
    )


def test_factors_that_the_plan_does_not_know_are_free_here(loaded: LoadedPlan, right: Register) -> None:
    check_registration(loaded, "decode", replace(right, factors={**right.factors, "kernel": "x"}))


def test_a_factor_of_another_type_is_another_factor(loaded: LoadedPlan, right: Register) -> None:
    for value in ("16", True, None, [16]):
        message = replace(right, factors={**right.factors, "blockTokens": value})
        refused("CompatMismatch", lambda: check_registration(loaded, "decode", message), repr(value), "16")  # noqa: B023


@pytest.mark.parametrize("missing", range(4))
def test_missing_region(loaded: LoadedPlan, right: Register, missing: int) -> None:
    lost = right.regions[missing]
    message = replace(right, regions=[region for region in right.regions if region is not lost])
    refused(
        "MissingRegion",
        lambda: check_registration(loaded, "decode", message),
        f"decode rank 1 registers no group attention layer {lost.layer} region {lost.region}",
    )


def test_no_regions_at_all(loaded: LoadedPlan, right: Register) -> None:
    refused("MissingRegion", lambda: check_registration(loaded, "decode", replace(right, regions=[])))


@pytest.mark.parametrize("fields", [{"layer": 2}, {"region": 2}, {"group": "mla"}])
def test_region_that_the_plan_lacks(loaded: LoadedPlan, right: Register, fields: dict[str, Any]) -> None:
    extra = replace(right.regions[0], **fields)
    refused(
        "UnknownRegion",
        lambda: check_registration(loaded, "decode", replace(right, regions=[*right.regions, extra])),
        f"group {extra.group} layer {extra.layer} region {extra.region}",
    )


def test_region_stated_twice(loaded: LoadedPlan, right: Register) -> None:
    message = replace(right, regions=[*right.regions, right.regions[2]])
    refused("UnknownRegion", lambda: check_registration(loaded, "decode", message), "layer 1 region 0 twice")


@pytest.mark.parametrize("field", ["bytes", "stride"])
def test_wrong_shape(loaded: LoadedPlan, right: Register, field: str) -> None:
    planned = getattr(right.regions[1], field)
    for value in (planned - 1, planned * 2, 0):
        message = change(right, 1, **{field: value})
        refused(
            "WrongShape",
            lambda: check_registration(loaded, "decode", message),  # noqa: B023
            "group attention layer 0 region 1",
            f"{field} of a page is {value}, the plan has {planned}",
        )


def test_region_without_pages(loaded: LoadedPlan, right: Register) -> None:
    refused("WrongShape", lambda: check_registration(loaded, "decode", change(right, 0, pages=0)), "no pages")


def test_segment_that_was_not_handed_over(loaded: LoadedPlan, right: Register) -> None:
    refused(
        "OutsideSegment", lambda: check_registration(loaded, "decode", change(right, 3, segment=1)), "segment 1 of 1"
    )


def test_region_that_ends_behind_its_segment(loaded: LoadedPlan, right: Register) -> None:
    size = right.segments[0].size
    short = replace(right, segments=[resized(right, -1)])
    refused(
        "OutsideSegment", lambda: check_registration(loaded, "decode", short), f"byte {size}", f"segment of {size - 1}"
    )
    moved = change(right, 3, offset=right.regions[3].offset + 1)
    refused("OutsideSegment", lambda: check_registration(loaded, "decode", moved), f"byte {size + 1}")
    far = change(right, 0, offset=2**62)
    refused("OutsideSegment", lambda: check_registration(loaded, "decode", far))


def test_unequal_pools_of_one_rank(loaded: LoadedPlan, right: Register) -> None:
    message = change(right, 2, pages=7)
    refused(
        "UnequalPools",
        lambda: check_registration(loaded, "decode", message),
        "layer 1 region 0: 7 pages",
        "table attention have 8",
    )


def test_tables_may_have_unequal_pools(kit: Any, build: Any, two_tables: Any) -> None:
    plan = kit.load(build.deployment(two_tables, 1, 1).plan())
    message = kit.register(plan, "prefill", 0, pages={"full": 9, "window": 4})
    assert check_registration(plan, "prefill", message) == Pool({"full": 9, "window": 4})


def test_two_layers_of_a_group_in_the_same_place(loaded: LoadedPlan, right: Register) -> None:
    message = change(right, 2, offset=right.regions[0].offset)
    refused(
        "OverlappingRegions",
        lambda: check_registration(loaded, "decode", message),
        "group attention layer 0 region 0",
        "group attention layer 1 region 0",
    )


def test_regions_that_overlap_by_a_byte(loaded: LoadedPlan, right: Register) -> None:
    size = right.regions[0].stride * 8
    message = change(right, 1, offset=size - 1)
    refused("OverlappingRegions", lambda: check_registration(loaded, "decode", message), f"{size - 1} bytes apart")


def test_pages_of_two_layers_may_lie_in_turn(kit: Any, build: Any, reseal: Callable[[dict[str, Any]], bytes]) -> None:
    document = wire.document(build.deployment(build.heads(2, layers=2), 1, 1).plan())
    (region,) = document["source"]["pages"][0]["regions"]
    region["stride"] = 2 * region["bytes"]
    plan = check_plan(reseal(document), None)
    message = kit.register(plan, "prefill")
    in_turn = change(message, 1, offset=message.regions[0].offset + region["bytes"])
    assert check_registration(plan, "prefill", in_turn) == Pool({"attention": 8})
    for between in (region["bytes"] - 1, region["bytes"] + 1, 2 * region["bytes"]):
        wrong = change(message, 1, offset=message.regions[0].offset + between)
        refused("OverlappingRegions", lambda: check_registration(plan, "prefill", wrong), between)  # noqa: B023


def test_layers_of_different_tables_may_share_memory(kit: Any, build: Any, two_tables: Any) -> None:
    # An engine with a hybrid cache gives the same memory to layers of groups whose blocks it never mixes up.
    plan = kit.load(build.deployment(two_tables, 1, 1).plan())
    message = kit.register(plan, "prefill", 0, pages=4)
    first = {region.layer: region for region in message.regions}
    regions = [
        replace(region, offset=first[region.layer - 3].offset) if region.group == "window" else region
        for region in message.regions
    ]
    assert check_registration(plan, "prefill", replace(message, regions=regions)) == Pool({"full": 4, "window": 4})


def test_expected_regions_are_those_of_the_stage(kit: Any, build: Any, two_tables: Any) -> None:
    plan = kit.load(build.deployment(two_tables, (1, 2), 1).plan())
    stages = [{(group, layer) for group, layer, _ in expected_regions(plan, "prefill", rank)} for rank in (0, 1)]
    assert stages == [{("full", 0), ("full", 1), ("full", 2)}, {("window", 3), ("window", 4)}]


# Where memory is.

GPU = Place("VRAM", 1)


def placed(message: Register, *places: Place) -> Register:
    """The registration with its memory in these places, one segment each."""
    return replace(message, segments=[replace(message.segments[0], place=place) for place in places])


@pytest.mark.parametrize("place", [HOST, GPU, Place("VRAM", 0)], ids=str)
def test_an_engine_may_serve_any_memory_itself(kit: Any, loaded: LoadedPlan, right: Register, place: Place) -> None:
    message = replace(placed(right, place), placement="engine", mover=kit.card(loaded, "decode", 1, place=place).mover)
    pool = check_registration(loaded, "decode", message)
    assert check_mover(loaded, "decode", message, pool) == message.mover


@pytest.mark.parametrize(
    ("placement", "places", "code", "parts"),
    [
        ("agent", [GPU], "UnsharableMemory", ["decode rank 1", "VRAM of device 1", "placement InEngine or Auto"]),
        ("agent", [GPU, GPU], "UnsharableMemory", ["VRAM of device 1"]),
        ("agent", [HOST, GPU], "MixedMemory", ["DRAM of device 0 and VRAM of device 1"]),
        ("engine", [HOST, GPU], "MixedMemory", ["decode rank 1"]),
        ("engine", [GPU, Place("VRAM", 2)], "MixedMemory", ["VRAM of device 1 and VRAM of device 2"]),
    ],
)
def test_memory_that_cannot_be_served(
    loaded: LoadedPlan, right: Register, placement: Any, places: list[Place], code: str, parts: list[str]
) -> None:
    message = replace(placed(right, *places), placement=placement)
    refused(code, lambda: check_registration(loaded, "decode", message), *parts)


@pytest.mark.parametrize(
    ("registered", "actual"), [(GPU, HOST), (HOST, GPU), (GPU, Place("VRAM", 0))], ids=["DRAM", "VRAM", "another GPU"]
)
def test_a_mover_whose_memory_is_elsewhere(
    kit: Any, loaded: LoadedPlan, right: Register, registered: Place, actual: Place
) -> None:
    mover = kit.card(loaded, "decode", 1, place=actual).mover
    message = replace(placed(right, registered), placement="engine", mover=mover)
    pool = check_registration(loaded, "decode", message)
    refused("WrongMemory", lambda: check_mover(loaded, "decode", message, pool), "decode rank 1", registered, actual)


def test_a_mover_that_is_missing_or_has_another_pool(kit: Any, loaded: LoadedPlan, right: Register) -> None:
    message = replace(right, placement="engine")
    pool = check_registration(loaded, "decode", message)
    refused("NoMover", lambda: check_mover(loaded, "decode", message, pool))
    smaller = replace(message, mover=kit.card(loaded, "decode", 1, pages=5).mover)
    refused("UnequalPools", lambda: check_mover(loaded, "decode", smaller, pool), "5", "8")


# Cards of movers elsewhere.


def test_a_right_card(loaded: LoadedPlan, right_card: RankCard) -> None:
    assert check_card(loaded, "prefill", right_card) == Pool({"attention": 8})


def test_card_of_an_unknown_rank(loaded: LoadedPlan, right_card: RankCard) -> None:
    refused("UnknownRank", lambda: check_card(loaded, "prefill", replace(right_card, rank=2)), "rank 2", "0 to 1")


def test_card_with_another_factor(loaded: LoadedPlan, right_card: RankCard) -> None:
    card = replace(right_card, factors={**right_card.factors, "model": "other"})
    refused("CompatMismatch", lambda: check_card(loaded, "prefill", card), "'other'", "'test'", "prefill rank 1")


def test_card_with_another_stride_or_without_pages(loaded: LoadedPlan, right_card: RankCard) -> None:
    stride = right_card.mover.regions[1].stride
    wide = change_card(right_card, 1, stride=stride + 8)
    refused("WrongShape", lambda: check_card(loaded, "prefill", wide), f"stride {stride + 8}", f"the plan has {stride}")
    empty = change_card(right_card, 1, pages=0)
    refused("WrongShape", lambda: check_card(loaded, "prefill", empty), "0 pages")


def test_card_with_unequal_pools(loaded: LoadedPlan, right_card: RankCard) -> None:
    refused("UnequalPools", lambda: check_card(loaded, "prefill", change_card(right_card, 1, pages=9)), "9 pages", "8")


def test_card_with_missing_unknown_or_doubled_region(loaded: LoadedPlan, right_card: RankCard) -> None:
    regions = right_card.mover.regions

    def with_regions(found: list[Any]) -> RankCard:
        return replace(right_card, mover=replace(right_card.mover, regions=found))

    refused("MissingRegion", lambda: check_card(loaded, "prefill", with_regions(regions[1:])), "layer 0 region 0")
    unknown = [*regions, replace(regions[0], layer=7)]
    refused("UnknownRegion", lambda: check_card(loaded, "prefill", with_regions(unknown)), "layer 7 region 0")
    refused("UnknownRegion", lambda: check_card(loaded, "prefill", with_regions([*regions, regions[0]])), "twice")


# Factors and page ids.


def test_every_wrong_factor_is_named() -> None:
    refused(
        "CompatMismatch",
        lambda: check_factors({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5}, "rank 0", "our rank 1"),
        "rank 0: b is 5, our rank 1 has 2; c is not reported, our rank 1 has 3",
    )
    check_factors({}, {"a": 1}, "rank 0", "the plan")
    check_factors({"a": [1, {"b": "c"}]}, {"a": [1, {"b": "c"}], "d": 1}, "rank 0", "the plan")


def test_page_ids_of_a_request(loaded: LoadedPlan) -> None:
    pool = Pool({"attention": 8})

    def judge(ids: list[int], tokens: int = 33) -> None:
        check_pages(loaded, "prefill", 0, pool, tokens, {"attention": pack_pages(ids)})

    judge([7, 0, 3])
    judge([7, 0, 3, 99])  # a spare block is not looked at
    for ids, code in (
        ([7, 0], "TooFewPages"),
        ([7, 0, 8], "PageOutOfRange"),
        ([7, -1, 3], "PageOutOfRange"),
        ([7, 0, 7], "RepeatedPage"),
    ):
        with pytest.raises(RequestError) as caught:
            judge(ids)
        assert caught.value.code == code
        assert "prefill rank 0 table attention" in caught.value.message


def test_tables_of_a_request(kit: Any, build: Any, two_tables: Any) -> None:
    plan = kit.load(build.deployment(two_tables, (1, 2), 1).plan())
    pages = {"full": pack_pages([1]), "window": pack_pages([2])}

    def judge(rank: int, given: dict[str, bytes]) -> None:
        table = ("full", "window")[rank]
        check_pages(plan, "prefill", rank, Pool({table: 4}), 16, given)

    # The scheduler of an engine knows all tables; a rank of a pipeline stage may have some of them only.
    judge(0, pages)
    judge(1, pages)
    judge(0, {"full": pages["full"]})
    for rank, given in ((0, {"window": pages["window"]}), (0, {}), (0, {**pages, "other": b""})):
        with pytest.raises(FrameError) as caught:
            judge(rank, given)
        assert caught.value.code == "BadPages"
    with pytest.raises(FrameError) as caught:
        judge(0, {"full": b"abc"})
    assert caught.value.code == "BadPages"
