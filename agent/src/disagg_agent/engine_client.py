"""The engine's end of the engine socket, for any engine: blocking calls to register, then messages both ways.

One `EngineRank` per worker. With placement `agent` the memory is handed over as file descriptors; with placement
`engine` the mover runs here, in the process that owns the memory, driven by the agent all the same.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from disagg_agent.cards import MoverCard, Placement, RegionDeclaration, SegmentDeclaration
from disagg_agent.errors import AgentError, FrameError, RegistrationRefused
from disagg_agent.frames import Codec, send_with_fds
from disagg_agent.messages import (
    PROTOCOL,
    Abort,
    Cancel,
    Connect,
    Disconnect,
    Failed,
    Freed,
    Held,
    Hold,
    Load,
    Loaded,
    Move,
    Probe,
    Refused,
    Register,
    Registered,
    Released,
    Serve,
    ToEngine,
    Welcome,
)
from disagg_agent.mover import Mover
from disagg_agent.placement import one_place
from disagg_agent.plan_loader import LoadedPlan, check_plan
from disagg_agent.segments import DeviceAccess, Memory, region_cards

log = logging.getLogger(__name__)

EngineMessage = Held | Released | Loaded | Failed | Freed


class EngineRank:
    """One engine rank's connection to the agent of its pod.

    Args:
        path: the agent's Unix socket.
        timeout: seconds for the agent to answer while connecting and registering.

    Raises:
        AgentError: the agent's greeting is not what this library understands, or its plan is not proven.
        OSError: nobody listens at `path`.
    """

    def __init__(self, path: Path, timeout: float = 30.0) -> None:
        self._codec: Codec[ToEngine] = Codec(ToEngine)
        self._lock = threading.Lock()
        self._mover: Mover | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(str(path))
            welcome = self._next()
            if not isinstance(welcome, Welcome):
                raise FrameError("BadFrame", f"the agent greets with {type(welcome).__name__}")
            if welcome.protocol != PROTOCOL:
                raise RegistrationRefused(
                    "ProtocolMismatch", f"the agent speaks protocol {welcome.protocol}, the engine {PROTOCOL}"
                )
            self.welcome = welcome
            self.loaded: LoadedPlan = check_plan(welcome.plan, None)
        except BaseException:
            self._socket.close()
            raise

    def register(
        self,
        rank: int,
        factors: Mapping[str, Any],
        segments: Sequence[Memory],
        fds: Sequence[int],
        regions: Sequence[RegionDeclaration],
        placement: Placement,
        on_message: Callable[[EngineMessage], None],
        on_lost: Callable[[str], None],
        device: DeviceAccess | None = None,
    ) -> None:
        """Register the rank's memory and start listening.

        Args:
            fds: descriptors of the segments; used for placement `agent` only, and never closed here.
            on_message: called from a thread of this object with each message of the agent.
            on_lost: called once when the connection ends, with the reason.
            device: what a mover of GPU memory needs.

        Raises:
            RegistrationRefused: the agent's refusal, with its code and message; `MixedMemory`.
            AgentError: the mover cannot start here.
        """
        declared = [SegmentDeclaration(segment.size, segment.place) for segment in segments]
        try:
            card = self._start_mover(rank, segments, regions, device) if placement == "engine" else None
            message = Register(PROTOCOL, rank, dict(factors), placement, declared, list(regions), card)
            send_with_fds(self._socket, self._codec.encode(message), list(fds) if placement == "agent" else [])
            answer = self._next()
            if isinstance(answer, Refused):
                raise RegistrationRefused(answer.code, answer.message)
            if not isinstance(answer, Registered):
                raise FrameError("BadFrame", f"the agent answers a registration with {type(answer).__name__}")
        except BaseException:
            self.close()
            raise
        self._socket.settimeout(None)
        self._thread = threading.Thread(
            target=self._listen, args=(on_message, on_lost), name=f"engine-rank-{rank}", daemon=True
        )
        self._thread.start()

    def hold(self, message: Hold) -> None:
        """Put a request's pages under a lease; `Held` or `Failed` follows."""
        self._send(message)

    def load(self, message: Load) -> None:
        """Ask for a request's bytes; `Loaded` or `Failed` follows."""
        self._send(message)

    def abort(self, request: str) -> None:
        """Give a request up; `Released` (prefill) or `Freed` (decode) follows."""
        self._send(Abort(request))

    def cut(self) -> None:
        """End the connection as if the agent had: the mover ends, then `on_lost` is told."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, then the mover if it lives here."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.close()
        self._socket.close()

    def _start_mover(
        self,
        rank: int,
        segments: Sequence[Memory],
        regions: Sequence[RegionDeclaration],
        device: DeviceAccess | None,
    ) -> MoverCard:
        self._mover = Mover(
            self.loaded.plan,
            self.welcome.role,
            rank,
            [(segment.address, segment.size) for segment in segments],
            region_cards(segments, regions),
            self._send,
            one_place((segment.place for segment in segments), f"{self.welcome.role} rank {rank}"),
            device,
        )
        return self._mover.card

    def _send(self, message: msgspec.Struct) -> None:
        frame = self._codec.encode(message)
        # The listener learns of a dead agent by itself; a sender has nothing to add.
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(frame)

    def _next(self) -> ToEngine:
        message, _fds = self._codec.receive(self._socket)
        if message is None:
            raise FrameError("AgentGone", "the agent closed the connection")
        return message

    def _listen(self, on_message: Callable[[EngineMessage], None], on_lost: Callable[[str], None]) -> None:
        try:
            while True:
                message = self._next()
                match message:
                    case Connect() | Disconnect() | Probe() | Move() | Cancel() | Serve():
                        if self._mover is not None:
                            self._mover.submit(message)
                    case Held() | Released() | Loaded() | Failed() | Freed():
                        on_message(message)
                    case _:
                        raise FrameError("BadFrame", f"unexpected {type(message).__name__}")
        except (AgentError, OSError) as error:
            # Without its agent nobody can stop this mover: it ends before anybody takes the memory to be free.
            mover, self._mover = self._mover, None
            if mover is not None:
                mover.close()
            on_lost(str(error))
