"""Prefill's side of a request, as a pure state machine: events in, actions out, the clock is an argument.

A hold keeps the pages of one request on one rank under a lease. It ends when every decode rank that the plan names
has said `Done`, when the lease runs out, when the engine aborts, or when the engine is gone; while a reader still
has it open, its pages are not given back, whatever ended it.

States of a hold: `held` -> (`aborted` | `expired`) while readers remain -> released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from disagg_agent.messages import Done, Failed, Held, Hold, Open, Opened, OpenRefused, Released, Revoked, Serve


@dataclass(frozen=True)
class Reader:
    """A decode agent: one connection. `replica` groups the agents whose completions count together."""

    replica: str
    connection: int


@dataclass(frozen=True)
class ToEngineRank:
    """Tell the engine rank that holds the pages."""

    rank: int
    message: Held | Released | Failed


@dataclass(frozen=True)
class ToReader:
    """Tell a decode agent."""

    reader: Reader
    message: Opened | OpenRefused | Revoked


@dataclass(frozen=True)
class ToMover:
    """Tell the mover of a rank to start or stop driving progress."""

    rank: int
    message: Serve


_REMEMBERED = 4096
"""Ended holds whose end is remembered."""

Action = ToEngineRank | ToReader | ToMover
State = Literal["held", "aborted", "expired"]


@dataclass
class _Held:
    rank: int
    hold: Hold
    expires: float
    state: State = "held"
    open_by: set[tuple[Reader, int]] = field(default_factory=set)
    done: dict[str, set[int]] = field(default_factory=dict)


class Leases:
    """All holds of one prefill pod.

    Args:
        completions: decode ranks whose `Done` frees each prefill rank (the plan's `completions`).
        seconds: length of a lease.
        grace: how long an `Open` for a request that is not held (yet) waits before it is refused: an engine answers
            its client before its workers have asked for the hold, and decode may be faster than they are. A `Done`
            waits as long, or what it gives up would stay held until the lease has run out.
    """

    def __init__(self, completions: Sequence[Iterable[int]], seconds: float, grace: float = 0.0) -> None:
        self._expected = [frozenset(ranks) for ranks in completions]
        self._seconds = seconds
        self._grace = grace
        self._early: dict[tuple[Reader, int, int, str, str], tuple[float, Open | Done]] = {}
        self._ended: OrderedDict[tuple[int, str, str], str] = OrderedDict()
        self._holds: dict[tuple[int, str], _Held] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, now: float, rank: int, message: Hold) -> list[Action]:
        """An engine rank asks to keep pages. A request id that is still held is refused: two generations would mix."""
        key = (rank, message.request)
        if key in self._holds:
            text = f"request {message.request} is already held on rank {rank}"
            return [ToEngineRank(rank, Failed(message.request, "DuplicateHold", text, freed=False))]
        self._ended.pop((rank, message.request, message.generation), None)
        self._holds[key] = _Held(rank, message, now + self._seconds)
        held = ToEngineRank(rank, Held(message.request, message.generation, self._seconds))
        return [held, *self._hear_early(now, rank, message.request)]

    def open(self, now: float, reader: Reader, message: Open) -> list[Action]:
        """A decode rank asks for the pages; refused unless both sides mean the same request, life and span."""
        held = self._holds.get((message.source, message.request))
        ended = (message.source, message.request, message.generation) in self._ended
        if held is None and self._grace > 0 and not ended:
            self._early[_early_key(reader, message)] = (now + self._grace, message)
            return []
        return self._open(now, reader, message, held)

    def _open(self, now: float, reader: Reader, message: Open, held: _Held | None) -> list[Action]:
        code, text = self._judge(now, held, message)
        if held is None or code:
            refusal = OpenRefused(message.request, message.generation, message.source, message.destination, code, text)
            return [ToReader(reader, refusal)]
        opener = (reader, message.destination)
        actions: list[Action] = []
        if opener not in held.open_by:
            held.open_by.add(opener)
            actions.append(ToMover(held.rank, Serve(+1)))
        answer = Opened(
            message.request,
            message.generation,
            message.source,
            message.destination,
            held.hold.pages,
            max(0.0, held.expires - now),
        )
        return [*actions, ToReader(reader, answer)]

    def _judge(self, now: float, held: _Held | None, message: Open) -> tuple[str, str]:
        ended = self._ended.get((message.source, message.request, message.generation))
        if held is None and ended is not None:
            return ended, f"request {message.request} is not held on prefill rank {message.source} any more"
        if held is None:
            return "UnknownRequest", f"request {message.request} is not held on prefill rank {message.source}"
        if held.hold.generation != message.generation:
            return (
                "StaleGeneration",
                f"request {message.request} is held as generation {held.hold.generation}, not {message.generation}",
            )
        if held.state != "held":
            return f"Request{held.state.capitalize()}", f"request {message.request} is {held.state} on prefill"
        if now >= held.expires:
            return "LeaseExpired", f"the lease of request {message.request} ended {now - held.expires:.3f} s ago"
        if held.hold.tokens != message.tokens:
            return (
                "UnequalSpan",
                f"request {message.request}: decode names {message.tokens} tokens, prefill holds {held.hold.tokens}",
            )
        if message.destination not in self._expected[message.source]:
            return (
                "NoEdge",
                f"decode rank {message.destination} reads nothing from prefill rank {message.source} in this plan",
            )
        return "", ""

    def done(self, now: float, reader: Reader, message: Done) -> list[Action]:
        """A decode rank has finished with a source. Unknown, stale and repeated ones change nothing."""
        held = self._holds.get((message.source, message.request))
        ended = (message.source, message.request, message.generation) in self._ended
        if held is None and self._grace > 0 and not ended:
            # In place of its own `Open`, if that still waits.
            self._early[_early_key(reader, message)] = (now + self._grace, message)
        if held is None or held.hold.generation != message.generation:
            return []
        if message.destination not in self._expected[message.source]:
            return []
        actions = self._close(held, {(reader, message.destination)})
        held.done.setdefault(reader.replica, set()).add(message.destination)
        return [*actions, *self._settle(held)]

    def abort(self, rank: int, request: str) -> list[Action]:
        """The engine gives the request up; readers are told, and pages follow once they have let go."""
        held = self._holds.get((rank, request))
        if held is None or held.state == "aborted":
            return []
        held.state = "aborted"
        return [*self._revoke(held, "RequestAborted", "prefill aborted the request"), *self._settle(held)]

    def reader_gone(self, reader: Reader) -> list[Action]:
        """A decode agent's connection ended: it reads no more, and its completions will not come."""
        self._early = {key: early for key, early in self._early.items() if key[0] != reader}
        actions: list[Action] = []
        for held in list(self._holds.values()):
            actions += self._close(held, {opener for opener in held.open_by if opener[0] == reader})
            actions += self._settle(held)
        return actions

    def rank_gone(self, rank: int) -> list[Action]:
        """An engine rank is gone and its memory with it: every hold ends, every reader is told."""
        text = f"the engine of prefill rank {rank} is gone"
        actions: list[Action] = []
        for held in [held for held in self._holds.values() if held.rank == rank]:
            actions += self._revoke(held, "EngineGone", text)
            self._end(held, "EngineGone")
        for key in [key for key in self._early if key[1] == rank]:
            _, early = self._early.pop(key)
            if isinstance(early, Open):
                refusal = OpenRefused(early.request, early.generation, rank, early.destination, "EngineGone", text)
                actions.append(ToReader(key[0], refusal))
        return actions

    def tick(self, now: float) -> list[Action]:
        """End every lease that has run out; all entries are looked at, since renewals reorder them."""
        actions: list[Action] = []
        for key in [key for key, (deadline, _) in self._early.items() if now >= deadline]:
            _, message = self._early.pop(key)
            if isinstance(message, Open):
                actions += self._open(now, key[0], message, None)
        for held in [held for held in self._holds.values() if held.state == "held" and now >= held.expires]:
            held.state = "expired"
            actions += self._revoke(held, "LeaseExpired", "the lease ran out")
            actions += self._settle(held)
        return actions

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        leases = [held.expires for held in self._holds.values() if held.state == "held"]
        return min([*leases, *(deadline for deadline, _ in self._early.values())], default=None)

    def _hear_early(self, now: float, rank: int, request: str) -> list[Action]:
        """What was said before the hold was there, in the order in which it came."""
        actions: list[Action] = []
        for key in [key for key in self._early if (key[1], key[3]) == (rank, request)]:
            _, message = self._early.pop(key)
            if isinstance(message, Open):
                actions += self._open(now, key[0], message, self._holds.get((rank, request)))
            else:
                actions += self.done(now, key[0], message)
        return actions

    def _end(self, held: _Held, code: str) -> None:
        """Forget a hold, but not how it ended: whoever asks late is answered at once."""
        del self._holds[held.rank, held.hold.request]
        self._ended[held.rank, held.hold.request, held.hold.generation] = code
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _close(self, held: _Held, openers: set[tuple[Reader, int]]) -> list[Action]:
        closing = openers & held.open_by
        held.open_by -= closing
        return [ToMover(held.rank, Serve(-len(closing)))] if closing else []

    def _revoke(self, held: _Held, code: str, text: str) -> list[Action]:
        hold = held.hold
        return [
            ToReader(reader, Revoked(hold.request, hold.generation, held.rank, destination, code, text))
            for reader, destination in sorted(held.open_by, key=lambda item: (item[0].connection, item[1]))
        ]

    def _settle(self, held: _Held) -> list[Action]:
        """Give the pages back if nothing can touch them any more."""
        hold = held.hold
        complete = any(done >= self._expected[held.rank] for done in held.done.values())
        if held.open_by or not (complete or held.state != "held"):
            return []
        reason = "completed" if complete else held.state
        self._end(held, {"completed": "RequestCompleted", "aborted": "RequestAborted"}.get(reason, "LeaseExpired"))
        return [ToEngineRank(held.rank, Released(hold.request, hold.generation, reason))]


def _early_key(reader: Reader, message: Open | Done) -> tuple[Reader, int, int, str, str]:
    return reader, message.source, message.destination, message.request, message.generation
