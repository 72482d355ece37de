"""Connections, engines and agents that end in the middle: named within two seconds, and no page is free too early."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import msgspec
import pytest

from disagg_agent.cards import RankCard
from disagg_agent.handshake import Address
from disagg_agent.messages import (
    Done,
    Failed,
    Freed,
    Held,
    Loaded,
    Open,
    Opened,
    Ranks,
    Released,
    Revoked,
    Serve,
    SourceRef,
    Watch,
    pack_pages,
)
from disagg_agent.plan_loader import check_plan
from disagg_plan import wire

pytestmark = pytest.mark.nixl

PROMPT = 2.0
"""Seconds within which a failure must be known."""

REF = SourceRef("prefill-0", "s", "g", "", 0)


@pytest.fixture
def plan(build: Any) -> Any:
    """P TP 2 to D TP 2."""
    return build.deployment(build.heads(4, layers=2), 2, 2).plan()


@pytest.fixture
def single(build: Any) -> Any:
    """One rank on either side, several megabytes a request."""
    return build.deployment(build.heads(4, layers=4, cell=1024), 1, 1).plan()


def promptly(engine: Any, since: float, code: str, freed: bool) -> None:
    """Every rank hears of the failure within two seconds."""
    found = engine.expect(Failed)
    assert time.monotonic() - since < PROMPT
    assert {(one.code, one.freed) for one in found} == {(code, freed)}


def cut(sock: socket.socket) -> None:
    """End a connection without taking leave."""
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()


# Before anything moves.


@pytest.fixture
def asked(stage: Any, plan: Any) -> Any:
    """A scripted prefill agent that decode has asked for a request's pages."""
    movers = stage.movers(plan)
    peer, decode, engine = stage.decode_of(movers)
    with movers.serving():
        sock = peer.accept()
        decode.ready_for()
    engine.load("r", REF, 40, engine.ids(40))
    questions = [peer.hear(sock, Open) for _ in range(2)]
    assert {(one.source, one.destination, one.tokens) for one in questions} == {(0, 0, 40), (1, 1, 40)}
    yield peer, sock, decode, engine, movers
    sock.close()


def test_a_peer_that_goes_before_it_answers(asked: Any) -> None:
    _peer, sock, decode, engine, _movers = asked
    since = time.monotonic()
    cut(sock)
    promptly(engine, since, "PeerLost", freed=True)
    assert engine.stray_bytes() == 0
    assert decode.transfers()["loads"] == 0


def test_an_abort_before_the_peer_answers(asked: Any) -> None:
    peer, sock, decode, engine, _movers = asked
    engine.abort("r")
    assert set(engine.expect(Freed)) == {Freed("r")}
    assert {(one.source, one.destination) for one in (peer.hear(sock, Done), peer.hear(sock, Done))} == {(0, 0), (1, 1)}
    # The answer comes too late, and moves nothing.
    peer.say(sock, Opened("s", "g", 0, 0, {}, 30.0))
    assert decode.transfers()["loads"] == 0
    assert engine.stray_bytes() == 0


def test_an_engine_rank_that_goes_gives_up_what_it_asked_for(asked: Any) -> None:
    peer, sock, decode, engine, _movers = asked
    engine.workers[0].close()
    done = peer.hear(sock, Done)
    assert (done.source, done.destination) == (0, 0)
    assert decode.transfers()["loads"] == 1
    engine.workers[1].inbox.none_for(0.1)


def test_a_prefill_rank_that_goes_takes_only_its_own_readers(asked: Any) -> None:
    peer, sock, decode, engine, movers = asked
    factors = movers.loaded.expected_factors("prefill")
    since = time.monotonic()
    peer.say(sock, Ranks([RankCard(1, factors, movers.prefill[1].card)]))
    failed = engine.workers[0].inbox.get(Failed)
    assert time.monotonic() - since < PROMPT
    assert (failed.code, failed.freed) == ("EngineGone", True)
    engine.workers[1].inbox.none_for(0.1)
    assert decode.transfers()["loads"] == 1


def test_a_question_that_was_given_up_is_not_asked_later(tcp_only: None, stage: Any, single: Any) -> None:
    """It would be granted, and prefill would keep pages for a reader that never comes."""
    movers = stage.movers(single)
    peer, decode, engine = stage.decode_of(movers)
    sock = peer.accept()
    # The probe waits for a source that does not drive its progress: the peer is known, and not ready.
    watch = peer.hear(sock, Watch)
    assert (watch.source, watch.on) == (0, True)
    engine.load("r", REF, 40, engine.ids(40))
    engine.load("q", msgspec.structs.replace(REF, request="t"), 40, engine.ids(40))
    engine.abort("r")
    assert engine.expect(Freed) == [Freed("r")]
    assert peer.hear(sock) == Done("s", "g", 0, 0)
    with movers.serving():
        decode.ready_for()
    assert peer.hear(sock) == Watch(0, on=False)
    assert peer.hear(sock) == Open("t", "g", 0, 0, 40)
    sock.close()


def test_a_load_that_waits_for_its_peer_fails_with_it(stage: Any, plan: Any) -> None:
    peer, _decode, engine = stage.decode_of(stage.movers(plan))
    sock = peer.accept(ranks=False)
    engine.load("r", REF, 40, engine.ids(40))
    engine.load("q", msgspec.structs.replace(REF, request="t"), 40, engine.ids(40))
    since = time.monotonic()
    cut(sock)
    promptly(engine, since, "PeerLost", freed=True)
    promptly(engine, since, "PeerLost", freed=True)


# While bytes move: over TCP a read waits for its source, for as long as a test wants.


@pytest.fixture
def moving(tcp_only: None, stage: Any, single: Any) -> Any:
    """A scripted prefill agent whose granted pages are being read."""
    movers = stage.movers(single)
    peer, decode, engine = stage.decode_of(movers)
    with movers.serving():
        sock = peer.accept()
        decode.ready_for()
    source = {"attention": [5, 6, 0, 14, 3, 9]}
    movers.fill("s", source, 96)
    engine.load("r", REF, 96, engine.ids(96))
    question = peer.hear(sock, Open)
    peer.say(sock, Opened("s", "g", question.source, 0, {"attention": pack_pages(source["attention"])}, 30.0))
    engine.workers[0].inbox.none_for(0.2)
    yield peer, sock, decode, engine, movers
    with contextlib.suppress(OSError):
        sock.close()


def drains(engine: Any, movers: Any, decode: Any) -> None:
    """The pages come free once the source lets the read end, and nothing lands in them after that."""
    (worker,) = engine.workers
    worker.inbox.none_for(0.2)
    assert decode.transfers()["loads"] == 1
    movers.prefill[0].mover.submit(Serve(+1))
    assert worker.inbox.get() == Freed("r")
    then = worker.pool.segment.bytes.copy()
    worker.inbox.none_for(0.3)
    assert (worker.pool.segment.bytes == then).all(), "bytes landed in pages that were said to be free"
    assert decode.transfers()["loads"] == 0
    movers.prefill[0].mover.submit(Serve(-1))


def test_a_read_that_nothing_disturbs_is_loaded(moving: Any) -> None:
    peer, sock, _decode, engine, movers = moving
    with movers.serving():
        (loaded,) = engine.expect(Loaded)
    assert loaded.bytes == 96 * 4 * 4 * 2 * 1024
    assert engine.wrong_bytes("s", engine.ids(96), 96) == 0
    assert peer.hear(sock, Done) == Done("s", "g", 0, 0)


def test_a_peer_that_goes_while_its_pages_are_read(moving: Any) -> None:
    _peer, sock, decode, engine, movers = moving
    since = time.monotonic()
    cut(sock)
    promptly(engine, since, "PeerLost", freed=False)
    drains(engine, movers, decode)


def test_a_peer_that_sends_garbage_while_its_pages_are_read(moving: Any) -> None:
    _peer, sock, decode, engine, movers = moving
    since = time.monotonic()
    sock.sendall(b"\xff\xff\xff\xff")
    promptly(engine, since, "FrameTooLarge", freed=False)
    drains(engine, movers, decode)


@pytest.mark.parametrize("code", ["RequestAborted", "LeaseExpired", "EngineGone"])
def test_pages_that_are_taken_back_while_they_are_read(moving: Any, code: str) -> None:
    peer, sock, decode, engine, movers = moving
    since = time.monotonic()
    peer.say(sock, Revoked("s", "g", 0, 0, code, "why"))
    promptly(engine, since, code, freed=False)
    # Prefill may use its pages only when decode has let go of them.
    sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        peer.hear(sock, Done)
    sock.settimeout(20.0)
    drains(engine, movers, decode)
    assert peer.hear(sock, Done) == Done("s", "g", 0, 0)


def test_an_abort_while_bytes_move(moving: Any) -> None:
    peer, sock, decode, engine, movers = moving
    engine.abort("r")
    engine.abort("r")
    drains(engine, movers, decode)
    assert peer.hear(sock, Done) == Done("s", "g", 0, 0)


def test_a_rank_whose_card_changes_while_its_pages_are_read(moving: Any) -> None:
    """The engine behind a rank was restarted: its old memory must not be read any more."""
    peer, sock, decode, engine, movers = moving
    movers.prefill.append(movers.new("prefill", 0))
    factors = movers.loaded.expected_factors("prefill")
    since = time.monotonic()
    peer.say(sock, Ranks([RankCard(0, factors, movers.prefill[1].card)]))
    promptly(engine, since, "EngineGone", freed=False)
    movers.prefill[1].mover.submit(Serve(+1))
    drains(engine, movers, decode)
    decode.ready_for()
    movers.prefill[1].mover.submit(Serve(-1))


def test_a_deadline_while_bytes_move(tcp_only: None, stage: Any, single: Any) -> None:
    movers = stage.movers(single)
    peer, decode, engine = stage.decode_of(movers, deadline_seconds=1.0)
    with movers.serving():
        sock = peer.accept()
        decode.ready_for()
    engine.load("r", REF, 40, engine.ids(40))
    peer.hear(sock, Open)
    peer.say(sock, Opened("s", "g", 0, 0, {"attention": pack_pages([1, 2, 3])}, 30.0))
    (failed,) = engine.expect(Failed)
    assert (failed.code, failed.freed) == ("DeadlineExceeded", False)
    assert "moving" in failed.message
    drains(engine, movers, decode)
    sock.close()


@pytest.mark.parametrize("lease", [0.0, 0.4])
def test_a_read_that_ends_after_its_lease_is_no_load(tcp_only: None, stage: Any, single: Any, lease: float) -> None:
    movers = stage.movers(single)
    peer, decode, engine = stage.decode_of(movers)
    with movers.serving():
        sock = peer.accept()
        decode.ready_for()
    movers.fill("s", {"attention": [1, 2, 3]}, 40)
    engine.load("r", REF, 40, engine.ids(40))
    peer.hear(sock, Open)
    peer.say(sock, Opened("s", "g", 0, 0, {"attention": pack_pages([1, 2, 3])}, lease))
    if lease:
        engine.workers[0].inbox.none_for(lease + 0.1)
        movers.prefill[0].mover.submit(Serve(+1))
    (failed,) = engine.expect(Failed)
    assert (failed.code, failed.freed) == ("LeaseExpired", True)
    assert (engine.stray_bytes() == 0) == (lease == 0.0)
    assert decode.transfers()["loads"] == 0
    sock.close()


# Prefill's side.


@pytest.fixture
def opened(stage: Any, plan: Any) -> Any:
    """A real prefill agent whose request a scripted decode agent has open on rank 0."""
    prefill = stage.agent("prefill", check_plan(wire.encode(plan), None), lease_seconds=30.0)
    source = stage.engine(prefill)
    source.hold("s", "g", 40, source.ids(40))
    source.expect(Held)
    reader = stage.scripted_decode(prefill)
    reader.say(Open("s", "g", 0, 0, 40))
    assert reader.hear(Opened).lease > 25.0
    return prefill, source, reader


def test_an_abort_on_prefill_waits_for_its_readers(opened: Any) -> None:
    prefill, source, reader = opened
    source.abort("s")
    # Nobody reads rank 1's pages: they are free at once.
    assert source.workers[1].inbox.get() == Released("s", "g", "aborted")
    revoked = reader.hear(Revoked)
    assert (revoked.source, revoked.destination, revoked.code) == (0, 0, "RequestAborted")
    source.workers[0].inbox.none_for(0.2)
    assert prefill.transfers()["holds"] == 1
    reader.say(Done("s", "g", 0, 0))
    assert source.workers[0].inbox.get() == Released("s", "g", "completed")
    assert prefill.transfers()["holds"] == 0


def test_a_reader_that_goes_lets_go(opened: Any) -> None:
    prefill, source, reader = opened
    source.abort("s")
    source.workers[1].inbox.get(Released)
    since = time.monotonic()
    cut(reader.sock)
    assert source.workers[0].inbox.get() == Released("s", "g", "aborted")
    assert time.monotonic() - since < PROMPT
    assert prefill.transfers()["holds"] == 0


def test_a_reader_that_goes_completes_nothing(opened: Any) -> None:
    prefill, source, reader = opened
    cut(reader.sock)
    source.workers[0].inbox.none_for(0.3)
    assert prefill.transfers()["holds"] == 2


def test_an_engine_that_goes_takes_its_pages_back(opened: Any, until: Any) -> None:
    prefill, source, reader = opened
    source.workers[0].close()
    revoked = reader.hear(Revoked)
    assert (revoked.source, revoked.code) == (0, "EngineGone")
    assert [card.rank for card in reader.hear(Ranks).ranks] == [1]
    until(lambda: prefill.transfers()["holds"] == 1, "only rank 1 holds")


def test_a_lease_that_ends_while_it_is_read(stage: Any, plan: Any) -> None:
    prefill = stage.agent("prefill", check_plan(wire.encode(plan), None), lease_seconds=0.5)
    source = stage.engine(prefill)
    source.hold("s", "g", 40, source.ids(40))
    source.expect(Held)
    reader = stage.scripted_decode(prefill)
    reader.say(Open("s", "g", 0, 0, 40))
    assert 0 < reader.hear(Opened).lease <= 0.5
    assert source.workers[1].inbox.get() == Released("s", "g", "expired")
    assert reader.hear(Revoked).code == "LeaseExpired"
    source.workers[0].inbox.none_for(0.2)
    reader.say(Done("s", "g", 0, 0))
    assert source.workers[0].inbox.get(Released).request == "s"


# Whole agents and engines.


def holds(pair: Any, name: str) -> None:
    ids = pair.source.ids(40)
    pair.source.fill(name, ids, 40)
    pair.source.hold(name, "g", 40, ids)
    pair.source.expect(Held)


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_a_prefill_engine_comes_back(stage: Any, plan: Any, placement: str, until: Any) -> None:
    pair = stage.pair(plan, placement)
    holds(pair, "old")
    pair.source.close()
    until(lambda: pair.prefill.transfers()["holds"] == 0, "its holds are gone")
    until(lambda: pair.decode.peers()[0]["state"] != "ready", "decode has heard of it")
    since = time.monotonic()
    pair.destination.load("r", pair.ref("old"), 40, pair.destination.ids(40))
    promptly(pair.destination, since, "EngineGone", freed=True)
    pair.source = stage.engine(pair.prefill, 16, placement)
    pair.decode.ready_for()
    holds(pair, "new")
    pair.destination.load("r", pair.ref("new"), 40, pair.destination.ids(40))
    pair.destination.expect(Loaded)
    assert pair.destination.wrong_bytes("new", pair.destination.ids(40), 40) == 0


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_a_decode_engine_comes_back(stage: Any, plan: Any, placement: str, until: Any) -> None:
    pair = stage.pair(plan, placement)
    pair.destination.close()
    until(lambda: pair.decode.get("/readyz")[0] == 503, "decode is not ready")
    pair.destination = stage.engine(pair.decode, 24, placement)
    pair.decode.ready_for()
    holds(pair, "new")
    pair.destination.load("r", pair.ref("new"), 40, pair.destination.ids(40))
    pair.destination.expect(Loaded)
    assert pair.destination.wrong_bytes("new", pair.destination.ids(40), 40) == 0


def test_a_prefill_agent_comes_back_at_its_address(stage: Any, plan: Any, until: Any) -> None:
    pair = stage.pair(plan)
    holds(pair, "old")
    port, life = pair.prefill.port, pair.prefill.agent.incarnation
    since = time.monotonic()
    pair.prefill.stop()
    for worker in pair.source.workers:
        worker.lost.get(str)
    pair.source.close()
    until(lambda: pair.decode.peers()[0]["state"] != "ready", "decode has heard of it")
    pair.destination.load("r", pair.ref("old"), 40, pair.destination.ids(40))
    assert {one.freed for one in pair.destination.expect(Failed)} == {True}
    assert time.monotonic() - since < 3 * PROMPT
    pair.prefill = stage.agent("prefill", pair.decode.loaded, port=port)
    pair.source = stage.engine(pair.prefill)
    pair.decode.ready_for()
    assert pair.decode.peers()[0]["incarnation"] == pair.prefill.agent.incarnation != life
    holds(pair, "new")
    pair.destination.load("r", pair.ref("new"), 40, pair.destination.ids(40))
    pair.destination.expect(Loaded)
    assert pair.destination.wrong_bytes("new", pair.destination.ids(40), 40) == 0


def test_an_agent_that_stops_tells_its_engine(asked: Any) -> None:
    _peer, _sock, decode, engine, _movers = asked
    decode.stop()
    for worker in engine.workers:
        failed = worker.inbox.get(Failed)
        assert (failed.code, failed.freed) == ("PeerRemoved", True)
        assert worker.lost.get(str)


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_an_agent_that_stops_while_bytes_move_leaves_no_mover_behind(
    tcp_only: None, stage: Any, single: Any, placement: str
) -> None:
    """Once an engine knows that its agent is gone it takes its pages to be free: nothing may write there."""
    movers = stage.movers(single)
    peer = stage.scripted(movers)
    decode = stage.agent("decode", movers.loaded)
    engine = stage.engine(decode, 20, placement)
    stage.threads.call(lambda: decode.agent.introduce([("prefill", "prefill-0", Address("127.0.0.1", peer.port))]))
    with movers.serving():
        sock = peer.accept()
        decode.ready_for()
    engine.load("r", REF, 40, engine.ids(40))
    peer.hear(sock, Open)
    peer.say(sock, Opened("s", "g", 0, 0, {"attention": pack_pages([1, 2, 3])}, 30.0))
    (worker,) = engine.workers
    worker.inbox.none_for(0.2)
    decode.stop()
    worker.lost.get(str)
    deciders = [one for one in threading.enumerate() if one.name.startswith("mover-decode")]
    assert len(deciders) == 1, "the test's own decode mover alone"
    sock.close()
