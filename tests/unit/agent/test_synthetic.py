"""The synthetic engine's memory: every error that a transfer can make must show, with its exact size."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from disagg_agent.engines.synthetic.blocks import BlockAllocator
from disagg_agent.engines.synthetic.content import cell_words, part_key, request_seed
from disagg_agent.engines.synthetic.pool import POISON, RankPool
from disagg_plan import wire
from disagg_plan.ranges import parse_ranges

PAGES = 12
SEED = request_seed("a request")

SIDES: dict[str, Callable[[Any], Any]] = {
    "joint HND": lambda b: b.deployment(b.heads(4, layers=2), 2, 2),
    "joint NHD": lambda b: b.deployment(b.heads(4, layers=2), 2, 2, layout="NHD"),
    "joint HND, odd cells": lambda b: b.deployment(b.heads(4, layers=2, cell=6), 2, 2),
    "joint NHD, odd cells": lambda b: b.deployment(b.heads(4, layers=2, cell=13), 2, 2, layout="NHD"),
    "separate HND": lambda b: b.deployment(b.heads(4, layers=2), 2, 2, backend="SEPARATE"),
    "separate NHD": lambda b: b.deployment(b.heads(4, layers=2, cell=16), 2, 2, backend="SEPARATE", layout="NHD"),
    "opaque": lambda b: b.deployment(b.heads(4, layers=2), 2, 2, backend="OPAQUE"),
    "latent": lambda b: b.deployment(b.latent(layers=2, cell=72), 2, 2, backend="LATENT"),
    "blocks of 32": lambda b: b.deployment(b.heads(4, layers=2), 2, 2, block=32),
}


def pool_of(plan: wire.Plan, rank: int = 0, side: str = "destination", pages: int = PAGES) -> RankPool:
    return RankPool(getattr(plan, side), rank, pages, {group.name: group.table for group in plan.groups})


def ids(*blocks: int, table: str = "attention") -> dict[str, np.ndarray]:
    return {table: np.array(blocks, dtype=np.int64)}


@pytest.fixture(params=SIDES)
def plan(request: pytest.FixtureRequest, build: Any) -> wire.Plan:
    return SIDES[request.param](build).plan()


@pytest.fixture
def table(plan: wire.Plan) -> str:
    return plan.tables[0]


def cell_bytes(plan: wire.Plan, tokens: int, rank: int = 0) -> int:
    """Bytes of a request's cells on a rank of the destination; whole blocks where cells are not split by token."""
    held = plan.destination.ranks[rank]
    total = 0
    for group, index in held.pages.items():
        page = plan.destination.pages[index]
        block = page.block_tokens or 1
        for part in page.parts:
            cells = tokens if part.token_stride else -(-tokens // block)
            total += len(parse_ranges(held.layers[group])) * (part.units[1] - part.units[0]) * cells * part.cell_bytes
    return total


def region_bytes(pool: RankPool, number: int = 0) -> np.ndarray:
    """Pages of one region, a view of shape `(pages, stride)`."""
    region = pool.regions[number]
    return pool.segment.bytes[region.offset : region.offset + region.stride * pool.pages].reshape(pool.pages, -1)


# Filling and checking.


def test_filled_pages_verify_with_the_exact_number_of_bytes(plan: wire.Plan, table: str) -> None:
    for tokens in (1, 16, 40, 64):
        pool = pool_of(plan)
        owned = ids(7, 2, 11, 0, table=table)
        pool.fill(SEED, owned, 0, tokens)
        assert pool.verify(SEED, owned, tokens) == (cell_bytes(plan, tokens), 0)
        assert pool.stray_bytes(owned) == 0


def test_poison_is_wrong_almost_everywhere(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    checked, wrong = pool.verify(SEED, ids(7, 2, 11, 0, table=table), 64)
    assert checked == cell_bytes(plan, 64)
    # One byte in 256 equals the poison by chance.
    assert wrong > checked * 0.95


def test_a_prefix_and_its_continuation_make_the_whole(plan: wire.Plan, table: str) -> None:
    block = plan.destination.pages[0].block_tokens
    assert block
    owned = ids(7, 2, 11, 0, table=table)
    in_one, in_two = pool_of(plan), pool_of(plan)
    in_one.fill(SEED, owned, 0, 2 * block)
    in_two.fill(SEED, owned, 0, block)
    assert in_two.verify(SEED, owned, block)[1] == 0
    assert in_two.verify(SEED, owned, 2 * block)[1] > 0
    in_two.fill(SEED, owned, block, 2 * block)
    assert np.array_equal(in_one.segment.bytes, in_two.segment.bytes)


def test_other_requests_ranks_layers_and_parts_hold_other_bytes(plan: wire.Plan, table: str) -> None:
    owned = ids(3, table=table)
    pool = pool_of(plan)
    pool.fill(SEED, owned, 0, 16)
    checked, wrong = pool.verify(request_seed("another request"), owned, 16)
    assert wrong > checked * 0.9
    kept = region_bytes(pool, 0)[3].copy()
    used = kept != POISON
    for number in range(1, len(pool.regions)):
        assert (region_bytes(pool, number)[3] != kept)[used].mean() > 0.9
    if plan.groups[0].parts[0].sharding == "split":
        second = pool_of(plan, rank=1)
        second.fill(SEED, owned, 0, 16)
        assert (region_bytes(second, 0)[3] != kept)[used].mean() > 0.9


def test_one_flipped_byte_is_one_wrong_byte(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    owned = ids(7, 2, 11, 0, table=table)
    pool.fill(SEED, owned, 0, 64)
    pool.corrupt(table, 7)
    assert pool.verify(SEED, owned, 64) == (cell_bytes(plan, 64), 1)
    pool.corrupt(table, 7)
    assert pool.verify(SEED, owned, 64)[1] == 0


def changed(pool: RankPool, owned: dict[str, np.ndarray], tokens: int, change: Callable[[], None]) -> None:
    """Every byte that a change made different must be counted, no more and no less."""
    before = pool.segment.bytes.copy()
    change()
    different = int((pool.segment.bytes != before).sum())
    assert different > 0
    assert pool.verify(SEED, owned, tokens)[1] == different


def test_swapped_pages_show(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    owned = ids(7, 2, 11, 0, table=table)
    block = plan.destination.pages[0].block_tokens or 1
    pool.fill(SEED, owned, 0, 2 * block)
    for number in range(len(pool.regions)):
        rows = region_bytes(pool, number)

        def swap(rows: np.ndarray = rows) -> None:
            rows[[7, 2]] = rows[[2, 7]]

        changed(pool, owned, 2 * block, swap)
        swap()
    assert pool.verify(SEED, owned, 2 * block)[1] == 0


def cells(pool: RankPool, plan: wire.Plan, page: int) -> list[tuple[np.ndarray, list[list[slice]]]]:
    """For each region and part: the page's bytes, and where the cell of each unit and token lies in them."""
    found = []
    for number, region in enumerate(pool.regions):
        layout = plan.destination.pages[plan.destination.ranks[0].pages[region.group]]
        for part in layout.parts:
            if part.region == region.region:
                tokens = range((layout.block_tokens or 1) if part.token_stride else 1)
                places = [
                    [
                        slice(at, at + part.cell_bytes)
                        for at in (
                            part.offset + unit * part.unit_stride + token * part.token_stride for token in tokens
                        )
                    ]
                    for unit in range(part.units[1] - part.units[0])
                ]
                found.append((region_bytes(pool, number)[page], places))
    return found


def test_a_shifted_token_shows(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    owned = ids(7, 2, table=table)
    block = plan.destination.pages[0].block_tokens or 1
    pool.fill(SEED, owned, 0, 2 * block)
    for row, places in cells(pool, plan, 2):
        by_token = places[-1]
        if len(by_token) == 1:
            continue

        def shift(row: np.ndarray = row, by_token: list[slice] = by_token) -> None:
            values = [row[place].copy() for place in by_token]
            for place, value in zip(by_token, values[1:] + values[:1], strict=True):
                row[place] = value

        changed(pool, owned, 2 * block, shift)
        pool.fill(SEED, owned, 0, 2 * block)


def test_swapped_heads_show(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    owned = ids(7, 2, table=table)
    block = plan.destination.pages[0].block_tokens or 1
    pool.fill(SEED, owned, 0, 2 * block)
    for row, places in cells(pool, plan, 7):
        if len(places) == 1:
            continue

        def swap(row: np.ndarray = row, places: list[list[slice]] = places) -> None:
            for first, second in zip(places[0], places[1], strict=True):
                row[first], row[second] = row[second].copy(), row[first].copy()

        changed(pool, owned, 2 * block, swap)
        swap()
    assert pool.verify(SEED, owned, 2 * block)[1] == 0


def test_a_shift_inside_a_cell_shows(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    owned = ids(7, table=table)
    block = plan.destination.pages[0].block_tokens or 1
    pool.fill(SEED, owned, 0, block)
    for row, places in cells(pool, plan, 7):
        place = places[0][0]

        def roll(row: np.ndarray = row, place: slice = place) -> None:
            row[place] = np.roll(row[place], 1)

        changed(pool, owned, block, roll)
        row[place] = np.roll(row[place], -1)
    assert pool.verify(SEED, owned, block)[1] == 0


# Pages that nobody owns.


def test_fresh_memory_is_poison_without_strays(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    assert (pool.segment.bytes == POISON).all()
    assert pool.stray_bytes(ids(table=table)) == 0


def test_strays_are_counted_byte_by_byte(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    owned = ids(7, 2, table=table)
    pool.fill(SEED, owned, 0, 16)
    for number in range(len(pool.regions)):
        region_bytes(pool, number)[5, -1] = 0
        region_bytes(pool, number)[11, 0] = 0
    assert pool.stray_bytes(owned) == 2 * len(pool.regions)
    assert pool.stray_bytes(ids(7, 2, 5, table=table)) == len(pool.regions)
    filled = int((region_bytes(pool, 0)[7] != POISON).sum())
    assert pool.stray_bytes(ids(2, 5, 11, table=table)) >= filled > 0


def test_poisoned_pages_leave_nothing_behind(plan: wire.Plan, table: str) -> None:
    pool = pool_of(plan)
    owned = ids(7, 2, 11, 0, table=table)
    pool.fill(SEED, owned, 0, 64)
    pool.poison(ids(7, 2, table=table))
    rest = ids(11, 0, table=table)
    assert pool.stray_bytes(rest) == 0
    pool.poison(rest)
    assert (pool.segment.bytes == POISON).all()


def test_regions_are_what_the_plan_declares(plan: wire.Plan, kit: Any) -> None:
    pool = pool_of(plan)
    wanted = kit.regions(kit.load(plan), "decode", 0, PAGES)
    described = [(one.group, one.layer, one.region, one.bytes, one.stride, one.pages) for one in pool.regions]
    assert described == [(one.group, one.layer, one.region, one.bytes, one.stride, one.pages) for one in wanted]
    ends = [one.offset + one.stride * one.pages for one in pool.regions]
    starts = [one.offset for one in pool.regions]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert ends[-1] <= pool.segment.size
    page = sum(one.stride for one in wanted)
    assert RankPool.bytes_per_page(plan.destination, 0) == page


def test_tables_are_poisoned_and_counted_apart(build: Any, two_tables: Any) -> None:
    plan = build.deployment(two_tables, 1, 1).plan()
    pool = pool_of(plan)
    owned = {**ids(1, table="full"), **ids(2, table="window")}
    pool.fill(SEED, owned, 0, 16)
    assert pool.verify(SEED, owned, 16)[1] == 0
    assert pool.stray_bytes(owned) == 0
    swapped = {**ids(2, table="full"), **ids(1, table="window")}
    assert pool.stray_bytes(swapped) > 0
    pool.corrupt("window", 2)
    assert pool.verify(SEED, owned, 16)[1] == 1


# Content.


def test_a_cell_is_known_by_its_coordinates_alone(build: Any) -> None:
    """Both sides of a plan, whatever their layouts and blocks, hold the same bytes for a unit and token."""
    plan = build.deployment(
        build.heads(4, layers=1), 1, 1, {"block": 32, "layout": "NHD"}, {"block": 16, "layout": "HND"}
    ).plan()
    source, destination = (pool_of(plan, side=side) for side in ("source", "destination"))
    source.fill(SEED, ids(4, 1), 0, 64)
    destination.fill(SEED, ids(9, 3, 5, 0), 0, 64)

    def cell(pool: RankPool, page: wire.Page, blocks: list[int], part: int, unit: int, token: int) -> bytes:
        place = page.parts[part]
        block = page.block_tokens or 1
        at = place.offset + unit * place.unit_stride + token % block * place.token_stride
        return region_bytes(pool)[blocks[token // block]][at : at + place.cell_bytes].tobytes()

    seen = set()
    for part in range(2):
        for unit in range(4):
            for token in range(64):
                ours = cell(source, plan.source.pages[0], [4, 1], part, unit, token)
                assert ours == cell(destination, plan.destination.pages[0], [9, 3, 5, 0], part, unit, token)
                seen.add(ours)
    assert len(seen) == 2 * 4 * 64


def test_words_of_cells_never_meet() -> None:
    units, tokens = np.arange(8, dtype=np.uint64), np.arange(512, dtype=np.uint64)
    keys = [part_key(SEED, "g", layer, part) for layer in range(2) for part in ("k", "v")]
    keys.append(part_key(request_seed("b"), "g", 0, "k"))
    keys.append(part_key(SEED, "h", 0, "k"))
    assert len(set(keys)) == 6
    words = np.concatenate([cell_words(key, units, tokens, 4).ravel() for key in keys])
    assert len(np.unique(words)) == len(words)


def test_content_is_what_its_formula_says() -> None:
    """Prefill and decode engines may be different builds: the formula is part of their agreement."""
    mask = 2**64 - 1

    def mix(value: int) -> int:
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        return value ^ value >> 31

    seed = int.from_bytes(hashlib.blake2b(b"r", digest_size=8).digest(), "little")
    key = int.from_bytes(hashlib.blake2b(f"{seed}/g/2/k".encode(), digest_size=8).digest(), "little")
    assert request_seed("r") == seed
    assert part_key(seed, "g", 2, "k") == key
    found = cell_words(key, np.array([3, 4], np.uint64), np.array([5, 6, 100_000], np.uint64), 3)
    for i, token in enumerate((5, 6, 100_000)):
        for j, unit in enumerate((3, 4)):
            base = mix(((token << 20 ^ unit) * 0x9E3779B97F4A7C15 + key) & mask)
            assert found[i, j].tolist() == [(base + mix(word)) & mask for word in (1, 2, 3)]


# Blocks.


def test_blocks_are_taken_once_and_come_back() -> None:
    async def main() -> None:
        allocator = BlockAllocator(("a", "b"), 8, seed=1)
        first = await allocator.take({"a": 5, "b": 2})
        second = await allocator.take({"a": 3, "b": 2})
        assert sorted([*first["a"], *second["a"]]) == list(range(8))
        assert len({*first["b"], *second["b"]}) == 4
        assert allocator.free_pages == 0
        waiting = asyncio.create_task(allocator.take({"a": 4, "b": 1}))
        behind = asyncio.create_task(allocator.take({"a": 1, "b": 1}))
        await allocator.give_back(second)
        # Three are free: enough for the second in line, who waits for the first all the same.
        await asyncio.wait({waiting, behind}, timeout=0.05)
        assert not waiting.done()
        assert not behind.done()
        await allocator.give_back(first)
        assert len((await waiting)["a"]) == 4
        assert len((await behind)["a"]) == 1
        assert allocator.free_pages == 3

    asyncio.run(main())


def test_more_blocks_than_there_are() -> None:
    async def main() -> None:
        allocator = BlockAllocator(("a",), 8, seed=1)
        with pytest.raises(ValueError, match="9 blocks are needed in table a, the pool has 8"):
            await allocator.take({"a": 9})
        assert allocator.free_pages == 8

    asyncio.run(main())


def test_neighbours_in_a_request_are_rarely_neighbours_in_memory() -> None:
    async def main() -> list[list[int]]:
        orders = []
        for seed in (1, 1, 2):
            taken = await BlockAllocator(("a", "b"), 256, seed).take({"a": 256, "b": 256})
            orders += [taken["a"].tolist(), taken["b"].tolist()]
        return orders

    orders = asyncio.run(main())
    assert orders[0] == orders[2]
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:
        assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 20
