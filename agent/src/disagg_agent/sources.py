"""Decode's view of prefill agents: dial, compare, connect the movers, probe; again whenever the connection is lost.

Level-based: the set of peers to have is given (`introduce`, or learned from a request), each has one task that
keeps trying, and nothing depends on the order of events. A peer is `ready` when every edge between its ranks and
ours has been probed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from disagg_agent.cards import RankCard
from disagg_agent.errors import AgentError, FrameError, PeerRefused
from disagg_agent.handshake import Address, check_cards
from disagg_agent.loads import link_name
from disagg_agent.messages import (
    Bye,
    Connect,
    Connected,
    Disconnect,
    Done,
    Hello,
    Open,
    Opened,
    OpenRefused,
    Probe,
    Probed,
    Ranks,
    Revoked,
    SourceRef,
    Watch,
)
from disagg_agent.plan_loader import LoadedPlan
from disagg_agent.side_channel import Channel

log = logging.getLogger(__name__)

_BACKOFF_FIRST = 0.05
_BACKOFF_MOST = 2.0

PeerState = Literal["dialling", "connecting", "ready", "refused", "lost"]


@dataclass
class Link:
    """One edge as connected: a local decode rank and a remote prefill rank."""

    state: Literal["connecting", "probing", "ready", "failed"] = "connecting"
    code: str = ""
    message: str = ""
    probe_seconds: float = 0.0


@dataclass
class Source:
    """One prefill agent.

    Attributes:
        heard: whether the agent has said on this connection which ranks it has.
        settled: whether this connection has ever been ready.
        broken: why the connection is being given up, if it is.
        waiting: questions for a peer that is not ready yet.
        learned: whether only a request has named it; nobody introduced it.
    """

    address: Address
    replica: str
    state: PeerState = "dialling"
    code: str = ""
    message: str = ""
    pod: str = ""
    incarnation: str = ""
    channel: Channel | None = None
    cards: dict[int, RankCard] = field(default_factory=dict)
    heard: bool = False
    settled: bool = False
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    broken: tuple[str, str] | None = None
    waiting: list[Open] = field(default_factory=list)
    learned: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


@dataclass(frozen=True)
class SourceEvents:
    """What the agent hears, on the event loop."""

    opened: Callable[[str, Opened], None]
    refused: Callable[[str, OpenRefused | Revoked], None]
    gone: Callable[[str, list[int], str, str], None]
    handshake_failed: Callable[[str], None]


class Sources:
    """All prefill agents that this decode pod knows.

    Args:
        hello: our greeting.
        ranks: our registered ranks and how to command their movers, asked for whenever needed.
    """

    def __init__(
        self,
        loaded: LoadedPlan,
        hello: Hello,
        ranks: Callable[[], dict[int, tuple[RankCard, Callable[[Connect | Disconnect | Probe], None]]]],
        events: SourceEvents,
    ) -> None:
        self._loaded = loaded
        self._hello = hello
        self._ranks = ranks
        self._events = events
        self.peers: dict[tuple[str, Address], Source] = {}

    def introduce(self, peers: Iterable[tuple[str, Address]]) -> None:
        """Make these the peers to have, by (replica, address); others are dropped."""
        wanted = set(peers)
        for key in set(self.peers) - wanted:
            self._forget(key)
        for key in wanted:
            self._know(key).learned = False

    def close(self) -> None:
        """Drop every peer."""
        self.introduce([])

    def send(self, ref: SourceRef, message: Open | Done) -> None:
        """Send to the agent that holds the message's source rank. An `Open` waits for a peer that is still being
        connected, and fails as soon as one attempt does; a `Done` that cannot be delivered is left to the lease.
        """
        candidates = [peer for peer in self.peers.values() if peer.replica == ref.replica]
        if isinstance(message, Done):
            # What it gives up may still be waiting here, and must not be asked for behind it.
            for peer in candidates:
                peer.waiting = [one for one in peer.waiting if not _gives_up(message, one)]
        for peer in candidates:
            if peer.channel is not None and message.source in peer.cards:
                if isinstance(message, Done) or peer.state == "ready":
                    peer.channel.send(message)
                else:
                    peer.waiting.append(message)
                return
        if isinstance(message, Done):
            return
        if ref.host and ref.port and not any(peer.channel is not None for peer in candidates):
            # The request is newer than what we were told: a replica may have come back elsewhere.
            candidates = [self._learn((ref.replica, Address(ref.host, ref.port)))]
        if not candidates:
            self._refuse(ref.replica, message, "UnknownPeer", f"replica {ref.replica} was never introduced")
            return
        peer = candidates[0]
        if peer.state == "refused":
            self._refuse(ref.replica, message, peer.code, peer.message)
        elif all(candidate.heard for candidate in candidates):
            text = f"prefill rank {message.source} of {ref.replica} has no engine registered"
            self._refuse(ref.replica, message, "EngineGone", text)
        else:
            peer.waiting.append(message)
            peer.wake.set()

    def ranks_changed(self) -> None:
        """One of our ranks came or went: compare it with those of the peers, and connect what is missing."""
        own = [card for card, _ in self._ranks().values()]
        for peer in self.peers.values():
            try:
                check_cards(self._loaded, "prefill", list(peer.cards.values()), own)
            except PeerRefused as error:
                self._break(peer, error.code, error.message)
            else:
                self._connect_missing(peer)

    def connected(self, rank: int, event: Connected) -> None:
        """A local mover has loaded a source's metadata, or could not."""
        for peer, link, _source in self._links_of(rank, event.link):
            if event.code:
                self._link_failed(peer, link, event.code, event.message)
            elif link.state == "connecting":
                link.state = "probing"
                self._command(rank, Probe(event.link))

    def probed(self, rank: int, event: Probed) -> None:
        """A local mover has read from a source, or could not."""
        for peer, link, source in self._links_of(rank, event.link):
            if event.code:
                self._link_failed(peer, link, event.code, event.message)
                continue
            if link.state != "probing":
                # Of an earlier connection: this one's mover has more to say.
                continue
            link.state, link.probe_seconds = "ready", event.seconds
            if peer.channel is not None:
                peer.channel.send(Watch(source, on=False))
            self._settle(peer)

    def _know(self, key: tuple[str, Address]) -> Source:
        if key not in self.peers:
            peer = Source(address=key[1], replica=key[0])
            self.peers[key] = peer
            peer.task = asyncio.create_task(self._keep(peer), name=f"peer {key[1]}")
        return self.peers[key]

    def _learn(self, key: tuple[str, Address]) -> Source:
        """A peer that only a request speaks of."""
        if key not in self.peers:
            self._know(key).learned = True
        return self.peers[key]

    def _forget(self, key: tuple[str, Address]) -> None:
        peer = self.peers.pop(key)
        if peer.task is not None:
            peer.task.cancel()
        self._lost(peer, "PeerRemoved", "the peer is no longer part of this revision")

    async def _keep(self, peer: Source) -> None:
        """Keep one peer connected until cancelled."""
        backoff = _BACKOFF_FIRST
        while True:
            peer.wake.clear()
            peer.state, peer.broken, peer.settled = "dialling", None, False
            code, text = await self._session(peer)
            code, text = peer.broken or (code, text)
            if peer.settled:
                backoff = _BACKOFF_FIRST
            peer.state = "refused" if code in _FINAL else "lost"
            peer.code, peer.message = code, text
            log.warning("peer lost", extra={"peer": str(peer.address), "code": code, "detail": text})
            self._lost(peer, code, text)
            if peer.learned:
                # A client may name any address: it is dialled when a request asks for it, and not for ever.
                self.peers.pop((peer.replica, peer.address), None)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff):
                    await peer.wake.wait()
            backoff = min(backoff * 2, _BACKOFF_MOST)

    async def _session(self, peer: Source) -> tuple[str, str]:
        """Dial and serve one connection to its end; why it ended."""
        try:
            async with asyncio.timeout(5.0):
                reader, writer = await asyncio.open_connection(peer.address.host, peer.address.port)
        except (OSError, TimeoutError, ValueError, OverflowError) as error:
            # Addresses come from requests too: what is no host name at all ends as a ValueError.
            self._events.handshake_failed("PeerUnreachable")
            return "PeerUnreachable", f"no agent answers at {peer.address}: {error or 'timed out'}"
        channel: Channel | None = None
        reason: Bye | None = None
        code, text = "PeerLost", f"the prefill agent at {peer.address} closed the connection"
        try:
            hello = msgspec.structs.replace(self._hello, expects=peer.replica)
            channel = await Channel.open(reader, writer, hello)
            peer.channel, peer.state = channel, "connecting"
            peer.pod, peer.incarnation = channel.peer.pod, channel.peer.incarnation
            while (message := await channel.receive()) is not None:
                self._receive(peer, message)
        except (AgentError, OSError, TimeoutError) as error:
            code = error.code if isinstance(error, AgentError) else "PeerLost"
            reason = Bye(code, str(error)[:4096]) if isinstance(error, PeerRefused) else None
            self._events.handshake_failed(code)
            text = error.message if isinstance(error, AgentError) else str(error) or "timed out"
        finally:
            # First of all: once prefill sees the connection end, it may give the pages that we read to others.
            self._lost(peer, *(peer.broken or (code, text)))
            if channel is None:
                writer.close()
            else:
                await channel.close(reason)
        return code, text

    def _receive(self, peer: Source, message: object) -> None:
        match message:
            case Ranks():
                check_cards(self._loaded, "prefill", message.ranks, [card for card, _ in self._ranks().values()])
                self._take_ranks(peer, {card.rank: card for card in message.ranks})
            case Opened():
                self._events.opened(peer.replica, message)
            case OpenRefused() | Revoked():
                self._events.refused(peer.replica, message)
            case _:
                raise FrameError("BadFrame", f"a prefill agent does not send {type(message).__name__}")

    def _take_ranks(self, peer: Source, cards: dict[int, RankCard]) -> None:
        changed = [
            rank for rank, card in peer.cards.items() if rank not in cards or cards[rank].mover.name != card.mover.name
        ]
        for key in [key for key in peer.links if key[1] in changed]:
            self._drop_link(peer, key)
        if changed:
            self._events.gone(
                peer.replica, changed, "EngineGone", f"prefill ranks {changed} of {peer.replica} have gone"
            )
        peer.cards, peer.heard = cards, True
        self._connect_missing(peer)

    def _connect_missing(self, peer: Source) -> None:
        if peer.channel is None:
            return
        ours = self._ranks()
        for key in [key for key in peer.links if key[0] not in ours]:
            self._drop_link(peer, key)
        for rank in ours:
            for source in self._loaded.sources[rank]:
                if source in peer.cards and (rank, source) not in peer.links:
                    peer.links[rank, source] = Link()
                    # Connecting and probing both need the other mover to drive its progress.
                    peer.channel.send(Watch(source, on=True))
                    self._command(rank, Connect(link_name(peer.replica, source), source, peer.cards[source].mover))
        self._settle(peer)

    def _settle(self, peer: Source) -> None:
        """Ready when there is something to read from and every edge to it is probed."""
        expected = {
            (rank, source) for rank in self._ranks() for source in self._loaded.sources[rank] if source in peer.cards
        }
        done = bool(peer.cards) and bool(self._ranks()) and expected == set(peer.links)
        if done and all(link.state == "ready" for link in peer.links.values()) and peer.channel is not None:
            peer.state, peer.code, peer.message, peer.settled = "ready", "", "", True
            waiting, peer.waiting = peer.waiting, []
            for message in waiting:
                peer.channel.send(message)
        elif peer.state == "ready":
            peer.state = "connecting"

    def _link_failed(self, peer: Source, link: Link, code: str, message: str) -> None:
        """An edge that cannot be used makes the whole peer unusable: start over with a fresh connection."""
        link.state, link.code, link.message = "failed", code, message
        self._break(peer, code, message)

    def _break(self, peer: Source, code: str, message: str) -> None:
        """Give a connection up; its task sees it end."""
        peer.broken = (code, message)
        if peer.channel is not None:
            peer.channel.abort()

    def _drop_link(self, peer: Source, key: tuple[int, int]) -> None:
        link = peer.links.pop(key)
        self._command(key[0], Disconnect(link_name(peer.replica, key[1])))
        if link.state in ("connecting", "probing") and peer.channel is not None:
            peer.channel.send(Watch(key[1], on=False))

    def _lost(self, peer: Source, code: str, text: str) -> None:
        peer.channel = None
        for key in list(peer.links):
            self._drop_link(peer, key)
        ranks = list(peer.cards)
        peer.cards.clear()
        peer.heard = False
        self._events.gone(peer.replica, ranks, code, text)
        self._fail_waiting(peer, code, text)

    def _fail_waiting(self, peer: Source, code: str, text: str) -> None:
        waiting, peer.waiting = peer.waiting, []
        for message in waiting:
            self._refuse(peer.replica, message, code, text)

    def _refuse(self, replica: str, message: Open, code: str, text: str) -> None:
        refusal = OpenRefused(
            message.request, message.generation, message.source, message.destination, code, text[:4096]
        )
        # Not from inside the call that asked: the state machine that asked is still running.
        asyncio.get_running_loop().call_soon(self._events.refused, replica, refusal)

    def _links_of(self, rank: int, name: str) -> list[tuple[Source, Link, int]]:
        return [
            (peer, link, source)
            for peer in self.peers.values()
            for (destination, source), link in peer.links.items()
            if destination == rank and link_name(peer.replica, source) == name
        ]

    def _command(self, rank: int, command: Connect | Disconnect | Probe) -> None:
        ours = self._ranks().get(rank)
        if ours is not None:
            ours[1](command)


def _gives_up(done: Done, question: Open) -> bool:
    return (done.request, done.generation, done.source, done.destination) == (
        question.request,
        question.generation,
        question.source,
        question.destination,
    )


_FINAL = frozenset(
    {"ProtocolMismatch", "PlanMismatch", "CompatMismatch", "RoleMismatch", "WrongReplica", "WrongShape", "UnknownRank"}
)
"""Reasons that another attempt will not change unless the peer itself does; requests fail at once with them."""
