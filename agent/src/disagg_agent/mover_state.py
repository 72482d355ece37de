"""What a mover's thread works on: plain values, owned by that thread alone."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from disagg_agent.cards import MoverCard
from disagg_agent.descriptors import EdgeDescriptors, Piece
from disagg_agent.errors import AgentError


@dataclass(eq=False)
class Link:
    """A connected source."""

    source: int
    card: MoverCard
    edge: EdgeDescriptors
    local: Any
    remote: Any
    pool: dict[str, int]


@dataclass
class Stream:
    """What is still to be read from one source for one move."""

    link: Link
    pieces: deque[Piece]
    handle: Any = None
    in_flight: int = 0


@dataclass
class Moving:
    """A move that has begun."""

    id: str
    started: float
    streams: list[Stream]
    bytes: int = 0
    failure: AgentError | None = None

    def fail(self, error: AgentError) -> None:
        """Keep the first failure and post nothing more; what is in flight must still end."""
        self.failure = self.failure or error
        for stream in self.streams:
            stream.pieces.clear()


@dataclass
class Probing:
    """A probe whose read is in flight."""

    link: str
    handle: Any
    started: float


@dataclass
class State:
    """What the mover's thread works on.

    Attributes:
        leaving: dropped links with something in flight. NIXL forgets their peers only when it has ended: asked about
            a transfer whose peer it has forgotten, it reports an error while the data keeps landing.
    """

    links: dict[str, Link] = field(default_factory=dict)
    leaving: list[Link] = field(default_factory=list)
    moves: list[Moving] = field(default_factory=list)
    probes: list[Probing] = field(default_factory=list)
    serving: int = 0

    @property
    def busy(self) -> bool:
        """Whether anything is in flight, here or announced by others."""
        return bool(self.moves or self.probes or self.serving)


def is_over(move: Moving) -> bool:
    """Whether nothing of a move is in flight or left to post."""
    return all(stream.handle is None and not stream.pieces for stream in move.streams)
