"""Prefill's side of a request: every transition, with the exact actions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from disagg_agent.leases import Leases, Reader, ToEngineRank, ToMover, ToReader
from disagg_agent.messages import (
    Done,
    Failed,
    Held,
    Hold,
    Open,
    Opened,
    OpenRefused,
    Released,
    Revoked,
    Serve,
    pack_pages,
)

COMPLETIONS = [[0, 1], [2, 3], [1]]
"""Prefill ranks 0 and 1 are read by two decode ranks each; nobody reads rank 2, which decode rank 1 sets free."""

D, E = Reader("decode-0", 1), Reader("decode-1", 2)
PAGES = {"attention": pack_pages([4, 2])}


@pytest.fixture
def leases() -> Leases:
    return Leases(COMPLETIONS, 30.0)


def hold(request: str = "r", generation: str = "g", tokens: int = 20) -> Hold:
    return Hold(request, generation, tokens, PAGES)


def open_(destination: int = 0, request: str = "r", generation: str = "g", source: int = 0, tokens: int = 20) -> Open:
    return Open(request, generation, source, destination, tokens)


def done(destination: int = 0, request: str = "r", generation: str = "g", source: int = 0) -> Done:
    return Done(request, generation, source, destination)


def granted(reader: Reader, destination: int, lease: float, source: int = 0) -> ToReader:
    return ToReader(reader, Opened("r", "g", source, destination, PAGES, lease))


def refused(reader: Reader, message: Open, code: str, text: str) -> ToReader:
    answer = OpenRefused(message.request, message.generation, message.source, message.destination, code, text)
    return ToReader(reader, answer)


def revoked(reader: Reader, destination: int, code: str, text: str) -> ToReader:
    return ToReader(reader, Revoked("r", "g", 0, destination, code, text))


def released(reason: str, rank: int = 0, request: str = "r") -> ToEngineRank:
    return ToEngineRank(rank, Released(request, "g", reason))


# Holding.


def test_a_hold_is_granted_for_the_length_of_a_lease(leases: Leases) -> None:
    assert leases.hold(100.0, 1, hold()) == [ToEngineRank(1, Held("r", "g", 30.0))]
    assert len(leases) == 1
    assert leases.next_deadline() == 130.0


def test_a_request_is_held_once_on_a_rank(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    (action,) = leases.hold(1.0, 0, hold(generation="h"))
    assert action == ToEngineRank(0, Failed("r", "DuplicateHold", "request r is already held on rank 0", freed=False))
    # The first life goes on, and other ranks are other holds.
    assert leases.hold(1.0, 1, hold()) == [ToEngineRank(1, Held("r", "g", 30.0))]
    assert leases.open(2.0, D, open_()) == [ToMover(0, Serve(+1)), granted(D, 0, 28.0)]


def test_a_name_can_be_used_again_in_another_life(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    assert leases.abort(0, "r") == [released("aborted")]
    leases.hold(1.0, 0, hold(generation="h"))
    message = open_()
    text = "request r is held as generation h, not g"
    assert leases.open(2.0, D, message) == [refused(D, message, "StaleGeneration", text)]
    assert leases.done(1.0, D, done()) == []
    assert leases.open(2.0, D, open_(generation="h"))[0] == ToMover(0, Serve(+1))


# Opening.


def test_an_open_hands_out_pages_and_what_is_left_of_the_lease(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    assert leases.open(10.0, D, open_(0)) == [ToMover(0, Serve(+1)), granted(D, 0, 20.0)]
    assert leases.open(29.5, D, open_(1)) == [ToMover(0, Serve(+1)), granted(D, 1, 0.5)]
    assert leases.open(29.5, E, open_(0)) == [ToMover(0, Serve(+1)), granted(E, 0, 0.5)]


def test_opening_twice_answers_twice_and_serves_once(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_())
    assert leases.open(5.0, D, open_()) == [granted(D, 0, 25.0)]
    assert leases.done(1.0, D, done()) == [ToMover(0, Serve(-1))]


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (open_(request="q"), "UnknownRequest", "request q is not held on prefill rank 0"),
        (open_(source=1, destination=2), "UnknownRequest", "request r is not held on prefill rank 1"),
        (open_(source=77), "UnknownRequest", "request r is not held on prefill rank 77"),
        (open_(generation="old"), "StaleGeneration", "request r is held as generation g, not old"),
        (open_(tokens=21), "UnequalSpan", "request r: decode names 21 tokens, prefill holds 20"),
        (open_(tokens=0), "UnequalSpan", "request r: decode names 0 tokens, prefill holds 20"),
        (open_(2), "NoEdge", "decode rank 2 reads nothing from prefill rank 0 in this plan"),
        (open_(65536), "NoEdge", "decode rank 65536 reads nothing from prefill rank 0 in this plan"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_an_open_is_refused_by_name(leases: Leases, message: Open, code: str, text: str) -> None:
    leases.hold(0.0, 0, hold())
    assert leases.open(1.0, D, message) == [refused(D, message, code, text)]
    # Nothing was opened: the lease ends as if nobody had asked.
    assert leases.tick(30.0) == [released("expired")]


def test_an_open_at_the_end_of_the_lease_is_refused_before_any_tick(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    message = open_()
    assert leases.open(30.0, D, message) == [
        refused(D, message, "LeaseExpired", "the lease of request r ended 0.000 s ago")
    ]
    assert leases.open(31.5, D, message) == [
        refused(D, message, "LeaseExpired", "the lease of request r ended 1.500 s ago")
    ]


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (lambda leases: leases.abort(0, "r"), "RequestAborted", "request r is aborted on prefill"),
        (lambda leases: leases.tick(30.0), "RequestExpired", "request r is expired on prefill"),
    ],
    ids=["aborted", "expired"],
)
def test_an_open_of_a_hold_that_waits_for_its_readers_is_refused(
    leases: Leases, end: Callable[[Leases], object], code: str, text: str
) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_(0))
    end(leases)
    message = open_(1)
    assert leases.open(1.0, E, message) == [refused(E, message, code, text)]
    # Not even its reader can open it again.
    assert leases.open(1.0, D, open_(0)) == [refused(D, open_(0), code, text)]


# Completion.


def test_a_hold_ends_when_every_expected_rank_is_done(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_(0))
    leases.open(0.0, D, open_(1))
    assert leases.done(1.0, D, done(0)) == [ToMover(0, Serve(-1))]
    assert leases.done(1.0, D, done(1)) == [ToMover(0, Serve(-1)), released("completed")]
    assert len(leases) == 0
    assert leases.next_deadline() is None


def test_an_empty_load_completes_without_opening(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    assert leases.done(1.0, D, done(0)) == []
    assert leases.done(1.0, D, done(1)) == [released("completed")]


def test_a_source_that_nobody_reads_is_released_by_its_one_teller(leases: Leases) -> None:
    leases.hold(0.0, 2, hold())
    assert leases.done(1.0, D, done(0, source=2)) == []
    assert leases.done(1.0, D, done(1, source=2)) == [released("completed", rank=2)]


def test_a_duplicate_completion_counts_once(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_(0))
    assert leases.done(1.0, D, done(0)) == [ToMover(0, Serve(-1))]
    assert leases.done(1.0, D, done(0)) == []
    assert leases.done(1.0, D, done(0)) == []
    assert len(leases) == 1
    assert leases.done(1.0, D, done(1)) == [released("completed")]
    assert leases.done(1.0, D, done(1)) == []


def test_completions_of_two_replicas_do_not_add_up(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    assert leases.done(1.0, D, done(0)) == []
    assert leases.done(1.0, E, done(1)) == []
    assert len(leases) == 1
    assert leases.done(1.0, E, done(0)) == [released("completed")]


def test_completions_of_the_agents_of_one_replica_add_up(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    assert leases.done(1.0, Reader("decode-0", 1), done(0)) == []
    assert leases.done(1.0, Reader("decode-0", 2), done(1)) == [released("completed")]


def test_another_replica_that_still_reads_keeps_the_pages(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, E, open_(0))
    assert leases.done(1.0, D, done(0)) == []
    assert leases.done(1.0, D, done(1)) == []
    assert leases.done(1.0, E, done(0)) == [ToMover(0, Serve(-1)), released("completed")]


@pytest.mark.parametrize(
    "message",
    [done(request="q"), done(generation="old"), done(2), done(source=1, destination=2), done(source=77)],
    ids=["unknown request", "stale generation", "no edge", "other rank", "no rank"],
)
def test_a_completion_that_means_nothing_changes_nothing(leases: Leases, message: Done) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_(0))
    assert leases.done(1.0, D, message) == []
    assert leases.done(1.0, D, done(1)) == []
    assert leases.done(1.0, D, done(0)) == [ToMover(0, Serve(-1)), released("completed")]


def test_a_completion_closes_only_what_its_own_connection_opened(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_(0))
    again = Reader("decode-0", 9)
    assert leases.done(1.0, again, done(0)) == []
    assert leases.done(1.0, again, done(1)) == []
    assert leases.done(1.0, D, done(0)) == [ToMover(0, Serve(-1)), released("completed")]


# Aborting.


def test_abort_releases_at_once(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    assert leases.abort(0, "r") == [released("aborted")]
    assert leases.abort(0, "r") == []
    assert leases.abort(0, "unknown") == []
    assert leases.abort(1, "r") == []


def test_abort_tells_readers_and_waits_for_them(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, E, open_(1))
    leases.open(0.0, D, open_(1))
    leases.open(0.0, D, open_(0))
    text = "prefill aborted the request"
    assert leases.abort(0, "r") == [
        revoked(reader, rank, "RequestAborted", text) for reader, rank in ((D, 0), (D, 1), (E, 1))
    ]
    assert leases.abort(0, "r") == []
    assert leases.tick(1000.0) == []
    assert leases.next_deadline() is None
    assert leases.done(1.0, D, done(1)) == [ToMover(0, Serve(-1))]
    assert leases.done(1.0, E, done(1)) == [ToMover(0, Serve(-1))]
    assert leases.done(1.0, D, done(0)) == [ToMover(0, Serve(-1)), released("completed")]


def test_an_abort_after_which_not_everybody_completes(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_(0))
    leases.abort(0, "r")
    assert leases.done(1.0, D, done(0)) == [ToMover(0, Serve(-1)), released("aborted")]


# Readers and ranks that go.


def test_a_reader_that_goes_closes_what_it_had_open(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.hold(0.0, 1, hold())
    leases.open(0.0, D, open_(0))
    leases.open(0.0, D, open_(1))
    leases.open(0.0, D, open_(2, source=1))
    leases.open(0.0, E, open_(0))
    assert leases.reader_gone(D) == [ToMover(0, Serve(-2)), ToMover(1, Serve(-1))]
    # It reads no more, but it has not completed either: another may still come for the pages.
    assert len(leases) == 2
    assert leases.reader_gone(D) == []
    assert leases.reader_gone(E) == [ToMover(0, Serve(-1))]
    assert leases.tick(30.0) == [released("expired"), released("expired", rank=1)]


@pytest.mark.parametrize("reason", ["aborted", "expired"])
def test_the_last_reader_that_goes_frees_what_has_ended(leases: Leases, reason: str) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_(0))
    leases.open(0.0, E, open_(0))
    if reason == "aborted":
        leases.abort(0, "r")
    else:
        leases.tick(30.0)
    assert leases.reader_gone(D) == [ToMover(0, Serve(-1))]
    assert leases.reader_gone(E) == [ToMover(0, Serve(-1)), released(reason)]


def test_a_completion_survives_its_reader(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.done(1.0, D, done(0))
    leases.reader_gone(D)
    assert leases.done(1.0, Reader("decode-0", 8), done(1)) == [released("completed")]


def test_a_rank_that_goes_ends_its_holds_and_no_others(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.hold(0.0, 0, hold("s"))
    leases.hold(0.0, 1, hold())
    leases.open(0.0, D, open_(0))
    text = "the engine of prefill rank 0 is gone"
    assert leases.rank_gone(0) == [revoked(D, 0, "EngineGone", text)]
    assert len(leases) == 1
    assert leases.rank_gone(0) == []
    # What was open died with the rank: nothing is counted down on the mover that comes next.
    assert leases.done(1.0, D, done(0)) == []
    assert leases.reader_gone(D) == []
    leases.hold(1.0, 0, hold(generation="h"))
    assert leases.open(1.0, D, open_(generation="h"))[0] == ToMover(0, Serve(+1))


# Expiry.


def test_expiry_looks_at_every_hold_not_at_the_oldest_entry(leases: Leases) -> None:
    # A was entered first and lasts until 480; B was entered later and lasts until 30.
    leases.hold(450.0, 0, hold("A"))
    leases.hold(0.0, 0, hold("B"))
    assert leases.next_deadline() == 30.0
    assert leases.tick(29.999) == []
    assert leases.tick(31.0) == [released("expired", request="B")]
    assert leases.next_deadline() == 480.0
    assert leases.tick(479.0) == []
    assert leases.tick(480.0) == [released("expired", request="A")]


def test_expiry_tells_readers_and_waits_for_them(leases: Leases) -> None:
    leases.hold(0.0, 0, hold())
    leases.open(0.0, D, open_(1))
    assert leases.tick(30.0) == [revoked(D, 1, "LeaseExpired", "the lease ran out")]
    assert leases.tick(31.0) == []
    assert leases.next_deadline() is None
    assert leases.abort(0, "r") == [revoked(D, 1, "RequestAborted", "prefill aborted the request")]
    assert leases.done(1.0, D, done(1)) == [ToMover(0, Serve(-1)), released("aborted")]


def test_one_tick_ends_all_that_is_over(leases: Leases) -> None:
    for number in range(5):
        leases.hold(float(number), number % 2, hold(f"r{number}"))
    assert leases.tick(33.0) == [released("expired", number % 2, f"r{number}") for number in range(4)]
    assert len(leases) == 1


# Decode may be faster than prefill's own workers.


@pytest.fixture
def patient() -> Leases:
    return Leases(COMPLETIONS, 30.0, grace=2.0)


def test_an_open_waits_for_its_hold(patient: Leases) -> None:
    assert patient.open(0.0, D, open_(0)) == []
    assert patient.open(0.5, E, open_(1)) == []
    assert patient.open(0.5, D, open_(2, source=1)) == []
    assert patient.next_deadline() == 2.0
    assert patient.hold(1.0, 0, hold()) == [
        ToEngineRank(0, Held("r", "g", 30.0)),
        ToMover(0, Serve(+1)),
        granted(D, 0, 30.0),
        ToMover(0, Serve(+1)),
        granted(E, 1, 30.0),
    ]
    # Answered once; the one that asked another rank still waits for that.
    assert patient.tick(2.49) == []
    late = open_(2, source=1)
    assert patient.tick(2.5) == [refused(D, late, "UnknownRequest", "request r is not held on prefill rank 1")]
    assert patient.next_deadline() == 31.0


def test_an_open_that_waits_is_judged_by_the_hold_that_comes(patient: Leases) -> None:
    stale, long = open_(0, generation="old"), open_(1, tokens=21)
    patient.open(0.0, D, stale)
    patient.open(0.0, D, long)
    assert patient.hold(1.0, 0, hold()) == [
        ToEngineRank(0, Held("r", "g", 30.0)),
        refused(D, stale, "StaleGeneration", "request r is held as generation g, not old"),
        refused(D, long, "UnequalSpan", "request r: decode names 21 tokens, prefill holds 20"),
    ]


def test_an_open_that_was_given_up_does_not_come_back(patient: Leases) -> None:
    patient.open(0.0, D, open_(0))
    patient.open(0.0, D, open_(1))
    patient.open(0.0, E, open_(0))
    assert patient.done(0.5, D, done(0)) == []
    assert patient.reader_gone(E) == []
    assert patient.hold(1.0, 0, hold()) == [
        ToEngineRank(0, Held("r", "g", 30.0)),
        ToMover(0, Serve(+1)),
        granted(D, 1, 30.0),
    ]
    # The one that gave up counts as done with the pages all the same.
    assert patient.done(1.0, D, done(1)) == [ToMover(0, Serve(-1)), released("completed")]


def test_completions_that_come_before_the_hold_end_it(patient: Leases) -> None:
    """A decode replica that has everything cached is done before prefill's workers have begun."""
    assert patient.done(0.0, D, done(0)) == []
    assert patient.done(0.0, D, done(1, generation="old")) == []
    assert patient.done(0.5, D, done(1)) == []
    assert patient.hold(1.0, 0, hold()) == [ToEngineRank(0, Held("r", "g", 30.0)), released("completed")]
    assert len(patient) == 0


def test_a_completion_for_a_hold_that_never_comes_is_forgotten(patient: Leases) -> None:
    patient.done(0.0, D, done(0))
    patient.done(0.0, D, done(1))
    assert patient.next_deadline() == 2.0
    assert patient.tick(2.0) == []
    assert patient.next_deadline() is None
    assert patient.hold(3.0, 0, hold()) == [ToEngineRank(0, Held("r", "g", 30.0))]


def test_opens_of_two_lives_wait_apart(patient: Leases) -> None:
    old, new = open_(0, generation="old"), open_(0)
    patient.open(0.0, D, old)
    patient.open(0.0, D, new)
    patient.done(0.0, D, done(0, generation="older"))
    assert patient.hold(1.0, 0, hold()) == [
        ToEngineRank(0, Held("r", "g", 30.0)),
        refused(D, old, "StaleGeneration", "request r is held as generation g, not old"),
        ToMover(0, Serve(+1)),
        granted(D, 0, 30.0),
    ]


def test_a_request_that_is_held_in_another_life_is_not_waited_for(patient: Leases) -> None:
    patient.hold(0.0, 0, hold())
    message = open_(generation="h")
    text = "request r is held as generation g, not h"
    assert patient.open(0.0, D, message) == [refused(D, message, "StaleGeneration", text)]
