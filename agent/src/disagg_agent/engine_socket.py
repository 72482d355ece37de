"""The agent's end of the engine socket: one connection per engine rank.

A connection begins with `Welcome` from the agent and `Register` from the engine; the latter may carry file
descriptors, which asyncio cannot receive, so the beginning runs on a worker thread with a deadline and the rest on
the event loop. A rank whose connection ends is gone: its mover is closed before anything else hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from disagg_agent.cards import MoverCard, RankCard
from disagg_agent.errors import AgentError, FrameError, RegistrationRefused
from disagg_agent.frames import Codec, close_all
from disagg_agent.messages import (
    PROTOCOL,
    Abort,
    Connected,
    Hold,
    Load,
    Moved,
    MoverCommand,
    MoverEvent,
    Probed,
    Refused,
    Register,
    Registered,
    ToAgent,
    Welcome,
)
from disagg_agent.mover import Mover
from disagg_agent.plan_loader import LoadedPlan
from disagg_agent.registry import Pool, check_mover, check_registration
from disagg_agent.segments import Segment, map_segments, region_cards

log = logging.getLogger(__name__)

REGISTER_SECONDS = 120.0
"""Time that an engine has between `Welcome` and `Register`: it may allocate its cache in between."""

_MAX_BUFFERED = 64 << 20
_CLOSE_SECONDS = 1.0


class MoverPort(Protocol):
    """Where commands of a rank go: a mover in this process, or one behind the engine socket."""

    def submit(self, command: MoverCommand) -> None:
        """Queue a command; never blocks."""


class EngineEvents(Protocol):
    """What the socket tells the agent, on the event loop."""

    def rank_registered(self, session: RankSession) -> None:
        """A rank is usable from now on."""

    def rank_gone(self, session: RankSession) -> None:
        """Its connection ended; its memory is unmapped already, or dies with its process."""

    def registration_refused(self, error: AgentError) -> None:
        """A rank was turned away."""

    def from_engine(self, session: RankSession, message: Hold | Load | Abort) -> None:
        """A message of a registered rank."""

    def from_mover(self, session: RankSession, event: MoverEvent) -> None:
        """An event of a rank's mover, wherever it lives."""


@dataclass
class _Handshake:
    register: Register
    pool: Pool
    card: MoverCard
    mover: Mover | None
    segments: list[Segment]


class RankSession:
    """A registered engine rank."""

    def __init__(self, handshake: _Handshake, writer: asyncio.StreamWriter, codec: Codec[ToAgent]) -> None:
        self.rank = handshake.register.rank
        self.placement = handshake.register.placement
        self.pool = handshake.pool
        self.card = RankCard(self.rank, handshake.register.factors, handshake.card)
        self._local = handshake.mover
        self._segments = handshake.segments
        self._writer = writer
        self._codec = codec

    def send(self, message: msgspec.Struct) -> None:
        """Send to the engine; an engine that reads nothing is cut off rather than buffered for ever."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MAX_BUFFERED:
            log.error("engine does not read its socket", extra={"rank": self.rank})
            transport.abort()
            return
        self._writer.write(self._codec.encode(message))

    @property
    def mover(self) -> MoverPort:
        """The rank's mover."""
        return self._local if self._local is not None else _RemoteMover(self)

    def cut(self) -> None:
        """End the connection; the session ends as if the engine had."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the mover, and only then the mapping under it."""
        if self._local is not None:
            await asyncio.to_thread(self._local.close)
        self._segments.clear()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._writer.wait_closed()
        self._writer.transport.abort()


@dataclass(frozen=True)
class _RemoteMover:
    session: RankSession

    def submit(self, command: MoverCommand) -> None:
        self.session.send(command)


class EngineSocket:
    """Accepts engine ranks.

    Args:
        path: where the Unix socket is made; a stale one is replaced.
        welcome: first message to every engine, asked for at each connection.
        events: told of ranks and their messages, on the event loop.
    """

    def __init__(
        self,
        path: Path,
        loaded: LoadedPlan,
        role: str,
        welcome: Callable[[], Welcome],
        events: EngineEvents,
    ) -> None:
        self._path = path
        self._loaded = loaded
        self._role = role
        self._welcome = welcome
        self._events = events
        self._codec: Codec[ToAgent] = Codec(ToAgent)
        self._tasks: set[asyncio.Task[None]] = set()
        # An engine may connect all its ranks before it registers the first: each needs a thread that waits for it.
        self._handshakes = ThreadPoolExecutor(len(loaded.side(role).ranks) + 8, "engine-handshake")
        self.sessions: dict[int, RankSession] = {}

    async def serve(self) -> None:
        """Listen until cancelled."""
        self._loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # Made beside its place: an engine that sees the path can connect to it.
            unfinished = self._path.with_name(self._path.name + "~")
            unfinished.unlink(missing_ok=True)
            listener.bind(os.fspath(unfinished))
            unfinished.chmod(0o660)
            listener.listen(64)
            listener.setblocking(False)
            unfinished.replace(self._path)
            try:
                while True:
                    sock, _ = await self._loop.sock_accept(listener)
                    task = asyncio.create_task(self._connection(sock))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            finally:
                self._path.unlink(missing_ok=True)
                for task in list(self._tasks):
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._handshakes.shutdown(wait=False)

    async def _connection(self, sock: socket.socket) -> None:
        begun = self._loop.run_in_executor(self._handshakes, self._begin, sock)
        try:
            await asyncio.wait({begun})
        except asyncio.CancelledError:
            # The worker thread sits in a blocking receive; without this the agent could not exit before its timeout.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(AgentError, OSError):
                await _to_the_end(self._loop.create_task(_undo(begun)))
            sock.close()
            raise
        try:
            handshake = begun.result()
        except (AgentError, OSError) as error:
            refusal = error if isinstance(error, AgentError) else FrameError("EngineSocket", str(error))
            log.warning("registration refused", extra={"code": refusal.code, "detail": refusal.message})
            self._events.registration_refused(refusal)
            # An engine that reads nothing is not waited for: this is the event loop.
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                sock.sendall(self._codec.encode(Refused(refusal.code, refusal.message)))
            sock.close()
            return
        if handshake is None:
            sock.close()
            return
        sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        session = RankSession(handshake, writer, self._codec)
        try:
            await self._session(session, reader)
        finally:
            await _to_the_end(self._loop.create_task(session.close()))

    async def _session(self, session: RankSession, reader: asyncio.StreamReader) -> None:
        refusal = self._judge(session)
        if refusal is not None:
            session.send(Refused(refusal.code, refusal.message))
            self._events.registration_refused(refusal)
            return
        self.sessions[session.rank] = session
        session.send(Registered())
        self._events.rank_registered(session)
        try:
            while (message := await self._codec.read(reader)) is not None:
                match message:
                    case Hold() | Load() | Abort():
                        self._events.from_engine(session, message)
                    case Connected() | Probed() | Moved():
                        self._events.from_mover(session, message)
                    case Register():
                        raise FrameError("BadFrame", "a rank registers twice on one connection")
        except (FrameError, OSError) as error:
            log.warning("engine connection failed", extra={"rank": session.rank, "detail": str(error)})
        finally:
            del self.sessions[session.rank]
            self._events.rank_gone(session)

    def _judge(self, session: RankSession) -> RegistrationRefused | None:
        """Whether a rank fits to those that are registered already."""
        rank = session.rank
        if rank in self.sessions:
            return RegistrationRefused("RankTaken", f"rank {rank} is registered already and its connection is alive")
        for other in self.sessions.values():
            for table in sorted(session.pool.pages.keys() & other.pool.pages.keys()):
                ours, theirs = session.pool.pages[table], other.pool.pages[table]
                if ours != theirs:
                    return RegistrationRefused(
                        "UnequalPools",
                        f"rank {rank} has {ours} pages in table {table}, rank {other.rank} has {theirs}",
                    )
        return None

    def _begin(self, sock: socket.socket) -> _Handshake | None:
        """Welcome an engine and judge its registration; runs on a worker thread. None if it only looked in."""
        sock.setblocking(True)
        sock.settimeout(REGISTER_SECONDS)
        sock.sendall(self._codec.encode(self._welcome()))
        message, fds = self._codec.receive(sock)
        if message is None:
            return None
        try:
            if not isinstance(message, Register):
                raise FrameError("BadFrame", f"the first message is {type(message).__name__}, not Register")
            if message.protocol != PROTOCOL:
                raise RegistrationRefused(
                    "ProtocolMismatch", f"the engine speaks protocol {message.protocol}, the agent {PROTOCOL}"
                )
            pool = check_registration(self._loaded, self._role, message)
        except AgentError:
            close_all(fds)
            raise
        if message.placement == "engine":
            close_all(fds)
            return _Handshake(message, pool, check_mover(self._loaded, self._role, message, pool), None, [])
        segments = map_segments(fds, [segment.size for segment in message.segments])
        mover = Mover(
            self._loaded.plan,
            self._role,
            message.rank,
            [(segment.address, segment.size) for segment in segments],
            region_cards(segments, message.regions),
            lambda event: self._relay(message.rank, event),
        )
        return _Handshake(message, pool, mover.card, mover, segments)

    def _relay(self, rank: int, event: MoverEvent) -> None:
        def deliver() -> None:
            session = self.sessions.get(rank)
            if session is not None:
                self._events.from_mover(session, event)

        # A loop that is closing takes no more calls; then nobody is left to hear of the event either.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(deliver)


async def _undo(begun: asyncio.Future[_Handshake | None]) -> None:
    """End the mover of a handshake that nobody waits for any more."""
    handshake = await begun
    if handshake is not None and handshake.mover is not None:
        await asyncio.to_thread(handshake.mover.close)


async def _to_the_end(task: asyncio.Task[None]) -> None:
    """Wait for a task although we are cancelled: a mover that is not closed would outlive its agent."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled
