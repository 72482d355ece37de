"""Movers over real NIXL: what they move, what they refuse, and what they cost while nothing is asked of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg_agent.engines.synthetic.content import request_seed
from disagg_agent.engines.synthetic.pool import POISON
from disagg_agent.errors import MoverError
from disagg_agent.messages import Cancel, Connect, Connected, Disconnect, Moved, MoveSource, Probe, Probed, Serve
from disagg_agent.mover import Mover
from disagg_plan.ranges import parse_ranges

pytestmark = pytest.mark.nixl

replace = msgspec.structs.replace

PLANS: dict[str, Callable[[Any], Any]] = {
    "HND, TP 2 to 4": lambda b: b.deployment(b.heads(4, layers=2), 2, 4),
    "HND, TP 4 to 2": lambda b: b.deployment(b.heads(4, layers=2), 4, 2),
    "NHD, TP 2 to 4": lambda b: b.deployment(b.heads(4, layers=2), 2, 4, layout="NHD"),
    "NHD to HND": lambda b: b.deployment(
        b.heads(4, layers=2), 2, 1, prefill_options={"layout": "NHD"}, decode_options={"layout": "HND"}
    ),
    "separate K and V, odd cells": lambda b: b.deployment(b.heads(4, layers=2, cell=13), 2, 4, backend="SEPARATE"),
    "opaque": lambda b: b.deployment(b.heads(4, layers=2), 1, 2, backend="OPAQUE"),
    "MLA": lambda b: b.deployment(b.latent(layers=3, cell=72), 2, 3, backend="LATENT"),
    "blocks 16 to 32": lambda b: b.deployment(b.heads(2, layers=2), 1, 2, None, {"block": 32}),
    "blocks 32 to 16": lambda b: b.deployment(b.heads(2, layers=2), 2, 1, {"block": 32}),
    "blocks 48 to 32, NHD": lambda b: b.deployment(
        b.heads(2, layers=2), 2, 1, {"block": 48}, {"block": 32}, layout="NHD"
    ),
    "6 heads, TP 3 to 2": lambda b: b.deployment(b.heads(6, layers=2), 3, 2),
    "2 heads on 4 ranks": lambda b: b.deployment(b.heads(2, layers=2), 4, 2),
    "pipelines 2 to 3": lambda b: b.deployment(b.heads(2, layers=5), (1, 2), (2, 3)),
}

SRC = {"attention": [5, 6, 0, 14, 3, 9]}
DST = {"attention": [17, 2, 3, 19, 0, 8]}


@pytest.fixture
def small(build: Any) -> Any:
    """P TP 2 to D TP 4."""
    return build.deployment(build.heads(4, layers=2), 2, 4).plan()


@pytest.fixture
def single(build: Any) -> Any:
    """One rank on either side, several megabytes a request."""
    return build.deployment(build.heads(4, layers=4, cell=1024), 1, 1).plan()


def span_bytes(plan: Any, rank: int, tokens: int) -> int:
    """Bytes of the cells of so many tokens on a decode rank, by the parts of its pages."""
    held = plan.destination.ranks[rank]
    total = 0
    for group, index in held.pages.items():
        page = plan.destination.pages[index]
        for part in page.parts:
            cells = tokens if part.token_stride else tokens // page.block_tokens
            total += len(parse_ranges(held.layers[group])) * (part.units[1] - part.units[0]) * cells * part.cell_bytes
    return total


# What moves.


@pytest.mark.parametrize("name", PLANS)
def test_every_byte_arrives_and_no_other_changes(name: str, stage: Any, build: Any, arrays: Any) -> None:
    plan = PLANS[name](build).plan()
    movers = stage.movers(plan)
    movers.connect()
    (table,) = plan.tables
    src, dst = {table: SRC["attention"]}, {table: DST["attention"]}
    block = plan.destination.pages[0].block_tokens
    tokens = min(4 * 16, 2 * plan.source.pages[0].block_tokens) + 5
    movers.fill("first", src, tokens)
    shared = plan.groups[0].sub_tokens
    for one, moved in zip(movers.decode, movers.moved(tokens, 0, src, dst), strict=True):
        assert moved.code == "", moved
        assert moved.bytes == span_bytes(plan, one.rank, -(-tokens // shared) * shared)
        checked, wrong = one.pool.verify(request_seed("first"), arrays(dst), tokens)
        assert checked > 0
        assert wrong == 0
        used = {table: dst[table][: -(-tokens // block)]}
        assert one.pool.stray_bytes(arrays(used)) == 0


@pytest.mark.parametrize("name", ["HND, TP 2 to 4", "NHD, TP 2 to 4", "blocks 16 to 32", "blocks 32 to 16", "opaque"])
def test_a_prefix_that_decode_has_already_is_not_moved(name: str, stage: Any, build: Any, arrays: Any) -> None:
    plan = PLANS[name](build).plan()
    movers = stage.movers(plan)
    movers.connect()
    block = plan.destination.pages[0].block_tokens
    start, tokens = block, 3 * 32
    movers.fill("first", SRC, tokens)
    for one in movers.decode:
        one.pool.fill(request_seed("first"), arrays(DST), 0, start)
        # What is held already is decode's own: were it moved again, this damage would be repaired.
        one.pool.corrupt("attention", DST["attention"][0])
    missing = {"attention": DST["attention"][1:]}
    for one, moved in zip(movers.decode, movers.moved(tokens, start, SRC, missing), strict=True):
        assert moved.code == "", moved
        assert moved.bytes == span_bytes(plan, one.rank, tokens - start)
        assert one.pool.verify(request_seed("first"), arrays(DST), tokens)[1] == 1


def test_tables_are_moved_by_their_own_pages(stage: Any, build: Any, two_tables: Any, arrays: Any) -> None:
    plan = build.deployment(two_tables, (1, 2), 2).plan()
    movers = stage.movers(plan)
    movers.connect()
    src, dst = {"full": [3, 1], "window": [0, 7]}, {"full": [4, 9], "window": [9, 12]}
    movers.fill("first", src, 32)
    for one, moved in zip(movers.decode, movers.moved(32, 0, src, dst), strict=True):
        assert moved.code == "", moved
        assert one.pool.verify(request_seed("first"), arrays(dst), 32)[1] == 0
        assert one.pool.stray_bytes(arrays(dst)) == 0


def test_requests_move_at_the_same_time(stage: Any, small: Any, arrays: Any) -> None:
    movers = stage.movers(small, source_pages=64, destination_pages=64)
    movers.connect()
    requests = {
        f"request-{number}": ({"attention": [number * 4, number * 4 + 2]}, {"attention": [63 - number * 3, number]})
        for number in range(12)
    }
    for name, (src, _) in requests.items():
        movers.fill(name, src, 32)
    with movers.serving():
        for name, (src, dst) in requests.items():
            for one in movers.decode:
                one.mover.submit(movers.move(one.rank, name, 32, 0, src, dst))
        for one in movers.decode:
            found = [one.events.get(Moved) for _ in requests]
            assert {moved.id for moved in found} == set(requests)
            assert {moved.code for moved in found} == {""}
    for one in movers.decode:
        for name, (_, dst) in requests.items():
            assert one.pool.verify(request_seed(name), arrays(dst), 32)[1] == 0


# What is refused before anything moves.


def source_pages(message: Any, blocks: Any) -> Any:
    return replace(message, sources=[replace(one, pages=blocks) for one in message.sources])


def destination_pages(message: Any, blocks: Any) -> Any:
    return replace(message, pages=blocks)


WRONG_IDS = {
    "out of range": ([0, 20, 1], "PageOutOfRange"),
    "far out of range": ([0, 2**31 - 1, 1], "PageOutOfRange"),
    "negative": ([0, -1, 1], "PageOutOfRange"),
    "repeated": ([0, 4, 0], "RepeatedPage"),
    "too few": ([0, 1], "TooFewPages"),
    "none": ([], "TooFewPages"),
}


def connect(stage: Any, build: Any) -> Any:
    """Connected movers whose source holds a request of 48 tokens; both pools have 20 pages."""
    movers = stage.movers(build.deployment(build.heads(4, layers=2), 2, 4).plan(), source_pages=20)
    movers.connect()
    movers.fill("first", SRC, 48)
    return movers


@pytest.fixture
def connected(stage: Any, build: Any) -> Any:
    """Movers that a test may spoil."""
    return connect(stage, build)


@pytest.fixture(scope="module")
def shared(shared_stage: Any, build: Any) -> Any:
    """Movers for tests that are refused."""
    return connect(shared_stage, build)


def refuses(movers: Any, message: Any, code: str, *parts: str) -> None:
    """Decode rank 1 answers with a code, nothing is read, and a right move still works."""
    one = movers.decode[1]
    one.pool.segment.bytes.fill(POISON)
    moved = one.ask(message, Moved)
    assert (moved.id, moved.code, moved.bytes) == (message.id, code, 0)
    for part in parts:
        assert part in moved.message
    assert one.untouched()
    assert {answer.code for answer in movers.moved(48, 0, SRC, DST)} == {""}


@pytest.mark.parametrize(("ids", "code"), WRONG_IDS.values(), ids=WRONG_IDS)
@pytest.mark.parametrize("side", ["prefill rank 0", "decode rank 1"])
def test_page_ids_that_are_wrong(shared: Any, pages: Any, side: str, ids: list[int], code: str) -> None:
    message = shared.move(1, "bad", 48, 0, SRC, DST)
    change = source_pages if side.startswith("prefill") else destination_pages
    refuses(shared, change(message, pages({"attention": ids})), code, f"{side} table attention")


@pytest.mark.parametrize("change", [source_pages, destination_pages])
@pytest.mark.parametrize("blocks", [{}, {"window": b""}, {"attention": b"abc"}], ids=["no", "another", "a torn"])
def test_a_table_that_is_missing_or_torn(shared: Any, change: Any, blocks: Any) -> None:
    refuses(shared, change(shared.move(1, "bad", 48, 0, SRC, DST), blocks), "BadPages")


def test_a_start_inside_a_block(shared: Any) -> None:
    refuses(shared, shared.move(1, "bad", 48, 8, SRC, DST), "UnalignedStart", "position 8")


def test_a_source_that_is_not_connected(shared: Any, pages: Any) -> None:
    message = shared.move(1, "bad", 48, 0, SRC, DST)
    refuses(shared, replace(message, sources=[MoveSource("prefill-9/p0", pages(SRC))]), "NotConnected", "prefill-9/p0")


def test_one_wrong_source_keeps_all_from_moving(stage: Any, build: Any, pages: Any) -> None:
    movers = stage.movers(build.deployment(build.heads(4, layers=2), 4, 2).plan())
    movers.connect()
    movers.fill("first", SRC, 48)
    right = movers.move(1, "bad", 48, 0, SRC, DST)
    assert len(right.sources) == 2
    wrong = [right.sources[0], replace(right.sources[1], pages=pages({"attention": [0, 99, 1]}))]
    refuses(movers, replace(right, sources=wrong), "PageOutOfRange", "prefill rank 3")


# Connecting.


def damage(name: str, movers: Any) -> tuple[int, Any, str]:
    """A source rank, a card, and the code that they must be refused with."""
    card = movers.prefill[0].card
    other = movers.prefill[1].card
    metadata = card.metadata
    regions = card.regions
    return {
        "no edge": (1, other, "NoEdge"),
        "no rank": (7, card, "NoEdge"),
        "garbage": (0, replace(card, metadata=os.urandom(400)), "ConnectFailed"),
        "empty": (0, replace(card, metadata=b""), "ConnectFailed"),
        "truncated": (0, replace(card, metadata=metadata[:-20]), "ConnectFailed"),
        "cut in half": (0, replace(card, metadata=metadata[: len(metadata) // 2]), "ConnectFailed"),
        "wrong name": (0, replace(card, name="prefill-0-somebody-else"), "WrongName"),
        "another's": (0, replace(card, metadata=other.metadata), "WrongName"),
        "its own": (0, replace(card, metadata=movers.decode[0].card.metadata), "ConnectFailed"),
        "missing region": (0, replace(card, regions=regions[1:]), "MissingRegion"),
        "too many pages": (
            0,
            replace(card, regions=[replace(one, pages=2**31 - 1) for one in regions]),
            "TooManyDescriptors",
        ),
        "memory it never registered": (
            0,
            replace(card, regions=[replace(one, base=one.base + (1 << 40)) for one in regions]),
            "PrepareFailed",
        ),
        "memory behind its end": (
            0,
            replace(card, regions=[replace(one, pages=one.pages + 500) for one in regions]),
            "PrepareFailed",
        ),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "no edge",
        "no rank",
        "garbage",
        "empty",
        "truncated",
        "cut in half",
        "wrong name",
        "another's",
        "its own",
        "missing region",
        "too many pages",
        "memory it never registered",
        "memory behind its end",
    ],
)
def test_a_card_that_is_wrong_is_refused_and_a_fresh_one_works(name: str, stage: Any, small: Any, arrays: Any) -> None:
    movers = stage.movers(small)
    source, card, code = damage(name, movers)
    one = movers.decode[0]
    with movers.serving():
        found = one.ask(Connect("prefill-0/p0", source, card), Connected)
    assert found.link == "prefill-0/p0"
    assert found.code == code
    assert found.message
    assert one.ask(Probe("prefill-0/p0"), Probed).code == "NotConnected"
    assert one.ask(movers.move(0, "early", 16, 0, SRC, DST), Moved).code == "NotConnected"
    # A restarted engine has a new mover with a name of its own.
    movers.prefill[0].mover.close()
    movers.prefill[0] = movers.new("prefill", 0)
    movers.connect()
    movers.fill("first", SRC, 48)
    assert {moved.code for moved in movers.moved(48, 0, SRC, DST)} == {""}
    assert one.pool.verify(request_seed("first"), arrays(DST), 48)[1] == 0


def test_a_stolen_name_does_not_disturb_its_owner(stage: Any, build: Any, arrays: Any) -> None:
    """A card with the metadata of a peer that is connected already is refused, and that peer stays."""
    movers = stage.movers(build.deployment(build.heads(4, layers=2), 4, 2).plan())
    movers.connect()
    thief = replace(movers.prefill[1].card, metadata=movers.prefill[0].card.metadata)
    with movers.serving():
        assert movers.decode[0].connect(movers.prefill[1], link="prefill-9/p1", card=thief).code == "WrongName"
    movers.fill("first", SRC, 48)
    assert {moved.code for moved in movers.moved(48, 0, SRC, DST)} == {""}
    assert movers.decode[0].pool.verify(request_seed("first"), arrays(DST), 48)[1] == 0


def test_a_source_that_was_forgotten_can_come_back(connected: Any) -> None:
    one = connected.decode[0]
    for _ in range(3):
        one.mover.submit(Disconnect("prefill-0/p0"))
        one.mover.submit(Disconnect("prefill-0/p0"))
        assert one.ask(connected.move(0, "m", 48, 0, SRC, DST), Moved).code == "NotConnected"
        with connected.serving():
            assert one.connect(connected.prefill[0]).code == ""
            assert one.ask(Probe("prefill-0/p0"), Probed).code == ""
            assert one.ask(connected.move(0, "m", 48, 0, SRC, DST), Moved).code == ""


def test_a_link_can_be_connected_anew_without_being_dropped(connected: Any, arrays: Any) -> None:
    one = connected.decode[0]
    connected.prefill.append(connected.new("prefill", 0))
    fresh = connected.prefill[-1]
    fresh.pool.fill(request_seed("second"), arrays(SRC), 0, 48)
    with connected.serving():
        assert one.connect(fresh).code == ""
        assert one.ask(connected.move(0, "m", 48, 0, SRC, DST), Moved).code == ""
    assert one.pool.verify(request_seed("second"), arrays(DST), 48)[1] == 0


def test_a_source_that_is_gone_is_named(tcp_only: None, connected: Any) -> None:
    connected.prefill[0].mover.close()
    one = connected.decode[0]
    moved = one.ask(connected.move(0, "m", 48, 0, SRC, DST), Moved)
    assert moved.code == "TransferFailed"
    assert one.ask(Probe("prefill-0/p0"), Probed).code == "TransferFailed"
    # Its end is no trouble either.
    one.mover.submit(Disconnect("prefill-0/p0"))
    assert one.ask(Probe("prefill-0/p0"), Probed).code == "NotConnected"


# What is in flight.


@pytest.fixture
def in_flight(tcp_only: None, stage: Any, single: Any, arrays: Any) -> Any:
    """A move that waits for its source, which does not drive its progress: nothing lands, nothing ends."""
    movers = stage.movers(single)
    movers.connect()
    movers.fill("first", SRC, 96)
    (one,) = movers.decode
    deadline = time.monotonic() + 20.0
    one.mover.submit(movers.move(0, "m", 96, 0, SRC, DST))
    while one.events.maybe(0.3) is not None:
        # The source's thread had not gone to sleep yet after connecting, and served this one.
        assert time.monotonic() < deadline, "the source never stops to drive its progress"
        one.pool.poison(arrays(DST))
        one.mover.submit(movers.move(0, "m", 96, 0, SRC, DST))
    return movers


def ends_with(movers: Any, code: str) -> None:
    """Let the source go on: the move ends, and after that no byte changes any more."""
    (one,) = movers.decode
    movers.prefill[0].mover.submit(Serve(+1))
    moved = one.events.get(Moved)
    then = one.pool.segment.bytes.copy()
    assert (moved.id, moved.code) == ("m", code)
    one.events.none_for(0.3)
    assert (one.pool.segment.bytes == then).all(), "bytes landed after the move had ended"
    movers.prefill[0].mover.submit(Serve(-1))


def test_a_move_waits_for_its_source(in_flight: Any, arrays: Any) -> None:
    ends_with(in_flight, "")
    assert in_flight.decode[0].pool.verify(request_seed("first"), arrays(DST), 96)[1] == 0


def test_a_cancelled_move_ends_when_nothing_is_in_flight(in_flight: Any) -> None:
    (one,) = in_flight.decode
    one.mover.submit(Cancel("m"))
    one.mover.submit(Cancel("m"))
    one.mover.submit(Cancel("another"))
    one.events.none_for(0.3)
    ends_with(in_flight, "Cancelled")


def test_forgetting_a_source_waits_for_what_is_in_flight(in_flight: Any) -> None:
    (one,) = in_flight.decode
    one.mover.submit(Disconnect("prefill-0/p0"))
    one.events.none_for(0.3)
    ends_with(in_flight, "PeerGone")
    with in_flight.serving():
        assert one.connect(in_flight.prefill[0]).code == ""
        assert one.ask(in_flight.move(0, "m", 96, 0, SRC, DST), Moved).code == ""


def test_a_source_that_comes_back_while_its_old_transfer_is_in_flight(in_flight: Any, arrays: Any) -> None:
    (one,) = in_flight.decode
    one.mover.submit(Disconnect("prefill-0/p0"))
    assert one.connect(in_flight.prefill[0]).code == ""
    one.events.none_for(0.2)
    ends_with(in_flight, "PeerGone")
    one.pool.poison(arrays(DST))
    with in_flight.serving():
        assert one.ask(Probe("prefill-0/p0"), Probed).code == ""
        assert one.ask(in_flight.move(0, "n", 96, 0, SRC, DST), Moved).code == ""
    assert one.pool.verify(request_seed("first"), arrays(DST), 96)[1] == 0


def test_a_source_that_dies_ends_what_is_in_flight(in_flight: Any) -> None:
    (one,) = in_flight.decode
    in_flight.prefill[0].mover.close()
    assert one.events.get(Moved).code == "TransferFailed"


def test_a_mover_can_be_closed_with_something_in_flight(in_flight: Any) -> None:
    # The source must not serve it afterwards: NIXL 1.5.1 over TCP ends a process that answers a reader that is gone.
    (one,) = in_flight.decode
    before = set(threading.enumerate())
    one.mover.close()
    assert [thread.name for thread in before - set(threading.enumerate())] == ["mover-decode-0"]
    then = one.pool.segment.bytes.copy()
    one.events.none_for(0.3)
    assert (one.pool.segment.bytes == then).all()


# What it costs.


def test_a_mover_without_usable_memory_says_so(build: Any) -> None:
    plan = build.deployment(build.heads(4, layers=2), 1, 1).plan()
    with pytest.raises(MoverError) as caught:
        Mover(plan, "prefill", 0, [(0, 4096)], [], lambda event: None)
    assert caught.value.code == "RegisterFailed"


def thread_seconds(prefix: str) -> float:
    """Processor time of all threads of that name."""
    threads = [one for one in threading.enumerate() if one.name.startswith(prefix)]
    assert threads
    return sum(int(Path(f"/proc/self/task/{one.native_id}/schedstat").read_text().split()[0]) for one in threads) / 1e9


def test_idle_movers_cost_nothing(connected: Any) -> None:
    assert {moved.code for moved in connected.moved(48, 0, SRC, DST)} == {""}
    idle = threading.Event()

    def spent() -> float:
        before = thread_seconds("mover-")
        idle.wait(2.0)
        return thread_seconds("mover-") - before

    assert spent() < 0.02, "six movers together: under 1% of one processor"
    # The figure can tell: the same movers while they drive progress for somebody.
    with connected.serving():
        assert spent() > 0.02
