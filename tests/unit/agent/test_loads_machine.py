"""Loads under any order of events, against peers and a mover that answer as the real ones do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disagg_agent.loads import Action, Loads, ToEngineRank, ToMover, ToSource
from disagg_agent.messages import (
    Cancel,
    Done,
    Failed,
    Freed,
    Load,
    Loaded,
    Move,
    Moved,
    Open,
    Opened,
    OpenRefused,
    Revoked,
    SourceRef,
    pack_pages,
)

SOURCES = [[0, 1], [1]]
TELLS = [[0, 1], [1, 2]]
SECONDS = 20.0

ranks = st.integers(0, 1)
names = st.sampled_from(["a", "b"])
replicas = st.sampled_from(["p0", "p1"])


@dataclass
class Life:
    """What a test knows of one load from the outside."""

    rank: int
    load: Load
    asked: float
    granted: dict[int, float] = field(default_factory=dict)
    answers: list[Loaded | Failed] = field(default_factory=list)
    freed: int = 0
    moving: bool = False
    moves: int = 0
    told: set[int] = field(default_factory=set)
    aborted: bool = False
    ruined: bool = False
    orphaned: bool = False

    @property
    def over(self) -> bool:
        return self.orphaned or self.freed > 0


class LoadsMachine(RuleBasedStateMachine):
    """Questions to sources stay open until a rule answers them; a move ends once, when a rule says so."""

    @initialize()
    def start(self) -> None:
        self.loads = Loads(SOURCES, TELLS, SECONDS)
        self.now = 0.0
        self.lives: list[Life] = []
        self.questions: list[tuple[str, Open]] = []
        self.grants: list[tuple[str, Opened]] = []

    def running(self, rank: int, name: str) -> Life | None:
        return next((one for one in self.lives if one.rank == rank and one.load.request == name and not one.over), None)

    # The engine.

    @rule(rank=ranks, name=names, replica=replicas, start=st.sampled_from([0, 16, 32, 48]))
    def load(self, rank: int, name: str, replica: str, start: int) -> None:
        # A life of its own on prefill for each: two loads of one cannot be told apart, and are refused.
        ref = SourceRef(replica, f"s{len(self.lives)}", "g", "h", 1)
        message = Load(name, ref, 32, start, {"t": pack_pages([1])})
        before = self.running(rank, name)
        if before is not None or start > 32:
            (action,) = self.loads.load(self.now, rank, message)
            assert isinstance(action, ToEngineRank)
            assert isinstance(action.message, Failed)
            assert (action.message.code, action.message.freed) == (
                ("BadSpan", True) if before is None else ("DuplicateLoad", False)
            )
            return
        self.lives.append(Life(rank, message, self.now))
        self.check(self.loads.load(self.now, rank, message))
        assert len([one for _, one in self.questions if one.request == ref.request]) == (
            len(SOURCES[rank]) if start < 32 else 0
        )

    @rule(rank=ranks, name=names)
    def abort(self, rank: int, name: str) -> None:
        life = self.running(rank, name)
        if life is None:
            assert self.loads.abort(rank, name) == [ToEngineRank(rank, Freed(name))]
        else:
            life.aborted = life.ruined = True
            self.check(self.loads.abort(rank, name))

    @rule(rank=ranks)
    def rank_gone(self, rank: int) -> None:
        for life in self.lives:
            if life.rank == rank and not life.over:
                life.orphaned = True
        self.check(self.loads.rank_gone(rank))
        for life in self.lives:
            if life.rank == rank:
                # Its mover went with it: no `Moved` will come.
                life.moving = False

    # Prefill.

    @precondition(lambda self: self.questions)
    @rule(data=st.data(), lease=st.sampled_from([0.5, 5.0, 50.0]), keep=st.booleans())
    def grant(self, data: st.DataObject, lease: float, keep: bool) -> None:
        replica, question = data.draw(st.sampled_from(self.questions))
        if not keep:
            self.questions.remove((replica, question))
        answer = Opened(question.request, question.generation, question.source, question.destination, {"t": b""}, lease)
        life = self.life_of(replica, question)
        if not life.over and not life.moves:
            life.granted[question.source] = min(life.granted.get(question.source, 1e9), life.asked + lease)
        self.grants.append((replica, answer))
        self.check(self.loads.opened(self.now, replica, answer))

    @precondition(lambda self: self.questions)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        replica, question = data.draw(st.sampled_from(self.questions))
        self.questions.remove((replica, question))
        self.life_of(replica, question).ruined = True
        answer = OpenRefused(
            question.request, question.generation, question.source, question.destination, "UnequalSpan", "why"
        )
        self.check(self.loads.refused(replica, answer))

    @precondition(lambda self: self.grants)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        replica, grant = data.draw(st.sampled_from(self.grants))
        self.life_of(replica, grant).ruined = True
        message = Revoked(grant.request, grant.generation, grant.source, grant.destination, "LeaseExpired", "why")
        self.check(self.loads.refused(replica, message))

    @rule(replica=replicas)
    def source_gone(self, replica: str) -> None:
        for life in self.lives:
            if life.load.source.replica == replica and not life.over:
                life.ruined = True
        self.check(self.loads.source_gone(replica, range(3), "PeerLost", "why"))
        self.questions = [one for one in self.questions if one[0] != replica]
        self.grants = [one for one in self.grants if one[0] != replica]

    # The mover and the clock.

    @precondition(lambda self: any(one.moving for one in self.lives))
    @rule(data=st.data(), code=st.sampled_from(["", "", "TransferFailed"]))
    def moved(self, data: st.DataObject, code: str) -> None:
        life = data.draw(st.sampled_from([one for one in self.lives if one.moving]))
        life.moving = False
        intact = not life.ruined and code == "" and self.now < min(life.granted.values())
        self.check(self.loads.moved(self.now, life.rank, Moved(f"{life.rank}/{life.load.request}", 5, 0.1, code, "")))
        assert life.over
        assert (isinstance(life.answers[-1], Loaded) if life.answers else False) == intact

    @rule(seconds=st.sampled_from([0.0, 0.4, 3.0, SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        for life in self.lives:
            if not life.over and self.now >= life.asked + SECONDS:
                life.ruined = True
        self.check(self.loads.tick(self.now))

    # What must come of it.

    def life_of(self, replica: str, message: Open | Opened) -> Life:
        return next(
            one
            for one in self.lives
            if (one.load.source.replica, one.load.source.request) == (replica, message.request)
        )

    def check(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case ToSource(ref, Open() as message):
                    life = self.life_of(ref.replica, message)
                    assert message == Open(ref.request, ref.generation, message.source, life.rank, life.load.tokens)
                    assert message.source in SOURCES[life.rank]
                    self.questions.append((ref.replica, message))
                case ToSource(ref, Done() as message):
                    life = next(one for one in self.lives if one.load.source == ref)
                    assert message.source in TELLS[life.rank]
                    assert message.source not in life.told, "a source is told once"
                    assert not life.moving or life.orphaned, "prefill may reuse its pages while we still read them"
                    life.told.add(message.source)
                case ToMover(rank, ref, Move() as message):
                    life = next(one for one in self.lives if one.load.source == ref)
                    assert (rank, message.id) == (life.rank, f"{rank}/{life.load.request}")
                    assert set(life.granted) == set(SOURCES[rank])
                    assert not life.ruined
                    assert self.now < min(life.granted.values())
                    life.moving, life.moves = True, life.moves + 1
                    assert life.moves == 1
                case ToMover(rank, ref, Cancel()):
                    life = next(one for one in self.lives if one.load.source == ref)
                    assert life.moving
                    assert life.rank == rank
                case ToEngineRank(rank, message):
                    self.hear(rank, message)
                case _:
                    raise AssertionError(f"unexpected {action}")

    def hear(self, rank: int, message: Loaded | Failed | Freed) -> None:
        life = self.running(rank, message.request)
        assert life is not None, f"{message} after the end"
        if isinstance(message, Loaded | Failed):
            assert not life.answers, "a second answer"
            life.answers.append(message)
        if not isinstance(message, Failed) or message.freed:
            assert not life.moving, "late bytes may still land"
            life.freed += 1
        if isinstance(message, Loaded):
            assert not life.ruined
            assert life.moves == (life.load.start < life.load.tokens)

    @invariant()
    def everything_is_told_once(self) -> None:
        for life in self.lives:
            assert life.freed <= 1
            if life.over:
                assert life.told == set(TELLS[life.rank])
                assert life.orphaned or life.aborted or len(life.answers) == 1
            else:
                assert not life.told
        assert len(self.loads) == len([one for one in self.lives if not one.over])

    @invariant()
    def a_ruined_load_has_failed_by_now(self) -> None:
        for life in self.lives:
            if life.ruined and not life.over:
                assert life.moving, "nothing is in flight, and yet the pages are kept"
                assert life.answers or life.aborted

    @invariant()
    def the_timer_wakes_for_the_first_deadline(self) -> None:
        waiting = [one.asked + SECONDS for one in self.lives if not one.over and not one.ruined]
        assert self.loads.next_deadline() == (min(waiting) if waiting else None)

    def teardown(self) -> None:
        if not hasattr(self, "loads"):
            return
        self.now += SECONDS
        self.tick()
        for life in [one for one in self.lives if one.moving]:
            life.moving = False
            self.check(
                self.loads.moved(self.now, life.rank, Moved(f"{life.rank}/{life.load.request}", 0, 0.0, "X", ""))
            )
        assert len(self.loads) == 0
        assert self.loads.next_deadline() is None
        for life in self.lives:
            assert life.orphaned or life.freed == 1


TestLoads = LoadsMachine.TestCase
