"""What a worker does: registers its cache with the agent, passes orders on, and collects what came of them.

A step only sends messages and reads what has arrived; nothing here waits for a transfer. A step that computes
nothing, taken only because a transfer is on its way, may nap until a message comes: the engine would spin through
such steps otherwise.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disagg_agent.engine_client import EngineMessage, EngineRank, Placement
from disagg_agent.engines.vllm.decisions import Blocks, HoldOrder, LoadOrder, Orders
from disagg_agent.messages import (
    Failed,
    Freed,
    Held,
    Hold,
    Load,
    Loaded,
    Pages,
    RegionDeclaration,
    Released,
    SourceRef,
    pack_pages,
)
from disagg_agent.segments import Memory
from disagg_plan.wire import Plan

log = logging.getLogger(__name__)

NAP_SECONDS = 0.005
"""Longest nap in a step that computes nothing; what a new request may have to wait."""


@dataclass(frozen=True)
class Registration:
    """A worker's cache as the agent wants it told."""

    rank: int
    factors: Mapping[str, Any]
    memory: Sequence[Memory]
    fds: Sequence[int]
    regions: Sequence[RegionDeclaration]
    placement: Placement


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
        )

    @staticmethod
    def connect(socket: Path, timeout: float) -> tuple[EngineRank, Plan]:
        """Connect to the agent; its plan says what to register."""
        connection = EngineRank(socket, timeout)
        return connection, connection.loaded.plan

    def execute(self, orders: Orders) -> None:
        """Pass one step's orders on."""
        for hold in orders.holds:
            self._hold(hold)
        for load in orders.loads:
            self._load(load)
        for request in orders.aborts:
            self._connection.abort(request)

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
        self._connection.close()

    def _hold(self, order: HoldOrder) -> None:
        with self._lock:
            if self._lost:
                # Nobody can read it any more; vLLM may have its pages back.
                self._results.sent.add(order.request)
                return
            self._held[order.request] = order.generation
        self._connection.hold(Hold(order.request, order.generation, order.tokens, self._pages(order.blocks)))

    def _load(self, order: LoadOrder) -> None:
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
        self._connection.load(Load(order.request, source, order.tokens, order.start, self._pages(order.blocks)))

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
