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
from pathlib import Path
from typing import Any

from disagg_agent.cards import Placement, RegionDeclaration
from disagg_agent.engine_client import EngineMessage, EngineRank
from disagg_agent.engines.vllm.decisions import Blocks, HoldOrder, LoadOrder, Orders
from disagg_agent.engines.vllm.ordering import DeviceOrder, Fence, Step
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
from disagg_plan.wire import Plan

log = logging.getLogger(__name__)

NAP_SECONDS = 0.005
"""Longest nap in a step that computes nothing; what a new request may have to wait."""


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
    """One worker's connection to its agent.

    Args:
        socket: the agent's Unix socket.
        tables: block table of each KV cache group of the engine, in its order.
        connection: an established connection.
    """

    def __init__(self, connection: EngineRank, registration: Registration, tables: Sequence[str]) -> None:
        self._connection = connection
        self._tables = tables
        self._lock = threading.Condition()
        self._results = Results()
        self._loading: dict[str, str] = {}
        self._held: dict[str, str] = {}
        self._lost = ""
        connection.register(
            registration.rank,
            registration.factors,
            registration.memory,
            registration.fds,
            registration.regions,
            registration.placement,
            self._on_message,
            self._on_lost,
            registration.device,
        )
        # A GPU that fails takes the connection along: the agent then hears that this rank is gone.
        self._order = DeviceOrder(registration.mark, lambda _: connection.cut()) if registration.mark else None

    @staticmethod
    def connect(socket: Path, timeout: float) -> tuple[EngineRank, Plan]:
        """Connect to the agent; its plan says what to register."""
        connection = EngineRank(socket, timeout)
        return connection, connection.loaded.plan

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
            self._after(before, partial(self._connection.abort, request))

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
        if self._order is not None:
            self._order.close()
        self._connection.close()

    def _after(self, step: int, send: Callable[[], None]) -> None:
        if self._order is None:
            send()
        else:
            self._order.after(step, send)

    def _hold(self, order: HoldOrder, written: int) -> None:
        with self._lock:
            if self._lost:
                # Nobody can read it any more; vLLM may have its pages back.
                self._results.sent.add(order.request)
                return
            self._held[order.request] = order.generation
        hold = Hold(order.request, order.generation, order.tokens, self._pages(order.blocks))
        self._after(written, partial(self._connection.hold, hold))

    def _load(self, order: LoadOrder, before: int) -> None:
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
                self._loading[order.request] = ""
        source = SourceRef(order.replica, order.source_request, order.generation, order.host, order.port)
        load = Load(order.request, source, order.tokens, order.start, self._pages(order.blocks))
        self._after(before, partial(self._connection.load, load))

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
                    if self._loading.pop(message.request, None) is not None:
                        self._results.received.add(message.request)
                case Failed():
                    self._failed(message)
                case Freed():
                    if self._loading.pop(message.request, None) is not None:
                        self._results.received.add(message.request)
                        self._results.failed.add(message.request)
                case Released():
                    if self._held.get(message.request) == message.generation:
                        del self._held[message.request]
                        self._results.sent.add(message.request)

    def _failed(self, message: Failed) -> None:
        log.error("request %s failed: %s: %s", message.request, message.code, message.message)
        if message.request in self._loading:
            if message.freed:
                del self._loading[message.request]
                self._results.received.add(message.request)
                self._results.failed.add(message.request)
        elif self._held.pop(message.request, None) is not None:
            self._results.sent.add(message.request)

    def _on_lost(self, reason: str) -> None:
        """The agent is gone, and with it whoever could write into or read from the cache."""
        log.error("the agent is gone: %s", reason)
        with self._lock:
            self._lost = f"the agent is gone: {reason}"
            self._results.received.update(self._loading)
            self._results.failed.update(self._loading)
            self._results.sent.update(self._held)
            self._loading.clear()
            self._held.clear()
