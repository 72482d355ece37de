"""The agent of one pod: carries events to the state machines and their actions to sockets and movers.

Decides nothing itself: what a request may do is in `leases` and `loads`, who may connect in `handshake` and `registry`.
Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from disagg_agent import leases, loads
from disagg_agent.cards import RankCard
from disagg_agent.engine_socket import EngineSocket, RankSession
from disagg_agent.errors import AgentError
from disagg_agent.handshake import Address
from disagg_agent.messages import (
    PROTOCOL,
    Abort,
    Cancel,
    Connect,
    Connected,
    Disconnect,
    Failed,
    Hello,
    Hold,
    Load,
    Loaded,
    Moved,
    MoverEvent,
    OpenRefused,
    Probe,
    Probed,
    Released,
    Serve,
    Welcome,
)
from disagg_agent.metrics import Metrics
from disagg_agent.plan_loader import LoadedPlan
from disagg_agent.readers import ReaderEvents, Readers
from disagg_agent.registry import check_pages
from disagg_agent.sources import SourceEvents, Sources
from disagg_plan.errors import RequestError

log = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]


GRACE_SHARE = 0.8


@dataclass(frozen=True)
class AgentConfig:
    """What a pod tells its agent.

    Attributes:
        pod: pod UID.
        replica: engine instance that the pod belongs to.
        socket: path of the engine socket.
        host: address that peers reach this pod at, never localhost on a cluster.
        port: side channel port; 0 lets the system choose.
        lease_seconds: how long prefill holds a request's pages.
        deadline_seconds: how long a load may take.
        hold_grace_seconds: how long decode may be ahead of prefill's workers, which ask for a hold only once the
            engine's step after next has begun: two long steps on a starved machine. Less than a load's deadline, so
            that a request that nobody holds is refused as such; `GRACE_SHARE` of it in a pod.
    """

    role: Role
    pod: str
    replica: str
    socket: Path
    host: str
    port: int
    lease_seconds: float = 30.0
    deadline_seconds: float = 30.0
    hold_grace_seconds: float = 25.0


class Agent:
    """One incarnation of a pod's agent."""

    def __init__(self, config: AgentConfig, loaded: LoadedPlan) -> None:
        self.config = config
        self.loaded = loaded
        self.incarnation = uuid4().hex
        self.metrics = Metrics()
        self.last_refusal: AgentError | None = None
        self.port = 0
        self._hello = Hello(
            PROTOCOL,
            config.role,
            config.replica,
            config.pod,
            self.incarnation,
            loaded.plan.digest,
            loaded.plan.compat.digest,
        )
        completions = [loaded.plan.completions[str(rank)] for rank in range(len(loaded.plan.source.ranks))]
        self._leases = leases.Leases(completions, config.lease_seconds, config.hold_grace_seconds)
        self._loads = loads.Loads(loaded.sources, loaded.tells, config.deadline_seconds)
        self._timer: asyncio.TimerHandle | None = None
        self.engine = EngineSocket(config.socket, loaded, config.role, self._welcome, self)
        self.readers = Readers(
            self._hello,
            self._cards,
            ReaderEvents(
                opened=lambda reader, message: self._run(self._leases.open(_now(), reader, message)),
                done=lambda reader, message: self._run(self._leases.done(_now(), reader, message)),
                gone=lambda reader: self._run(self._leases.reader_gone(reader)),
                watch=self._watch,
                handshake_failed=self._refused,
            ),
        )
        self.sources = Sources(
            loaded,
            self._hello,
            self._movers,
            SourceEvents(
                opened=lambda replica, message: self._run(self._loads.opened(_now(), replica, message)),
                refused=lambda replica, message: self._run(self._loads.refused(replica, message)),
                gone=lambda replica, ranks, code, text: self._run(self._loads.source_gone(replica, ranks, code, text)),
                handshake_failed=self._refused,
            ),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then take leave of engines and peers."""
        server = await self.readers.serve(self.config.host, self.config.port)
        self.port = server.sockets[0].getsockname()[1]
        sockets = asyncio.create_task(self.engine.serve())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sockets, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if sockets.done():
                sockets.result()
        finally:
            stopped.cancel()
            server.close()
            self.sources.close()
            self.readers.close()
            sockets.cancel()
            await asyncio.gather(sockets, return_exceptions=True)
            if self._timer is not None:
                self._timer.cancel()

    # What others see.

    def not_ready(self) -> str:
        """Why the pod is not ready; empty if it is. Peers are not part of it."""
        missing = sorted(set(range(self._ranks_expected())) - set(self.engine.sessions))
        if not missing:
            return ""
        refusal = f"; last refusal: {self.last_refusal}" if self.last_refusal else ""
        return f"engine ranks {missing} are not registered{refusal}"

    def transfers(self) -> dict[str, int]:
        """Requests that have not ended."""
        return {"holds": len(self._leases), "loads": len(self._loads)}

    def peers(self) -> list[dict[str, Any]]:
        """Every known peer with its state and links."""
        outgoing = [
            {
                "role": "prefill",
                "replica": peer.replica,
                "address": str(peer.address),
                "pod": peer.pod,
                "incarnation": peer.incarnation,
                "state": peer.state,
                "code": peer.code,
                "message": peer.message,
                "links": [
                    {
                        "from": source,
                        "to": rank,
                        "state": link.state,
                        "code": link.code,
                        "message": link.message,
                        "probeMicroseconds": round(link.probe_seconds * 1e6),
                    }
                    for (rank, source), link in sorted(peer.links.items())
                ],
            }
            for peer in self.sources.peers.values()
        ]
        incoming = [
            {
                "role": "decode",
                "replica": connection.channel.peer.replica,
                "pod": connection.channel.peer.pod,
                "incarnation": connection.channel.peer.incarnation,
                "state": "connected",
            }
            for connection in self.readers.connections.values()
        ]
        return outgoing + incoming

    def introduce(self, peers: Iterable[tuple[Role, str, Address]]) -> None:
        """Peers of the revision, by role, replica and address. Decode dials prefill; prefill waits to be dialled."""
        if self.config.role == "decode":
            self.sources.introduce((replica, address) for role, replica, address in peers if role == "prefill")

    # Engine socket (`EngineEvents`).

    def rank_registered(self, session: RankSession) -> None:
        """See `EngineEvents`."""
        log.info("rank registered", extra={"rank": session.rank, "placement": session.placement})
        self._ranks_changed()

    def rank_gone(self, session: RankSession) -> None:
        """See `EngineEvents`."""
        log.warning("rank gone", extra={"rank": session.rank})
        self._run([*self._leases.rank_gone(session.rank), *self._loads.rank_gone(session.rank)])
        self._ranks_changed()

    def registration_refused(self, error: AgentError) -> None:
        """See `EngineEvents`."""
        self.last_refusal = error
        self._refused(error.code)

    def from_engine(self, session: RankSession, message: Hold | Load | Abort) -> None:
        """See `EngineEvents`."""
        now = _now()
        if isinstance(message, Abort):
            aborted = self._leases.abort if self.config.role == "prefill" else self._loads.abort
            self._run(list(aborted(session.rank, message.request)))
        elif isinstance(message, Hold) and self.config.role == "prefill":
            refusal = self._judge_hold(session, message)
            self._run([refusal] if refusal else self._leases.hold(now, session.rank, message))
        elif isinstance(message, Load) and self.config.role == "decode":
            self._run(self._loads.load(now, session.rank, message))
        else:
            text = f"a {self.config.role} rank cannot {type(message).__name__.lower()}"
            session.send(Failed(message.request, "WrongRole", text, freed=True))

    def from_mover(self, session: RankSession, event: MoverEvent) -> None:
        """See `EngineEvents`."""
        match event:
            case Connected():
                self.sources.connected(session.rank, event)
            case Probed():
                self.sources.probed(session.rank, event)
            case Moved():
                self._run(self._loads.moved(_now(), session.rank, event))

    def _judge_hold(self, session: RankSession, message: Hold) -> leases.ToEngineRank | None:
        try:
            check_pages(self.loaded, self.config.role, session.rank, session.pool, message.tokens, message.pages)
        except (AgentError, RequestError) as error:
            return leases.ToEngineRank(session.rank, Failed(message.request, error.code, error.message, freed=True))
        return None

    # Actions.

    def _run(self, actions: Iterable[leases.Action | loads.Action]) -> None:
        for action in actions:
            if log.isEnabledFor(logging.DEBUG):
                what = {"to": type(action).__name__, "what": type(action.message).__name__}
                log.debug("action", extra={**what, **_keys(action)})
            match action:
                case leases.ToEngineRank(rank, message) | loads.ToEngineRank(rank, message):
                    self._count(message)
                    self._to_engine(rank, message)
                case leases.ToReader(reader, message):
                    if isinstance(message, OpenRefused):
                        self._refused(message.code)
                    self.readers.send(reader, message)
                case leases.ToMover(rank, message):
                    self._to_mover(rank, message)
                case loads.ToSource(ref, message):
                    self.sources.send(ref, message)
                case loads.ToMover(rank, _ref, message):
                    self._to_mover(rank, message)
        self.metrics.active.set(len(self._leases) + len(self._loads))
        self._schedule()

    def _schedule(self) -> None:
        """One timer for the nearest deadline; none, and so no wake-up, when nothing is pending."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = [when for when in (self._leases.next_deadline(), self._loads.next_deadline()) if when is not None]
        if deadlines:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, min(deadlines) - _now()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = _now()
        self._run([*self._leases.tick(now), *self._loads.tick(now)])

    def _count(self, message: object) -> None:
        match message:
            case Loaded():
                self.metrics.loads.labels("Loaded").inc()
                self.metrics.bytes.inc(message.bytes)
                self.metrics.seconds.observe(message.seconds)
            case Failed():
                log.warning("request failed", extra={"request": message.request, "code": message.code})
                self.metrics.loads.labels(message.code).inc()
            case Released():
                self.metrics.holds.labels(message.reason).inc()

    def _refused(self, code: str) -> None:
        self.metrics.refusals.labels(code).inc()

    def _to_engine(self, rank: int, message: Any) -> None:
        session = self.engine.sessions.get(rank)
        if session is not None:
            session.send(message)

    def _to_mover(self, rank: int, message: Serve | Cancel | Any) -> None:
        session = self.engine.sessions.get(rank)
        if session is not None:
            session.mover.submit(message)

    def _watch(self, rank: int, change: int) -> None:
        if change:
            self._to_mover(rank, Serve(change))

    def _movers(self) -> dict[int, tuple[RankCard, Callable[[Connect | Disconnect | Probe], None]]]:
        return {rank: (session.card, session.mover.submit) for rank, session in self.engine.sessions.items()}

    def _cards(self) -> list[RankCard]:
        return [self.engine.sessions[rank].card for rank in sorted(self.engine.sessions)]

    def _ranks_changed(self) -> None:
        self.readers.ranks_changed()
        self.sources.ranks_changed()

    def _welcome(self) -> Welcome:
        return Welcome(PROTOCOL, self.config.role, self.config.replica, self.config.host, self.port, self.loaded.text)

    def _ranks_expected(self) -> int:
        return len(self.loaded.side(self.config.role).ranks)


def _keys(action: leases.Action | loads.Action) -> dict[str, Any]:
    """What a log line about an action can be found by; never pages, metadata or prompts."""
    names = ("request", "generation", "source", "destination", "code")
    return {name: getattr(action.message, name) for name in names if hasattr(action.message, name)}


def _now() -> float:
    return time.monotonic()
