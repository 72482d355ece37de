"""Decode's side of a request, as a pure state machine: events in, actions out, the clock is an argument.

    opening --all sources opened--> moving --moved, in time--> loaded
       |                              |
       +--refused, aborted, late------+--revoked, peer gone, aborted, late--> draining --nothing in flight--> freed

The engine hears of a failure at once, and of its pages only when no late byte can land in them. A load is reported
as loaded only if every byte came while every lease was alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
    Pages,
    Revoked,
    SourceRef,
)


@dataclass(frozen=True)
class ToEngineRank:
    """Tell the engine rank that asked for the load."""

    rank: int
    message: Loaded | Failed | Freed


@dataclass(frozen=True)
class ToSource:
    """Tell the agent that holds a source rank of a prefill replica."""

    ref: SourceRef
    message: Open | Done


@dataclass(frozen=True)
class ToMover:
    """Tell the mover of a decode rank; `ref` says which replica its links belong to."""

    rank: int
    ref: SourceRef
    message: Move | Cancel


Action = ToEngineRank | ToSource | ToMover
State = Literal["opening", "moving", "draining"]


@dataclass
class _Loading:
    rank: int
    load: Load
    asked: float
    deadline: float
    state: State = "opening"
    lease_until: float = float("inf")
    opened: dict[int, Pages] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.rank}/{self.load.request}"


class Loads:
    """All loads of one decode pod.

    Args:
        sources: prefill ranks that each decode rank reads.
        tells: prefill ranks that wait for each decode rank's completion (readers' sources and unread ones).
        seconds: deadline of a load, from its request to its last byte.
    """

    def __init__(self, sources: Sequence[Sequence[int]], tells: Sequence[Sequence[int]], seconds: float) -> None:
        self._sources = sources
        self._tells = tells
        self._seconds = seconds
        self._loads: dict[tuple[int, str], _Loading] = {}

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, now: float, rank: int, message: Load) -> list[Action]:
        """An engine rank asks for a request's positions `[start, tokens)`."""
        if (rank, message.request) in self._loads:
            text = f"request {message.request} is already being loaded on rank {rank}"
            return [ToEngineRank(rank, Failed(message.request, "DuplicateLoad", text, freed=False))]
        ref = message.source
        other = self._find(ref.replica, rank, ref.request, ref.generation)
        if other is not None:
            # Answers name the source's request: they could not say which of the two they mean.
            text = (
                f"request {ref.request} of {ref.replica} is already being loaded on rank {rank} as {other.load.request}"
            )
            return [ToEngineRank(rank, Failed(message.request, "DuplicateLoad", text, freed=True))]
        if message.start > message.tokens:
            text = f"request {message.request}: start {message.start} is past its {message.tokens} tokens"
            return [ToEngineRank(rank, Failed(message.request, "BadSpan", text, freed=True))]
        loading = _Loading(rank, message, now, now + self._seconds)
        if message.start == message.tokens:
            # All cached: nothing moves, but prefill still waits to hear of it.
            return [*self._tell_done(loading), ToEngineRank(rank, Loaded(message.request, 0, 0.0))]
        self._loads[rank, message.request] = loading
        return [
            ToSource(ref, Open(ref.request, ref.generation, source, rank, message.tokens))
            for source in self._sources[rank]
        ]

    def opened(self, now: float, replica: str, message: Opened) -> list[Action]:
        """A source granted its pages, and says how long its lease still lasts.

        The lease is counted from when the engine asked, which is before prefill counted it: clocks need not agree.
        """
        loading = self._find(replica, message.destination, message.request, message.generation)
        if loading is None or loading.state != "opening" or message.source not in self._sources[loading.rank]:
            # Given up meanwhile: `Done` is behind the question already, and the grant pins nothing.
            return []
        loading.opened[message.source] = message.pages
        loading.lease_until = min(loading.lease_until, loading.asked + message.lease)
        if set(loading.opened) != set(self._sources[loading.rank]):
            return []
        if now >= loading.lease_until:
            return self._fail(loading, "LeaseExpired", "the lease ran out before the read began")
        loading.state = "moving"
        load = loading.load
        sources = [
            MoveSource(link_name(load.source.replica, source), loading.opened[source])
            for source in self._sources[loading.rank]
        ]
        return [ToMover(loading.rank, load.source, Move(loading.id, load.tokens, load.start, load.pages, sources))]

    def refused(self, replica: str, message: OpenRefused | Revoked) -> list[Action]:
        """A source refuses the request, or takes back what it granted."""
        loading = self._find(replica, message.destination, message.request, message.generation)
        return [] if loading is None else self._fail(loading, message.code, message.message)

    def moved(self, now: float, rank: int, message: Moved) -> list[Action]:
        """The mover has ended a move; nothing of it is in flight any more."""
        loading = next((one for one in self._loads.values() if one.rank == rank and one.id == message.id), None)
        if loading is None:
            return []
        del self._loads[rank, loading.load.request]
        request = loading.load.request
        done = self._tell_done(loading)
        if loading.state == "draining":
            return [*done, ToEngineRank(rank, Freed(request))]
        if message.code:
            return [*done, ToEngineRank(rank, Failed(request, message.code, message.message, freed=True))]
        if now >= loading.lease_until:
            text = f"the read ended {now - loading.lease_until:.3f} s after the lease"
            return [*done, ToEngineRank(rank, Failed(request, "LeaseExpired", text, freed=True))]
        return [*done, ToEngineRank(rank, Loaded(request, message.bytes, now - loading.asked))]

    def abort(self, rank: int, request: str) -> list[Action]:
        """The engine gives the request up; `Freed` follows when its pages are safe."""
        loading = self._loads.get((rank, request))
        if loading is None:
            return [ToEngineRank(rank, Freed(request))]
        if loading.state == "draining":
            return []
        if loading.state == "opening":
            del self._loads[rank, request]
            return [*self._tell_done(loading), ToEngineRank(rank, Freed(request))]
        loading.state = "draining"
        return [ToMover(rank, loading.load.source, Cancel(loading.id))]

    def source_gone(self, replica: str, ranks: Iterable[int], code: str, text: str) -> list[Action]:
        """The connection to the agent of some prefill ranks ended: no load that reads from them can be trusted."""
        gone = set(ranks)
        actions: list[Action] = []
        for loading in [one for one in self._loads.values() if one.load.source.replica == replica]:
            if gone & set(self._sources[loading.rank]):
                actions += self._fail(loading, code, text)
        return actions

    def rank_gone(self, rank: int) -> list[Action]:
        """Our engine rank is gone: prefill need not hold for it."""
        actions: list[Action] = []
        for loading in [one for one in self._loads.values() if one.rank == rank]:
            del self._loads[rank, loading.load.request]
            actions += self._tell_done(loading)
            if loading.state == "moving":
                actions.append(ToMover(rank, loading.load.source, Cancel(loading.id)))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Fail every load whose deadline has passed."""
        actions: list[Action] = []
        for loading in [one for one in self._loads.values() if one.state != "draining" and now >= one.deadline]:
            waited = f"after {self._seconds:g} s the load was still {loading.state}"
            actions += self._fail(loading, "DeadlineExceeded", waited)
        return actions

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        return min((one.deadline for one in self._loads.values() if one.state != "draining"), default=None)

    def _find(self, replica: str, rank: int, request: str, generation: str) -> _Loading | None:
        for loading in self._loads.values():
            ref = loading.load.source
            if (loading.rank, ref.replica, ref.request, ref.generation) == (rank, replica, request, generation):
                return loading
        return None

    def _fail(self, loading: _Loading, code: str, text: str) -> list[Action]:
        request = loading.load.request
        if loading.state == "draining":
            return []
        if loading.state == "opening":
            del self._loads[loading.rank, request]
            return [
                *self._tell_done(loading),
                ToEngineRank(loading.rank, Failed(request, code, text, freed=True)),
            ]
        loading.state = "draining"
        return [
            ToMover(loading.rank, loading.load.source, Cancel(loading.id)),
            ToEngineRank(loading.rank, Failed(request, code, text, freed=False)),
        ]

    def _tell_done(self, loading: _Loading) -> list[Action]:
        ref = loading.load.source
        return [
            ToSource(ref, Done(ref.request, ref.generation, source, loading.rank))
            for source in self._tells[loading.rank]
        ]


def link_name(replica: str, source: int) -> str:
    """Name of the link from a decode rank to one source rank of a replica."""
    return f"{replica}/p{source}"
