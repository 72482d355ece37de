"""Descriptors of an edge, compared byte by byte with a naive reading of the plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_agent.cards import RegionCard
from disagg_agent.descriptors import EdgeDescriptors, Index, Ints, Piece, build_edge, indexes, pieces
from disagg_agent.errors import MoverError
from disagg_plan import wire
from disagg_plan.pairing import Pairs, page_pairs
from disagg_plan.ranges import parse_ranges

SOURCE_PAGES, DESTINATION_PAGES = 7, 9

PLANS: dict[str, Callable[[Any], Any]] = {
    "joint HND up": lambda b: b.deployment(b.heads(4, layers=2), 2, 4),
    "joint HND down": lambda b: b.deployment(b.heads(4, layers=2), 4, 2),
    "joint NHD": lambda b: b.deployment(b.heads(4, layers=2), 2, 4, layout="NHD"),
    "NHD to HND": lambda b: b.deployment(
        b.heads(4, layers=2), 2, 4, prefill_options={"layout": "NHD"}, decode_options={"layout": "HND"}
    ),
    "separate": lambda b: b.deployment(b.heads(4, layers=2), 2, 4, backend="SEPARATE"),
    "separate NHD": lambda b: b.deployment(b.heads(4, layers=2), 4, 2, backend="SEPARATE", layout="NHD"),
    "opaque": lambda b: b.deployment(b.heads(4, layers=2), 1, 2, backend="OPAQUE"),
    "latent": lambda b: b.deployment(b.latent(layers=3, cell=6), 1, 2, backend="LATENT"),
    "blocks 16 to 32": lambda b: b.deployment(b.heads(2, layers=1), 1, 2, None, {"block": 32}),
    "blocks 32 to 16": lambda b: b.deployment(b.heads(2, layers=1), 2, 1, {"block": 32}),
    "blocks 48 to 32 NHD": lambda b: b.deployment(
        b.heads(2, layers=1), 2, 1, {"block": 48, "layout": "NHD"}, {"block": 32}
    ),
    "ratio that does not divide": lambda b: b.deployment(b.heads(6, layers=1), 3, 2),
    "stages": lambda b: b.deployment(b.heads(2, layers=5), (1, 2), (2, 1)),
    "replicated heads": lambda b: b.deployment(b.heads(2, layers=2), 4, 2),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, build: Any) -> wire.Plan:
    return PLANS[request.param](build).plan()


def regions(plan: wire.Plan, role: str, rank: int, pages: int, seed: int) -> list[RegionCard]:
    """Registered memory with a hole of its own behind every region."""
    side = plan.source if role == "prefill" else plan.destination
    held = side.ranks[rank]
    found = []
    base = seed << 32
    for group, index in held.pages.items():
        for layer in parse_ranges(held.layers[group]):
            for number, region in enumerate(side.pages[index].regions):
                found.append(RegionCard(group, layer, number, base, region.stride, pages))
                base += region.stride * pages + 4096 * (len(found) % 3)
    return found[::-1]


def naive(
    plan: wire.Plan,
    edge: wire.Edge,
    source: list[RegionCard],
    destination: list[RegionCard],
    src_ids: list[int],
    dst_ids: list[int],
    start: int,
    end: int,
) -> dict[int, int]:
    """Source address of every destination address, by the definition of copies."""
    src_memory = {(one.group, one.layer, one.region): one for one in source}
    dst_memory = {(one.group, one.layer, one.region): one for one in destination}
    result: dict[int, int] = {}
    for copy in plan.shapes[edge.shape]:
        src_page = plan.source.pages[plan.source.ranks[edge.source].pages[copy.group]]
        dst_page = plan.destination.pages[plan.destination.ranks[edge.destination].pages[copy.group]]
        src_region = next(part.region for part in src_page.parts if part.name == copy.part)
        dst_region = next(part.region for part in dst_page.parts if part.name == copy.part)
        sub = plan.group(copy.group).sub_tokens
        assert sub
        assert src_page.block_tokens
        assert dst_page.block_tokens
        for layer in parse_ranges(copy.layers):
            src = src_memory[copy.group, layer, src_region]
            dst = dst_memory[copy.group, layer, dst_region]
            for position in range(start // sub * sub, end, sub):
                src_at = src.base + src_ids[position // src_page.block_tokens] * src.stride
                src_at += position % src_page.block_tokens // sub * copy.src_sub + copy.src
                dst_at = dst.base + dst_ids[(position - start) // dst_page.block_tokens] * dst.stride
                dst_at += position % dst_page.block_tokens // sub * copy.dst_sub + copy.dst
                for steps in itertools.product(*(range(loop.count) for loop in copy.repeat)):
                    more_src = sum(step * loop.src for step, loop in zip(steps, copy.repeat, strict=True))
                    more_dst = sum(step * loop.dst for step, loop in zip(steps, copy.repeat, strict=True))
                    for byte in range(copy.bytes):
                        assert dst_at + more_dst + byte not in result
                        result[dst_at + more_dst + byte] = src_at + more_src + byte
    return result


def flat(rows: np.ndarray) -> list[tuple[int, int]]:
    """(address, length) of every flat index, as NIXL counts them: row after row, page after page."""
    return [
        (int(a) + page * int(stride), int(size)) for a, size, _, stride, count in rows for page in range(int(count))
    ]


def expanded(edge: EdgeDescriptors, found: list[Piece]) -> dict[int, int]:
    src, dst = flat(edge.src_rows), flat(edge.dst_rows)
    result: dict[int, int] = {}
    for piece in found:
        moved = 0
        for src_index, dst_index in zip(piece.src.tolist(), piece.dst.tolist(), strict=True):
            (src_at, src_size), (dst_at, dst_size) = src[src_index], dst[dst_index]
            assert src_size == dst_size
            moved += src_size
            for byte in range(src_size):
                assert dst_at + byte not in result, "a byte is written twice"
                result[dst_at + byte] = src_at + byte
        assert piece.bytes == moved
    return result


def blocks(plan: wire.Plan, edge: wire.Edge, group: str) -> tuple[int, int, int]:
    src = plan.source.pages[plan.source.ranks[edge.source].pages[group]].block_tokens
    dst = plan.destination.pages[plan.destination.ranks[edge.destination].pages[group]].block_tokens
    sub = plan.group(group).sub_tokens
    assert src
    assert dst
    assert sub
    return src, dst, sub


def pairs_of(
    plan: wire.Plan, edge: wire.Edge, table: str, src: list[int], dst: list[int], start: int, end: int
) -> Pairs:
    group = next(group.name for group in plan.groups if group.table == table)
    src_block, dst_block, sub = blocks(plan, edge, group)
    return page_pairs(sub, np.array(src), src_block, np.array(dst), dst_block, start, end)


def spans(plan: wire.Plan) -> Iterator[tuple[int, int]]:
    block = next(page.block_tokens for page in plan.destination.pages)
    assert block
    yield 0, 1
    yield 0, 3 * block
    yield block, 2 * block + 5


def test_every_byte_goes_where_the_plan_says(plan: wire.Plan) -> None:
    src_ids, dst_ids = [3, 4, 0, 6, 1, 2, 5], [8, 0, 1, 2, 7, 5, 4]
    for edge in plan.edges:
        source = regions(plan, "prefill", edge.source, SOURCE_PAGES, 1)
        destination = regions(plan, "decode", edge.destination, DESTINATION_PAGES, 2)
        built = build_edge(plan, edge, source, destination)
        for start, end in spans(plan):
            found = [
                indexes(rows, pairs_of(plan, edge, table, src_ids, dst_ids, start, end))
                for table, rows in built.tables.items()
            ]
            for limit in (1, 300, 64 << 20):
                assert expanded(built, pieces(found, limit)) == naive(
                    plan, edge, source, destination, src_ids, dst_ids, start, end
                )


def test_tables_have_indexes_of_their_own(build: Any, two_tables: Any) -> None:
    plan = build.deployment(two_tables, 1, 2).plan()
    edge = plan.edges[1]
    source, destination = regions(plan, "prefill", 0, 5, 1), regions(plan, "decode", 1, 6, 2)
    built = build_edge(plan, edge, source, destination)
    assert set(built.tables) == {"full", "window"}
    ids = {"full": ([4, 0], [1, 2]), "window": ([2, 3], [5, 0])}
    for table, (src, dst) in ids.items():
        group = next(group.name for group in plan.groups if group.table == table)
        found = [indexes(built.tables[table], pairs_of(plan, edge, table, src, dst, 0, 20))]
        alone = naive(plan, edge, source, destination, src, dst, 0, 20)
        bases = [(one.base, one.base + one.stride * one.pages) for one in destination if one.group == group]
        wanted = {key: value for key, value in alone.items() if any(low <= key < high for low, high in bases)}
        assert expanded(built, pieces(found)) == wanted != {}


def test_arrays_are_what_nixl_takes(plan: wire.Plan) -> None:
    edge = plan.edges[-1]
    built = build_edge(
        plan,
        edge,
        regions(plan, "prefill", edge.source, SOURCE_PAGES, 1),
        regions(plan, "decode", edge.destination, DESTINATION_PAGES, 2),
        3,
        5,
    )
    for rows, device in ((built.src_rows, 3), (built.dst_rows, 5)):
        assert rows.dtype == np.uint64
        assert rows.flags.c_contiguous
        assert rows.shape[1] == 5
        assert set(rows[:, 2].tolist()) == {device}
    for table, rows in built.tables.items():
        found = indexes(rows, pairs_of(plan, edge, table, [0, 1, 2], [2, 1, 0], 0, 32))
        for piece in pieces([found], 200):
            for index in (piece.src, piece.dst):
                assert index.dtype == np.int32
                assert index.flags.c_contiguous
                assert index.ndim == 1


@pytest.mark.parametrize("name", PLANS)
@given(src=st.integers(0, 2**16), dst=st.integers(0, 2**16))
def test_every_row_bears_the_device_of_its_side(build: Any, name: str, src: int, dst: int) -> None:
    """For every edge; and nothing else of a row or an index depends on it."""
    plan = PLANS[name](build).plan()
    for edge in plan.edges:
        source = regions(plan, "prefill", edge.source, SOURCE_PAGES, 1)
        destination = regions(plan, "decode", edge.destination, DESTINATION_PAGES, 2)
        host, built = (build_edge(plan, edge, source, destination, *devices) for devices in ((0, 0), (src, dst)))
        for plain, rows, device in ((host.src_rows, built.src_rows, src), (host.dst_rows, built.dst_rows, dst)):
            assert (rows[:, 2] == device).all()
            assert (plain[:, 2] == 0).all()
            assert np.array_equal(np.delete(rows, 2, axis=1), np.delete(plain, 2, axis=1))
        for table, own in built.tables.items():
            assert np.array_equal(own.src_first, host.tables[table].src_first)
            assert np.array_equal(own.dst_first, host.tables[table].dst_first)


def test_one_row_covers_a_pool_of_any_size(build: Any) -> None:
    plan = build.deployment(build.heads(4, layers=2), 1, 1).plan()
    built = [
        build_edge(plan, plan.edges[0], regions(plan, "prefill", 0, pages, 1), regions(plan, "decode", 0, 2 * pages, 2))
        for pages in (10, 100_000)
    ]
    assert len(built[0].src_rows) == len(built[1].src_rows) == len(built[0].dst_rows) == 2
    assert built[1].src_rows[:, 4].tolist() == [100_000, 100_000]
    assert built[1].dst_rows[:, 4].tolist() == [200_000, 200_000]


def test_neighbouring_pages_have_neighbouring_indexes(build: Any) -> None:
    """NIXL joins descriptors whose indexes run on; that is most of the speed at small blocks."""
    plan = build.deployment(build.heads(4, layers=2), 1, 1).plan()
    edge = plan.edges[0]
    built = build_edge(plan, edge, regions(plan, "prefill", 0, 8, 1), regions(plan, "decode", 0, 8, 2))
    src, dst, _ = indexes(built.tables["attention"], pairs_of(plan, edge, "attention", [2, 3, 4], [5, 6, 7], 0, 48))
    assert src.tolist() == [2, 3, 4, 10, 11, 12]
    assert dst.tolist() == [5, 6, 7, 13, 14, 15]


@pytest.mark.parametrize("side", ["source", "destination"])
def test_memory_that_is_not_registered(build: Any, side: str) -> None:
    plan = build.deployment(build.heads(4, layers=2), 1, 1).plan()
    source, destination = regions(plan, "prefill", 0, 8, 1), regions(plan, "decode", 0, 8, 2)
    (source if side == "source" else destination).pop(0)
    with pytest.raises(MoverError) as caught:
        build_edge(plan, plan.edges[0], source, destination)
    assert caught.value.code == "MissingRegion"
    assert "group attention layer 1 region 0" in caught.value.message


@pytest.mark.parametrize("pages", [2**30, 2**31 - 1])
def test_more_descriptors_than_an_index_can_name(build: Any, pages: int) -> None:
    plan = build.deployment(build.heads(4, layers=8), 1, 1).plan()
    few, many = regions(plan, "prefill", 0, 8, 1), regions(plan, "prefill", 0, pages, 1)
    for source, destination in ((few, many), (many, few)):
        with pytest.raises(MoverError) as caught:
            build_edge(plan, plan.edges[0], source, destination)
        assert caught.value.code == "TooManyDescriptors"
    shrunk = [msgspec.structs.replace(one, pages=2**31 // 8 - 1) for one in many]
    assert len(build_edge(plan, plan.edges[0], shrunk, few).src_rows) == 8


# Pieces.


def triple(lengths: list[int], first: int = 0) -> tuple[Index, Index, Ints]:
    index = np.arange(first, first + len(lengths), dtype=np.int32)
    return index, index + 1000, np.array(lengths, dtype=np.int64)


@given(st.lists(st.lists(st.integers(1, 50), max_size=20), min_size=1, max_size=3), st.integers(1, 120))
def test_pieces_lose_nothing_and_respect_the_limit(lists: list[list[int]], limit: int) -> None:
    firsts = list(itertools.accumulate((len(lengths) for lengths in lists), initial=0))
    found = pieces([triple(lengths, first) for lengths, first in zip(lists, firsts, strict=False)], limit)
    lengths = [length for one in lists for length in one]
    src = [index for piece in found for index in piece.src.tolist()]
    assert src == list(range(len(lengths)))
    assert [index for piece in found for index in piece.dst.tolist()] == [index + 1000 for index in src]
    for piece in found:
        own = [lengths[index] for index in piece.src.tolist()]
        assert own
        assert piece.bytes == sum(own)
        assert piece.bytes <= limit or len(own) == 1
    for left, right in itertools.pairwise(found):
        assert left.bytes + lengths[int(right.src[0])] > limit, "two posts where one would do"


def test_no_runs_make_no_pieces() -> None:
    assert pieces([triple([])], 10) == []


def test_a_run_longer_than_the_limit_is_a_post_of_its_own() -> None:
    assert [piece.bytes for piece in pieces([triple([5, 5, 100, 5, 5])], 10)] == [10, 100, 10]
