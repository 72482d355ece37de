"""What a worker does: registers its cache with the agent, passes orders on, and collects what came of them.

A step only sends messages and reads what has arrived; nothing here waits for a transfer. A step that computes
nothing, taken only because a transfer is on its way, may nap until a message comes: the engine would spin through
such steps otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from disagg_agent.cards import Placement, RegionDeclaration
from disagg_agent.engine_client import EngineMessage, EngineRank
from disagg_agent.engines.vllm.decisions import Blocks, HoldOrder, LoadOrder, Orders, wire_id
from disagg_agent.engines.vllm.ordering import DeviceOrder, Fence, Step
from disagg_agent.errors import AgentError, RegistrationRefused
from disagg_agent.messages import (
    Failed,
    Freed,
    Held,
    Hold,
    Load,
    Loaded,
    Pages,
    Released,
    SourceRef,
    pack_pages,
)
from disagg_agent.segments import DeviceAccess, Memory

log = logging.getLogger(__name__)

NAP_SECONDS = 0.005
"""Longest nap in a step that computes nothing; what a new request may have to wait."""

_RECONNECT_FIRST, _RECONNECT_MOST = 0.1, 5.0
"""Seconds between attempts to find a restarted agent."""


@dataclass(frozen=True)
class Registration:
    """A worker's cache as the agent wants it told.

    Attributes:
        device: what a mover of GPU memory needs; None for host memory.
        mark: makes a fence behind the work that the GPU was given; None for host memory.
    """

    rank: int
    factors: Mapping[str, Any]
    memory: Sequence[Memory]
    fds: Sequence[int]
    regions: Sequence[RegionDeclaration]
    placement: Placement
    device: DeviceAccess | None = None
    mark: Callable[[], Fence] | None = None


@dataclass
class Results:
    """What ended since the last step, in vLLM's terms."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf:
    """One worker's connection to its agent, made again when the agent has been restarted.

    Args:
        connection: an established connection.
        tables: block table of each KV cache group of the engine, in its order.
        again: makes another connection to the agent of the pod; None gives up with the first.
    """

    def __init__(
        self,
        connection: EngineRank,
        registration: Registration,
        tables: Sequence[str],
        again: Callable[[], EngineRank] | None = None,
    ) -> None:
        self._connection = connection
        self._registration = registration
        self._tables = tables
        self._again = again
        self._lock = threading.Condition()
        self._closing = threading.Event()
        self._results = Results()
        self._loading: dict[str, str] = {}
        self._held: dict[str, tuple[str, str]] = {}
        self._lost = ""
        self._stillborn = False
        self._register(connection)
        self._order = DeviceOrder(registration.mark, self._on_broken) if registration.mark else None

    @property
    def lost(self) -> str:
        """Why there is no agent at present; empty if there is one."""
        with self._lock:
            return self._lost

    def begin(self, step: Step) -> None:
        """A step begins; called before it gives the GPU any work."""
        if self._order is not None:
            self._order.begin(step.number)

    def execute(self, orders: Orders, step: Step) -> None:
        """Pass one step's orders on, each as soon as the GPU is past what it depends on."""
        before = step.number - 1
        for hold in orders.holds:
            self._hold(hold, step.written.get(hold.request, before))
        for load in orders.loads:
            self._load(load, before)
        for request in orders.aborts:
            self._after(before, partial(self._connection.abort, wire_id(request)))

    def results(self, idle: bool) -> Results:
        """What ended since the last call.

        Args:
            idle: the step computes nothing, so it may wait a moment for a transfer that it was taken for.
        """
        with self._lock:
            if idle and (self._loading or self._held) and self._results == Results():
                self._lock.wait(NAP_SECONDS)
            results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        """Leave the agent."""
        self._closing.set()
        if self._order is not None:
            self._order.close()
        self._connection.close()

    def _register(self, connection: EngineRank) -> None:
        registration = self._registration
        connection.register(
            registration.rank,
            registration.factors,
            registration.memory,
            registration.fds,
            registration.regions,
            registration.placement,
            self._on_message,
            partial(self._on_lost, connection),
            registration.device,
        )

    def _after(self, step: int, send: Callable[[], None]) -> None:
        if self._order is None:
            send()
        else:
            self._order.after(step, send)

    def _hold(self, order: HoldOrder, written: int) -> None:
        request = wire_id(order.request)
        with self._lock:
            if self._lost:
                # Nobody can read it any more; vLLM may have its pages back.
                self._results.sent.add(order.request)
                return
            self._held[request] = (order.request, order.generation)
            connection = self._connection
        hold = Hold(request, order.generation, order.tokens, self._pages(order.blocks))
        # Bound to this connection: what was asked for before it was lost must not reach the next.
        self._after(written, partial(connection.hold, hold))

    def _load(self, order: LoadOrder, before: int) -> None:
        request = wire_id(order.request)
        waits = order.start < order.tokens
        with self._lock:
            reason = order.refusal or self._lost
            if reason:
                log.error("load of %s refused: %s", order.request, reason)
                if waits:
                    self._results.received.add(order.request)
                    self._results.failed.add(order.request)
                return
            if waits:
                self._loading[request] = order.request
            connection = self._connection
        source = SourceRef(order.replica, order.source_request, order.generation, order.host, order.port)
        load = Load(request, source, order.tokens, order.start, self._pages(order.blocks))
        self._after(before, partial(connection.load, load))

    def _pages(self, blocks: Blocks) -> Pages:
        groups = blocks or tuple(() for _ in self._tables)
        return {table: pack_pages(list(ids)) for table, ids in zip(self._tables, groups, strict=True)}

    def _on_message(self, message: EngineMessage) -> None:
        with self._lock:
            self._lock.notify_all()
            match message:
                case Held():
                    return
                case Loaded():
                    self._load_ended(message.request, well=True)
                case Failed():
                    self._failed(message)
                case Freed():
                    self._load_ended(message.request, well=False)
                case Released():
                    held = self._held.get(message.request)
                    if held is not None and held[1] == message.generation:
                        del self._held[message.request]
                        self._results.sent.add(held[0])

    def _failed(self, message: Failed) -> None:
        log.error("request %s failed: %s: %s", message.request, message.code, message.message)
        if message.request in self._loading:
            if message.freed:
                self._load_ended(message.request, well=False)
        elif (held := self._held.pop(message.request, None)) is not None:
            self._results.sent.add(held[0])

    def _load_ended(self, wire: str, well: bool) -> None:
        request = self._loading.pop(wire, None)
        if request is not None:
            self._results.received.add(request)
            if not well:
                self._results.failed.add(request)

    def _on_broken(self, reason: str) -> None:
        """The GPU has failed: its memory is not to be served any more, by this agent or its next life."""
        log.error("%s; leaving the agent", reason)
        self._closing.set()
        self._connection.cut()

    def _on_lost(self, connection: EngineRank, reason: str) -> None:
        """The agent is gone, and with it whoever could write into or read from the cache."""
        with self._lock:
            if connection is not self._connection:
                self._stillborn = True
                return
            if not self._closing.is_set():
                log.error("the agent is gone: %s", reason)
            self._lost = f"the agent is gone: {reason}"
            for wire in list(self._loading):
                self._load_ended(wire, well=False)
            self._results.sent.update(request for request, _ in self._held.values())
            self._held.clear()
            self._lock.notify_all()
        if self._again is not None:
            self._reconnect(self._again, connection.loaded.plan.digest)

    def _reconnect(self, again: Callable[[], EngineRank], digest: str) -> None:
        """Register with the agent's next life; runs on the thread of the connection that was lost."""
        pause = _RECONNECT_FIRST
        while not self._closing.wait(pause):
            pause = min(2 * pause, _RECONNECT_MOST)
            try:
                connection = again()
                if connection.loaded.plan.digest != digest:
                    connection.close()
                    raise RegistrationRefused(
                        "PlanMismatch", f"the agent has plan {connection.loaded.plan.digest}, this engine {digest}"
                    )
                self._register(connection)
            except OSError:
                # Not there yet.
                continue
            except AgentError as error:
                log.warning("the restarted agent refuses this engine: %s", error)
                continue
            with self._lock:
                if self._stillborn:
                    self._stillborn = False
                    continue
                self._connection, self._lost = connection, ""
            log.warning("registered with the restarted agent")
            return
