"""Decode's side of a request: every transition, with the exact actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from disagg_agent.loads import Loads, ToEngineRank, ToMover, ToSource, link_name
from disagg_agent.messages import (
    Cancel,
    Done,
    Failed,
    Freed,
    Load,
    Loaded,
    Move,
    Moved,
    MoveSource,
    Open,
    Opened,
    OpenRefused,
    Revoked,
    SourceRef,
    pack_pages,
)

SOURCES = [[0, 1], [2]]
TELLS = [[0, 1], [2, 3]]
"""Decode rank 0 reads two sources; rank 1 reads one, and tells another that nobody reads."""

REF = SourceRef("prefill-0", "s", "g", "10.0.0.1", 7000)
PAGES = {"attention": pack_pages([7, 8])}


@pytest.fixture
def loads() -> Loads:
    return Loads(SOURCES, TELLS, 60.0)


def load(request: str = "r", tokens: int = 20, start: int = 0, ref: SourceRef = REF) -> Load:
    return Load(request, ref, tokens, start, PAGES)


def opened(source: int, rank: int = 0, lease: float = 30.0, ref: SourceRef = REF) -> Opened:
    return Opened(ref.request, ref.generation, source, rank, {"attention": pack_pages([source])}, lease)


def refused(source: int = 0, rank: int = 0, code: str = "StaleGeneration", text: str = "why") -> OpenRefused:
    return OpenRefused("s", "g", source, rank, code, text)


def revoked(source: int = 0, rank: int = 0) -> Revoked:
    return Revoked("s", "g", source, rank, "LeaseExpired", "the lease ran out")


def moved(rank: int = 0, request: str = "r", code: str = "", text: str = "") -> Moved:
    return Moved(f"{rank}/{request}", 640, 0.5, code, text)


def tells(rank: int = 0, ref: SourceRef = REF) -> list[ToSource]:
    return [ToSource(ref, Done(ref.request, ref.generation, source, rank)) for source in TELLS[rank]]


def engine(message: Any, rank: int = 0) -> ToEngineRank:
    return ToEngineRank(rank, message)


def begin_moving(loads: Loads, now: float = 0.0, lease: float = 30.0) -> None:
    """Rank 0's load of `r`, opened by both sources."""
    loads.load(now, 0, load())
    loads.opened(now, "prefill-0", opened(0, lease=lease))
    (action,) = loads.opened(now, "prefill-0", opened(1, lease=lease))
    assert isinstance(action, ToMover)
    assert isinstance(action.message, Move)


CANCEL = ToMover(0, REF, Cancel("0/r"))


# The way that ends well.


def test_a_load_opens_moves_and_is_loaded(loads: Loads) -> None:
    assert loads.load(100.0, 0, load(start=16)) == [
        ToSource(REF, Open("s", "g", source, 0, 20)) for source in SOURCES[0]
    ]
    assert loads.next_deadline() == 160.0
    assert loads.opened(101.0, "prefill-0", opened(1)) == []
    sources = [MoveSource(f"prefill-0/p{source}", {"attention": pack_pages([source])}) for source in (0, 1)]
    assert loads.opened(102.0, "prefill-0", opened(0)) == [
        ToMover(0, REF, Move("0/r", 20, 16, PAGES, sources)),
    ]
    assert loads.moved(103.0, 0, moved()) == [*tells(), engine(Loaded("r", 640, 3.0))]
    assert len(loads) == 0
    assert loads.next_deadline() is None


def test_a_source_that_nobody_reads_is_told_and_not_asked(loads: Loads) -> None:
    assert loads.load(0.0, 1, load()) == [ToSource(REF, Open("s", "g", 2, 1, 20))]
    loads.opened(0.0, "prefill-0", opened(2, 1))
    assert loads.moved(1.0, 1, moved(1)) == [
        ToSource(REF, Done("s", "g", 2, 1)),
        ToSource(REF, Done("s", "g", 3, 1)),
        engine(Loaded("r", 640, 1.0), 1),
    ]


def test_an_empty_load_completes_without_opening(loads: Loads) -> None:
    assert loads.load(0.0, 0, load(start=20)) == [*tells(), engine(Loaded("r", 0, 0.0))]
    assert loads.load(0.0, 1, load(tokens=0)) == [*tells(1), engine(Loaded("r", 0, 0.0), 1)]
    assert len(loads) == 0


def test_ranks_load_the_same_request_apart(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    loads.load(0.0, 1, load())
    assert len(loads) == 2
    (action,) = loads.opened(0.0, "prefill-0", opened(2, 1))
    assert isinstance(action, ToMover)
    assert action.rank == 1
    assert loads.moved(1.0, 1, moved(1))[-1] == engine(Loaded("r", 640, 1.0), 1)
    assert len(loads) == 1


# What is wrong with the question.


def test_a_load_that_is_running_is_not_begun_again(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    text = "request r is already being loaded on rank 0"
    assert loads.load(1.0, 0, load()) == [engine(Failed("r", "DuplicateLoad", text, freed=False))]
    assert loads.next_deadline() == 60.0


def test_two_loads_of_one_source_request_cannot_be_told_apart(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    text = "request s of prefill-0 is already being loaded on rank 0 as r"
    assert loads.load(1.0, 0, load("q")) == [engine(Failed("q", "DuplicateLoad", text, freed=True))]
    assert len(loads) == 1
    assert loads.load(1.0, 0, load("q", ref=msgspec.structs.replace(REF, generation="h")))
    assert loads.load(1.0, 1, load("q"))


def test_a_span_that_ends_before_it_begins(loads: Loads) -> None:
    text = "request r: start 21 is past its 20 tokens"
    assert loads.load(0.0, 0, load(start=21)) == [engine(Failed("r", "BadSpan", text, freed=True))]
    assert len(loads) == 0


# Failures before anything moves: pages are free at once.


@pytest.mark.parametrize(
    "code", ["UnknownRequest", "StaleGeneration", "UnequalSpan", "LeaseExpired", "RequestAborted", "NoEdge"]
)
def test_a_refusal_fails_the_load(loads: Loads, code: str) -> None:
    loads.load(0.0, 0, load())
    loads.opened(0.0, "prefill-0", opened(0))
    failed = engine(Failed("r", code, "why", freed=True))
    assert loads.refused("prefill-0", refused(1, code=code)) == [*tells(), failed]
    assert len(loads) == 0
    # The other source's answers come too late to matter.
    assert loads.refused("prefill-0", refused(0, code=code)) == []
    assert loads.opened(1.0, "prefill-0", opened(1)) == []


def test_a_revocation_before_all_have_opened(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    loads.opened(0.0, "prefill-0", opened(0))
    failed = engine(Failed("r", "LeaseExpired", "the lease ran out", freed=True))
    assert loads.refused("prefill-0", revoked(0)) == [*tells(), failed]


def test_a_lease_that_ran_out_while_others_opened(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    loads.opened(1.0, "prefill-0", opened(0, lease=5.0))
    failed = engine(Failed("r", "LeaseExpired", "the lease ran out before the read began", freed=True))
    assert loads.opened(5.0, "prefill-0", opened(1, lease=30.0)) == [*tells(), failed]
    assert len(loads) == 0


def test_a_lease_is_counted_from_the_question(loads: Loads) -> None:
    # The grant was 10 s on its way: what prefill counted from may be as old as the question.
    loads.load(0.0, 0, load())
    loads.opened(10.0, "prefill-0", opened(0, lease=11.0))
    (action,) = loads.opened(10.5, "prefill-0", opened(1, lease=30.0))
    assert isinstance(action, ToMover)
    failed = loads.moved(11.0, 0, moved())
    assert failed == [
        *tells(),
        engine(Failed("r", "LeaseExpired", "the read ended 0.000 s after the lease", freed=True)),
    ]


def test_answers_that_belong_to_nothing(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    for replica, message in (
        ("prefill-1", opened(0)),
        ("prefill-0", opened(0, rank=1)),
        ("prefill-0", msgspec.structs.replace(opened(0), generation="h")),
        ("prefill-0", msgspec.structs.replace(opened(0), request="q")),
    ):
        assert loads.opened(0.0, replica, message) == []
    assert loads.refused("prefill-1", refused()) == []
    assert loads.refused("prefill-0", msgspec.structs.replace(refused(), generation="h")) == []
    assert loads.moved(0.0, 0, moved(request="q")) == []
    assert loads.moved(0.0, 1, moved(0)) == []
    assert len(loads) == 1


def test_a_grant_of_a_source_that_was_not_asked(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    assert loads.opened(0.0, "prefill-0", opened(3)) == []
    loads.opened(0.0, "prefill-0", opened(0))
    (action,) = loads.opened(0.0, "prefill-0", opened(1))
    assert isinstance(action, ToMover)
    assert isinstance(action.message, Move)
    assert [one.link for one in action.message.sources] == ["prefill-0/p0", "prefill-0/p1"]


# Failures while bytes move: the engine hears at once, and of its pages when nothing is in flight.


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (lambda loads: loads.refused("prefill-0", revoked(1)), "LeaseExpired"),
        (lambda loads: loads.source_gone("prefill-0", range(4), "PeerLost", "why"), "PeerLost"),
        (lambda loads: loads.tick(60.0), "DeadlineExceeded"),
    ],
    ids=["revoked", "peer gone", "deadline"],
)
def test_a_failure_while_moving(loads: Loads, event: Callable[[Loads], list[Any]], code: str) -> None:
    begin_moving(loads)
    actions = event(loads)
    assert [type(action) for action in actions] == [ToMover, ToEngineRank]
    assert actions[0] == CANCEL
    assert (actions[1].message.code, actions[1].message.freed) == (code, False)
    assert len(loads) == 1
    assert loads.next_deadline() is None
    # While it drains nothing else is said, whatever happens.
    for again in (
        loads.refused("prefill-0", revoked(0)),
        loads.source_gone("prefill-0", range(4), "PeerLost", "why"),
        loads.tick(1000.0),
        loads.abort(0, "r"),
        loads.opened(2.0, "prefill-0", opened(0)),
    ):
        assert again == []
    # Not even a move that ended well is reported as loaded any more.
    assert loads.moved(1001.0, 0, moved()) == [*tells(), engine(Freed("r"))]
    assert len(loads) == 0


def test_a_move_that_fails(loads: Loads) -> None:
    begin_moving(loads)
    failed = engine(Failed("r", "TransferFailed", "why", freed=True))
    assert loads.moved(1.0, 0, moved(code="TransferFailed", text="why")) == [*tells(), failed]
    assert len(loads) == 0


@pytest.mark.parametrize(("lease", "seconds"), [(30.0, "2.500"), (32.4, "0.100")])
def test_a_move_that_ends_after_the_lease_is_failed(loads: Loads, lease: float, seconds: str) -> None:
    begin_moving(loads, lease=lease)
    text = f"the read ended {seconds} s after the lease"
    assert loads.moved(32.5, 0, moved()) == [*tells(), engine(Failed("r", "LeaseExpired", text, freed=True))]


def test_the_shortest_lease_counts(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    loads.opened(0.0, "prefill-0", opened(0, lease=5.0))
    loads.opened(0.0, "prefill-0", opened(1, lease=30.0))
    assert loads.moved(4.999, 0, moved())[-1] == engine(Loaded("r", 640, 4.999))


# Deadlines, aborts, and what goes.


def test_deadlines(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    loads.load(10.0, 1, load())
    assert loads.next_deadline() == 60.0
    assert loads.tick(59.9) == []
    text = "after 60 s the load was still opening"
    assert loads.tick(60.0) == [*tells(), engine(Failed("r", "DeadlineExceeded", text, freed=True))]
    assert loads.next_deadline() == 70.0
    loads.opened(65.0, "prefill-0", opened(2, 1, lease=100.0))
    text = "after 60 s the load was still moving"
    assert loads.tick(70.0) == [
        ToMover(1, REF, Cancel("1/r")),
        engine(Failed("r", "DeadlineExceeded", text, freed=False), 1),
    ]


def test_abort_while_opening(loads: Loads) -> None:
    loads.load(0.0, 0, load())
    loads.opened(0.0, "prefill-0", opened(0))
    assert loads.abort(0, "r") == [*tells(), engine(Freed("r"))]
    assert len(loads) == 0


def test_abort_while_moving(loads: Loads) -> None:
    begin_moving(loads)
    assert loads.abort(0, "r") == [CANCEL]
    assert loads.abort(0, "r") == []
    assert loads.moved(1.0, 0, moved(code="Cancelled", text="given up")) == [*tells(), engine(Freed("r"))]


def test_abort_of_what_has_ended_still_answers(loads: Loads) -> None:
    begin_moving(loads)
    loads.moved(1.0, 0, moved())
    assert loads.abort(0, "r") == [engine(Freed("r"))]
    assert loads.abort(1, "never") == [engine(Freed("never"), 1)]


def test_a_peer_that_goes_fails_its_loads_and_no_others(loads: Loads) -> None:
    other = msgspec.structs.replace(REF, replica="prefill-1")
    loads.load(0.0, 0, load())
    loads.load(0.0, 0, load("q", ref=other))
    failed = engine(Failed("r", "PeerLost", "why", freed=True))
    assert loads.source_gone("prefill-0", range(4), "PeerLost", "why") == [*tells(), failed]
    assert len(loads) == 1
    assert loads.source_gone("prefill-2", range(4), "PeerLost", "why") == []


def test_an_agent_of_a_replica_takes_only_loads_of_its_ranks(loads: Loads) -> None:
    """A replica of several pods has several agents, and a dead address of it may be known too."""
    loads.load(0.0, 0, load())
    loads.load(0.0, 1, load())
    assert loads.source_gone("prefill-0", [], "PeerUnreachable", "why") == []
    failed = engine(Failed("r", "PeerLost", "why", freed=True), 1)
    assert loads.source_gone("prefill-0", [2, 3], "PeerLost", "why") == [*tells(1), failed]
    assert len(loads) == 1


def test_an_engine_rank_that_goes(loads: Loads) -> None:
    begin_moving(loads)
    loads.load(0.0, 1, load())
    assert loads.rank_gone(0) == [*tells(), CANCEL]
    assert loads.rank_gone(0) == []
    # Nobody is left to hear of it.
    assert loads.moved(1.0, 0, moved()) == []
    assert loads.rank_gone(1) == tells(1)
    assert len(loads) == 0


def test_names_of_links() -> None:
    assert link_name("prefill-0", 12) == "prefill-0/p12"
