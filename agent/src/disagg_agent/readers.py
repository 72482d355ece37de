"""Prefill's view of decode agents: a listener, and what each connection has asked for."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from disagg_agent.cards import RankCard
from disagg_agent.errors import AgentError, FrameError, PeerRefused
from disagg_agent.leases import Reader
from disagg_agent.messages import Bye, Done, Hello, Open, Ranks, Watch
from disagg_agent.side_channel import Channel

log = logging.getLogger(__name__)


@dataclass
class Connection:
    """A decode agent that is connected."""

    channel: Channel
    reader: Reader
    watching: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True)
class ReaderEvents:
    """What the agent hears, on the event loop."""

    opened: Callable[[Reader, Open], None]
    done: Callable[[Reader, Done], None]
    gone: Callable[[Reader], None]
    watch: Callable[[int, int], None]
    handshake_failed: Callable[[str], None]


class Readers:
    """All decode agents that are connected to this pod.

    Args:
        hello: our greeting.
        cards: our registered ranks, asked for at each connection.
    """

    def __init__(self, hello: Hello, cards: Callable[[], list[RankCard]], events: ReaderEvents) -> None:
        self._hello = hello
        self._cards = cards
        self._events = events
        self.connections: dict[Reader, Connection] = {}

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Listen; port 0 lets the system choose."""
        return await asyncio.start_server(self._connection, host, port)

    def send(self, reader: Reader, message: object) -> None:
        """Send to one decode agent, if it is still there."""
        connection = self.connections.get(reader)
        if connection is not None:
            connection.channel.send(message)  # type: ignore[arg-type]

    def ranks_changed(self) -> None:
        """One of our ranks came or went: everybody is told all of them."""
        message = Ranks(self._cards())
        present = {card.rank for card in message.ranks}
        for connection in self.connections.values():
            for rank in set(connection.watching) - present:
                # The mover went with its rank; a new one starts from nothing.
                del connection.watching[rank]
            connection.channel.send(message)

    def close(self) -> None:
        """Cut every connection."""
        for connection in list(self.connections.values()):
            connection.channel.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel: Channel | None = None
        reason: Bye | None = None
        try:
            channel = await Channel.open(reader, writer, self._hello)
            await self._session(channel)
        except (AgentError, OSError, TimeoutError) as error:
            code = error.code if isinstance(error, AgentError) else "PeerLost"
            reason = Bye(code, str(error)[:4096]) if isinstance(error, FrameError | PeerRefused) else None
            self._events.handshake_failed(code)
            log.warning("decode peer lost", extra={"code": code, "detail": str(error)})
        finally:
            if channel is None:
                writer.close()
            else:
                await channel.close(reason)

    async def _session(self, channel: Channel) -> None:
        reader = Reader(channel.peer.replica, channel.number)
        connection = Connection(channel, reader)
        for other in list(self.connections.values()):
            if other.channel.peer.pod == channel.peer.pod:
                # One pod, one connection: an older one belongs to an earlier life or a half-open socket.
                other.channel.abort()
        self.connections[reader] = connection
        channel.send(Ranks(self._cards()))
        try:
            while (message := await channel.receive()) is not None:
                match message:
                    case Watch():
                        self._watch(connection, message)
                    case Open():
                        self._events.opened(reader, message)
                    case Done():
                        self._events.done(reader, message)
                    case _:
                        raise FrameError("BadFrame", f"a decode agent does not send {type(message).__name__}")
        finally:
            del self.connections[reader]
            for rank, count in connection.watching.items():
                self._events.watch(rank, -count)
            self._events.gone(reader)

    def _watch(self, connection: Connection, message: Watch) -> None:
        if message.source not in {card.rank for card in self._cards()}:
            return
        if message.on:
            connection.watching[message.source] += 1
            self._events.watch(message.source, +1)
        elif connection.watching[message.source] > 0:
            connection.watching[message.source] -= 1
            self._events.watch(message.source, -1)
