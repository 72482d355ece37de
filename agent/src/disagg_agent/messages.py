"""Every message that an agent sends or receives.

Three conversations, each a tagged union:

* engine rank and its agent, over the Unix socket (`ToAgent`, `ToEngine`);
* agent and agent, over the side channel (`SideChannel`);
* agent and mover (`MoverCommand`, `MoverEvent`): a queue where the mover lives in the agent, the engine socket where it
  lives in the engine. One set of types serves both.

What ranks say of themselves and their memory is in `disagg_agent.cards`.

Page ids travel as little-endian int32 bytes per block table (`pack_pages`): 32,768 ids are 128 KiB and no Python
object.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from disagg_agent.cards import (
    Key,
    MoverCard,
    Natural,
    Placement,
    RankCard,
    RankId,
    RegionDeclaration,
    RequestId,
    Seconds,
    SegmentDeclaration,
    Struct,
    Word,
)
from disagg_agent.errors import MAX_TEXT, FrameError

PROTOCOL = 2
"""Version of all three."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Pages = dict[Word, bytes]


def pack_pages(ids: ArrayLike) -> bytes:
    """Page ids as little-endian int32 bytes.

    Raises:
        FrameError: `BadPages` if an id does not fit.
    """
    array = np.asarray(ids)
    if array.size and (array.dtype.kind not in "iu" or array.min() < -(2**31) or array.max() >= 2**31):
        raise FrameError("BadPages", "page ids must be whole numbers of 32 bits")
    return array.astype("<i4").tobytes()


def unpack_pages(data: bytes) -> NDArray[np.int64]:
    """Inverse of `pack_pages`.

    Raises:
        FrameError: `BadPages` if the length is no multiple of four.
    """
    if len(data) % 4:
        raise FrameError("BadPages", f"{len(data)} bytes are no list of 32-bit page ids")
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


class SourceRef(Struct, frozen=True):
    """Where a decode engine was told to load from, as carried by `kv_transfer_params`."""

    replica: Word
    request: RequestId
    generation: Word
    host: Word
    port: Annotated[int, Meta(ge=0, le=65535)]


# Engine rank -> agent.


class Register(Struct, frozen=True, tag="register"):
    """First message of an engine rank. With placement `agent` the segments follow as file descriptors of this frame;
    with placement `engine` the mover is in the engine and introduces itself.
    """

    protocol: int
    rank: RankId
    factors: dict[Word, Any]
    placement: Placement
    segments: list[SegmentDeclaration]
    regions: list[RegionDeclaration]
    mover: MoverCard | None = None


class Hold(Struct, frozen=True, tag="hold"):
    """Prefill: keep these pages of a request until decode has read them. Answered by `Held` or `Failed`."""

    request: RequestId
    generation: Word
    tokens: Natural
    pages: Pages


class Load(Struct, frozen=True, tag="load"):
    """Decode: fill these pages with positions `[start, tokens)` of the source request. Answered by `Loaded` or
    `Failed`.
    """

    request: RequestId
    source: SourceRef
    tokens: Natural
    start: Natural
    pages: Pages


class Abort(Struct, frozen=True, tag="abort"):
    """Either role: the request is over; the pages are free once `Released` or `Freed` has come."""

    request: RequestId


# Agent -> engine rank.


class Welcome(Struct, frozen=True, tag="welcome"):
    """First message of the agent: the plan, so that an engine needs no mount of its own."""

    protocol: int
    role: Literal["prefill", "decode"]
    replica: Word
    side_host: Word
    side_port: int
    plan: bytes


class Registered(Struct, frozen=True, tag="registered"):
    """The rank's memory agrees with the plan and is usable."""


class Refused(Struct, frozen=True, tag="refused"):
    """The rank is not served; the connection ends."""

    code: Word
    message: Text


class Held(Struct, frozen=True, tag="held"):
    """The pages are under a lease of this many seconds."""

    request: RequestId
    generation: Word
    lease: Seconds


class Released(Struct, frozen=True, tag="released"):
    """Prefill: the pages are free. `reason` is `completed`, `expired` or `aborted`."""

    request: RequestId
    generation: Word
    reason: Word


class Loaded(Struct, frozen=True, tag="loaded"):
    """Decode: every byte of the span is in place."""

    request: RequestId
    bytes: Natural
    seconds: Seconds


class Failed(Struct, frozen=True, tag="failed"):
    """The hold or load failed. Unless `freed`, late bytes may still land: the pages stay taken until `Freed`."""

    request: RequestId
    code: Word
    message: Text
    freed: bool


class Freed(Struct, frozen=True, tag="freed"):
    """No byte can land any more in the pages of a failed or aborted load."""

    request: RequestId


# Agent -> mover.


class Connect(Struct, frozen=True, tag="m.connect"):
    """Load a source's metadata and prepare the descriptors of the edge from its rank. Answered by `Connected`."""

    link: Key
    source: RankId
    card: MoverCard


class Disconnect(Struct, frozen=True, tag="m.disconnect"):
    """Forget a source; its transfers in flight end as they may."""

    link: Key


class Probe(Struct, frozen=True, tag="m.probe"):
    """Read a few bytes from a source into scratch memory: wires the connection up and proves it. `Probed` answers."""

    link: Key


class MoveSource(Struct, frozen=True):
    """Pages that one source rank holds for a request."""

    link: Key
    pages: Pages


class Move(Struct, frozen=True, tag="m.move"):
    """Read positions `[start, tokens)` from every listed source into `pages`. `Moved` answers, once nothing is in
    flight.
    """

    id: Key
    tokens: Natural
    start: Natural
    pages: Pages
    sources: list[MoveSource]


class Cancel(Struct, frozen=True, tag="m.cancel"):
    """Post nothing more for a move; `Moved` still comes when what is in flight has ended."""

    id: Key


class Serve(Struct, frozen=True, tag="m.serve"):
    """How many more (or fewer) remote movers announced that they use our memory: above none, we drive progress."""

    change: int


# Mover -> agent.


class Connected(Struct, frozen=True, tag="m.connected"):
    """Outcome of `Connect`; `code` empty on success."""

    link: Key
    code: Word
    message: Text


class Probed(Struct, frozen=True, tag="m.probed"):
    """Outcome of `Probe`; `code` empty on success."""

    link: Key
    seconds: Seconds
    code: Word
    message: Text


class Moved(Struct, frozen=True, tag="m.moved"):
    """A move has ended and nothing of it is in flight; `code` empty on success."""

    id: Key
    bytes: Natural
    seconds: Seconds
    code: Word
    message: Text


# Agent <-> agent.


class Hello(Struct, frozen=True, tag="hello"):
    """First message of either side. Compared before anything else is believed.

    `expects` is the replica that the sender wants to talk to; the side that listens does not know, and leaves it empty.
    """

    protocol: int
    role: Literal["prefill", "decode"]
    replica: Word
    pod: Word
    incarnation: Word
    plan: Word
    compat: Word
    expects: Word = ""


class Ranks(Struct, frozen=True, tag="ranks"):
    """All ranks that are registered now; replaces what was said before."""

    ranks: list[RankCard]


class Watch(Struct, frozen=True, tag="watch"):
    """Decode is about to touch this source rank's memory (or has stopped): poll for it."""

    source: RankId
    on: bool


class Open(Struct, frozen=True, tag="open"):
    """Decode rank `destination` asks for a request's pages on `source`. Answered by `Opened` or `OpenRefused`."""

    request: RequestId
    generation: Word
    source: RankId
    destination: RankId
    tokens: Natural


class Opened(Struct, frozen=True, tag="opened"):
    """The pages, in order of position, and the seconds that the lease still has."""

    request: RequestId
    generation: Word
    source: RankId
    destination: RankId
    pages: Pages
    lease: Seconds


class OpenRefused(Struct, frozen=True, tag="open-refused"):
    """Nothing may be read."""

    request: RequestId
    generation: Word
    source: RankId
    destination: RankId
    code: Word
    message: Text


class Done(Struct, frozen=True, tag="done"):
    """Decode rank `destination` will not read the request from `source` (any more). Repeating it is harmless."""

    request: RequestId
    generation: Word
    source: RankId
    destination: RankId


class Revoked(Struct, frozen=True, tag="revoked"):
    """The pages of an opened request must not be used: aborted, expired, or the engine is gone."""

    request: RequestId
    generation: Word
    source: RankId
    destination: RankId
    code: Word
    message: Text


class Bye(Struct, frozen=True, tag="bye"):
    """Why the connection ends."""

    code: Word
    message: Text


MoverCommand = Connect | Disconnect | Probe | Move | Cancel | Serve
MoverEvent = Connected | Probed | Moved
ToAgent = Register | Hold | Load | Abort | MoverEvent
ToEngine = Welcome | Registered | Refused | Held | Released | Loaded | Failed | Freed | MoverCommand
SideChannel = Hello | Ranks | Watch | Open | Opened | OpenRefused | Done | Revoked | Bye
