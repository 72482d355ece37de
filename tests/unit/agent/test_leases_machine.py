"""Leases under any order of events: pages are never given back under a reader, and always given back in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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

COMPLETIONS: list[set[int]] = [{0, 1}, {1, 2}, {0}]
RANKS = range(3)
LEASE = 10.0

ranks = st.sampled_from(RANKS)
requests = st.sampled_from(["a", "b"])
readers = st.sampled_from([Reader("d0", 1), Reader("d0", 2), Reader("d1", 3)])
generations = st.sampled_from(["g0", "g1"])
destinations = st.integers(0, 3)


@dataclass
class Life:
    """What a test knows of one hold from the outside."""

    rank: int
    hold: Hold
    expires: float
    open_by: set[tuple[Reader, int]] = field(default_factory=set)
    done: dict[str, set[int]] = field(default_factory=dict)
    aborted: bool = False
    expired: bool = False

    @property
    def complete(self) -> bool:
        return any(done >= COMPLETIONS[self.rank] for done in self.done.values())


Key = tuple[Reader, int, int, str, str]


def key_of(reader: Reader, message: Open | Done | Opened | OpenRefused) -> Key:
    """Who means which pages of which life."""
    return reader, message.source, message.destination, message.request, message.generation


def answers(action: ToReader, reader: Reader, question: Open) -> bool:
    """Whether an action answers a question."""
    message = action.message
    return isinstance(message, Opened | OpenRefused) and key_of(action.reader, message) == key_of(reader, question)


class LeasesMachine(RuleBasedStateMachine):
    """Events come in any order; the answers are compared with what was asked, held and told."""

    @initialize(grace=st.sampled_from([0.0, 1.0]))
    def start(self, grace: float) -> None:
        self.leases = Leases(COMPLETIONS, LEASE, grace)
        self.grace = grace
        self.early: dict[Key, tuple[float, Open | Done]] = {}
        self.now = 0.0
        self.lives: dict[tuple[int, str], Life] = {}
        self.ended: dict[tuple[int, str, str], str] = {}
        self.serving = dict.fromkeys(RANKS, 0)
        self.holds = 0
        self.ends = 0

    # Events.

    @rule(rank=ranks, request=requests, generation=generations, tokens=st.integers(1, 2))
    def hold(self, rank: int, request: str, generation: str, tokens: int) -> None:
        message = Hold(request, generation, tokens, {"t": pack_pages([self.holds])})
        action, *more = self.leases.hold(self.now, rank, message)
        assert isinstance(action, ToEngineRank)
        assert action.rank == rank
        if (rank, request) in self.lives:
            assert isinstance(action.message, Failed)
            assert (action.message.code, action.message.freed) == ("DuplicateHold", False)
            assert not more
        else:
            assert action.message == Held(request, generation, LEASE)
            self.lives[rank, request] = Life(rank, message, self.now + LEASE)
            self.ended.pop((rank, request, generation), None)
            self.holds += 1
            for key in [key for key in self.early if (key[1], key[3]) == (rank, request)]:
                _, waiting = self.early.pop(key)
                if isinstance(waiting, Open):
                    count = 2 if isinstance(more[0], ToMover) else 1
                    self.judge(key[0], waiting, more[:count])
                else:
                    count = self.finish(key[0], waiting)
                    self.check(more[:count], revoked={})
                more = more[count:]
            assert not more

    @rule(
        reader=readers,
        rank=ranks,
        request=requests,
        generation=generations,
        destination=destinations,
        tokens=st.integers(1, 2),
    )
    def open(self, reader: Reader, rank: int, request: str, generation: str, destination: int, tokens: int) -> None:
        message = Open(request, generation, rank, destination, tokens)
        actions = self.leases.open(self.now, reader, message)
        waits = (rank, request) not in self.lives and (rank, request, generation) not in self.ended
        if waits and self.grace:
            assert actions == []
            self.early[key_of(reader, message)] = (self.now + self.grace, message)
        else:
            self.judge(reader, message, actions)

    def judge(self, reader: Reader, message: Open, actions: list[Any]) -> None:
        answer = actions[-1]
        assert isinstance(answer, ToReader)
        assert answers(answer, reader, message)
        rank, destination = message.source, message.destination
        life = self.lives.get((rank, message.request))
        if isinstance(answer.message, OpenRefused):
            assert len(actions) == 1
            assert answer.message.code == self.reason(life, message)
            return
        assert self.reason(life, message) == ""
        assert life is not None
        assert isinstance(answer.message, Opened)
        assert answer.message.pages == life.hold.pages
        assert answer.message.lease == life.expires - self.now > 0
        fresh = (reader, destination) not in life.open_by
        assert actions[:-1] == ([ToMover(rank, Serve(+1))] if fresh else [])
        life.open_by.add((reader, destination))
        self.serving[rank] += fresh

    def reason(self, life: Life | None, message: Open) -> str:
        if life is None:
            return self.ended.get((message.source, message.request, message.generation), "UnknownRequest")
        if life.hold.generation != message.generation:
            return "StaleGeneration"
        if life.aborted:
            return "RequestAborted"
        if life.expired:
            return "RequestExpired"
        if self.now >= life.expires:
            return "LeaseExpired"
        if life.hold.tokens != message.tokens:
            return "UnequalSpan"
        return "" if message.destination in COMPLETIONS[message.source] else "NoEdge"

    @rule(reader=readers, rank=ranks, request=requests, generation=generations, destination=destinations)
    def done(self, reader: Reader, rank: int, request: str, generation: str, destination: int) -> None:
        message = Done(request, generation, rank, destination)
        count = self.finish(reader, message)
        actions = self.leases.done(self.now, reader, message)
        assert len(actions) == count
        self.check(actions, revoked={})

    def finish(self, reader: Reader, message: Done) -> int:
        """Enter a completion into the model; how many actions it must cause."""
        life = self.lives.get((message.source, message.request))
        if life is None:
            if self.grace and (message.source, message.request, message.generation) not in self.ended:
                self.early[key_of(reader, message)] = (self.now + self.grace, message)
            return 0
        if life.hold.generation != message.generation or message.destination not in COMPLETIONS[message.source]:
            return 0
        opener = (reader, message.destination)
        closed = opener in life.open_by
        life.open_by.discard(opener)
        life.done.setdefault(reader.replica, set()).add(message.destination)
        return closed + (not life.open_by and (life.complete or life.aborted or life.expired))

    @rule(rank=ranks, request=requests)
    def abort(self, rank: int, request: str) -> None:
        life = self.lives.get((rank, request))
        revoked = {}
        if life is not None and not life.aborted:
            life.aborted = True
            revoked = {id(life): "RequestAborted"}
        self.check(self.leases.abort(rank, request), revoked)

    @rule(reader=readers)
    def reader_gone(self, reader: Reader) -> None:
        for life in self.lives.values():
            life.open_by = {opener for opener in life.open_by if opener[0] != reader}
        self.early = {key: when for key, when in self.early.items() if key[0] != reader}
        self.check(self.leases.reader_gone(reader), revoked={})

    @rule(rank=ranks)
    def rank_gone(self, rank: int) -> None:
        actions = self.leases.rank_gone(rank)
        gone = [life for life in self.lives.values() if life.rank == rank]
        told = [(action.reader, action.message) for action in actions if isinstance(action, ToReader)]
        assert len(told) == len(actions)
        revoked = [(reader, one.request, one.destination) for reader, one in told if isinstance(one, Revoked)]
        assert sorted(revoked, key=repr) == sorted(
            ((reader, life.hold.request, one) for life in gone for reader, one in life.open_by), key=repr
        )
        # Whoever waited for a hold that cannot come any more hears it too; a completion has nobody to hear it.
        waiting = [key for key, (_, message) in self.early.items() if key[1] == rank and isinstance(message, Open)]
        refused = [key_of(reader, one) for reader, one in told if isinstance(one, OpenRefused)]
        assert sorted(refused, key=repr) == sorted(waiting, key=repr)
        assert all(one.code == "EngineGone" for _, one in told if isinstance(one, Revoked | OpenRefused))
        self.early = {key: early for key, early in self.early.items() if key[1] != rank}
        for life in gone:
            del self.lives[rank, life.hold.request]
            self.ended[rank, life.hold.request, life.hold.generation] = "EngineGone"
            self.ends += 1
        self.serving[rank] = 0

    @rule(seconds=st.sampled_from([0.0, 0.5, 4.0, LEASE]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        revoked = {}
        for life in self.lives.values():
            if not life.aborted and not life.expired and self.now >= life.expires:
                life.expired = True
                revoked[id(life)] = "LeaseExpired"
        actions = self.leases.tick(self.now)
        for key in [key for key, (when, _) in self.early.items() if self.now >= when]:
            _, waiting = self.early.pop(key)
            if isinstance(waiting, Open):
                refusal = next(one for one in actions if isinstance(one, ToReader) and answers(one, key[0], waiting))
                actions.remove(refusal)
                self.judge(key[0], waiting, [refusal])
        self.check(actions, revoked)

    # What must come of it.

    def check(self, actions: list[Any], revoked: dict[int, str]) -> None:
        """Judge actions; openers that the event closed are closed in the model already."""
        told: list[tuple[int, Reader, int, str]] = []
        for action in actions:
            match action:
                case ToMover(rank, Serve(change)):
                    assert change < 0
                    self.serving[rank] += change
                case ToReader(reader, Revoked() as message):
                    life = self.lives[message.source, message.request]
                    assert message.generation == life.hold.generation
                    told.append((id(life), reader, message.destination, message.code))
                case ToEngineRank(rank, Released() as message):
                    life = self.lives.pop((rank, message.request))
                    self.ends += 1
                    assert not life.open_by, "pages are given back while a reader has them open"
                    assert message.generation == life.hold.generation
                    assert message.reason in ("completed", "aborted", "expired")
                    codes = {"completed": "RequestCompleted", "aborted": "RequestAborted", "expired": "LeaseExpired"}
                    self.ended[rank, message.request, message.generation] = codes[message.reason]
                    if message.reason == "completed":
                        assert life.complete
                    else:
                        assert life.aborted if message.reason == "aborted" else life.expired
                        assert not life.complete
                case _:
                    raise AssertionError(f"unexpected {action}")
        wanted = [
            (id(life), reader, destination, revoked[id(life)])
            for life in self.lives.values()
            if id(life) in revoked
            for reader, destination in life.open_by
        ]
        assert len(told) == len(wanted)
        assert set(told) == set(wanted)

    @invariant()
    def nothing_stays_that_could_go(self) -> None:
        for life in self.lives.values():
            assert life.open_by or not (life.complete or life.aborted or life.expired), life
        assert len(self.leases) == len(self.lives)
        assert self.holds == self.ends + len(self.lives), "every hold ends exactly once"

    @invariant()
    def movers_serve_exactly_while_somebody_reads(self) -> None:
        for rank in RANKS:
            assert self.serving[rank] == sum(len(life.open_by) for life in self.lives.values() if life.rank == rank)

    @invariant()
    def the_timer_wakes_for_the_first_that_can_expire(self) -> None:
        waiting = [life.expires for life in self.lives.values() if not life.aborted and not life.expired]
        waiting += [when for when, _ in self.early.values()]
        assert self.leases.next_deadline() == (min(waiting) if waiting else None)

    def teardown(self) -> None:
        if not hasattr(self, "leases"):
            return
        for reader in (Reader("d0", 1), Reader("d0", 2), Reader("d1", 3)):
            self.reader_gone(reader)
        self.now += LEASE
        self.tick()
        assert len(self.leases) == 0
        assert self.leases.next_deadline() is None
        assert self.serving == dict.fromkeys(RANKS, 0)
        assert self.holds == self.ends


TestLeases = LeasesMachine.TestCase
