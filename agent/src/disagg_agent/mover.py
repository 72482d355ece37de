"""The mover: executes copies for one rank. One NIXL agent, and the one thread that owns it.

It lives in whichever process may register the rank's memory: the agent for host memory, the engine's worker for GPU
memory. Commands come in and events go out as values (`disagg_agent.messages`), so both places run this same code.

The thread sleeps on its queue while nothing is in flight and nobody has announced a transfer; then it costs nothing.
Otherwise it polls hard, and yields the interpreter and the core between polls.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from disagg_agent.cards import HOST, MoverCard, Place, RegionCard
from disagg_agent.descriptors import build_edge, indexes, pieces
from disagg_agent.errors import AgentError, FrameError, MoverError
from disagg_agent.messages import (
    Cancel,
    Connect,
    Connected,
    Disconnect,
    Move,
    Moved,
    MoverCommand,
    MoverEvent,
    MoveSource,
    Probe,
    Probed,
    Serve,
    unpack_pages,
)
from disagg_agent.mover_state import Link, Moving, Probing, State, Stream, is_over
from disagg_agent.nixl_port import NixlPort, named
from disagg_agent.segments import DeviceAccess
from disagg_plan.errors import RequestError
from disagg_plan.pairing import check_blocks, page_pairs
from disagg_plan.wire import Plan

log = logging.getLogger(__name__)

PROBE_BYTES = 64
"""Read by a probe: enough to prove the path; bandwidth is another measurement."""

_SPIN_SECONDS = 0.002
_NAP_SECONDS = 0.00005


class Mover:
    """Moves bytes for one rank.

    Args:
        plan: the proven plan.
        role: `prefill` (its memory is read) or `decode` (it reads).
        rank: the rank whose memory this is.
        segments: `(address, bytes)` of the memory to register.
        regions: where each (group, layer, region) lies in it.
        emit: called from the mover's thread with each event; must not block.
        place: where all of that memory is.
        device: what GPU memory needs besides; None for host memory.

    Raises:
        MoverError: NIXL is not usable or refuses the memory; `NoScratch` for GPU memory without usable `device`.
    """

    def __init__(
        self,
        plan: Plan,
        role: str,
        rank: int,
        segments: Sequence[tuple[int, int]],
        regions: Sequence[RegionCard],
        emit: Callable[[MoverEvent], None],
        place: Place = HOST,
        device: DeviceAccess | None = None,
    ) -> None:
        self._plan = plan
        self._role = role
        self._rank = rank
        self._regions = list(regions)
        self._emit = emit
        self._place = place
        self._device = device
        self._state = State()
        self._commands: queue.SimpleQueue[MoverCommand | None] = queue.SimpleQueue()
        self._pool = _table_pages(plan, regions)
        self._ready: queue.SimpleQueue[MoverCard | MoverError] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(list(segments),), name=f"mover-{role}-{rank}", daemon=True
        )
        self._thread.start()
        outcome = self._ready.get()
        if isinstance(outcome, MoverError):
            raise outcome
        self.card = outcome

    def submit(self, command: MoverCommand) -> None:
        """Queue a command; never blocks, any thread."""
        self._commands.put(command)

    def close(self) -> None:
        """End the thread and with it the NIXL agent: after this no byte moves."""
        self._commands.put(None)
        self._thread.join()

    # Everything below runs on the mover's own thread.

    def _run(self, segments: list[tuple[int, int]]) -> None:
        try:
            self._scratch = self._enter()
            self._port = NixlPort(f"{self._role}-{self._rank}-{uuid4().hex}")
            self._port.register([*segments, (self._scratch, PROBE_BYTES)], self._place)
            self._ready.put(MoverCard(self._port.name, self._port.metadata(), self._regions, self._place))
        except MoverError as error:
            self._ready.put(error)
            return
        while self._take_commands():
            self._poll()
        # Handles keep the NIXL agent alive, and only its end stops what is in flight: drop them first.
        self._state = State()
        del self._port

    def _enter(self) -> int:
        """Make this thread fit for the memory; the address of the scratch memory of probes, which lies beside it."""
        if self._place.kind == "DRAM":
            self._host_scratch = np.zeros(PROBE_BYTES, dtype=np.uint8)
            return int(self._host_scratch.ctypes.data)
        access = self._device
        if access is None or access.scratch.size < PROBE_BYTES or access.scratch.place != self._place:
            raise MoverError(
                "NoScratch", f"a mover of {self._place} needs {PROBE_BYTES} bytes of scratch memory there for probes"
            )
        with named("DeviceUnavailable"):
            access.enter()
        return access.scratch.address

    def _take_commands(self) -> bool:
        """Handle what is queued; wait for more only when nothing is going on. False once closed."""
        block = not self._state.busy
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            block = False
            self._handle(command)
            self._last_change = time.monotonic()

    def _handle(self, command: MoverCommand) -> None:
        match command:
            case Connect():
                self._connect(command)
            case Disconnect():
                self._drop(command.link)
            case Probe():
                self._probe(command)
            case Move():
                self._start(command)
            case Cancel():
                for move in self._state.moves:
                    if move.id == command.id:
                        move.fail(MoverError("Cancelled", "the request was given up"))
            case Serve():
                self._state.serving = max(0, self._state.serving + command.change)

    def _connect(self, command: Connect) -> None:
        try:
            edge = next(
                edge for edge in self._plan.edges if edge.source == command.source and edge.destination == self._rank
            )
        except StopIteration:
            text = f"the plan has no edge from prefill rank {command.source} to decode rank {self._rank}"
            self._emit(Connected(command.link, "NoEdge", text))
            return
        card = command.card
        try:
            descriptors = build_edge(
                self._plan, edge, card.regions, self._regions, card.place.device, self._place.device
            )
            self._drop(command.link)
            self._port.connect(card.metadata, card.name)
            try:
                self._state.links[command.link] = Link(
                    source=command.source,
                    card=card,
                    edge=descriptors,
                    local=self._port.prepare(descriptors.dst_rows, None, self._place.kind),
                    remote=self._port.prepare(descriptors.src_rows, card.name, card.place.kind),
                    pool=_table_pages(self._plan, card.regions),
                )
            except MoverError:
                self._forget(card.name)
                raise
        except MoverError as error:
            self._emit(Connected(command.link, error.code, error.message))
            return
        self._emit(Connected(command.link, "", ""))

    def _drop(self, name: str) -> None:
        link = self._state.links.pop(name, None)
        if link is None:
            return
        for move in self._state.moves:
            if any(stream.link is link for stream in move.streams):
                move.fail(MoverError("PeerGone", f"prefill rank {link.source} is no longer connected"))
        self._state.leaving.append(link)
        self._forget_leaving()

    def _forget_leaving(self) -> None:
        """Let NIXL forget the peers of dropped links that have nothing in flight any more."""
        for link in list(self._state.leaving):
            streams = (stream for move in self._state.moves for stream in move.streams)
            if not any(stream.link is link and stream.handle is not None for stream in streams):
                self._state.leaving.remove(link)
                self._forget(link.card.name)

    def _forget(self, peer: str) -> None:
        if any(link.card.name == peer for link in (*self._state.links.values(), *self._state.leaving)):
            return
        try:
            self._port.disconnect(peer)
        except MoverError as error:
            # A peer that died first is already forgotten by NIXL; nothing is left to undo.
            log.info("disconnect", extra={"peer": peer, "code": error.code, "detail": error.message})

    def _probe(self, command: Probe) -> None:
        link = self._state.links.get(command.link)
        if link is None:
            self._emit(Probed(command.link, 0.0, "NotConnected", "the source is not connected"))
            return
        region, theirs, ours = link.card.regions[0], link.card.place, self._place
        page = self._plan.source.pages[self._plan.source.ranks[link.source].pages[region.group]]
        size = min(PROBE_BYTES, page.regions[region.region].bytes)
        try:
            local = self._port.prepare(_one_row(self._scratch, size, ours.device), None, ours.kind)
            remote = self._port.prepare(_one_row(region.base, size, theirs.device), link.card.name, theirs.kind)
            zero = np.zeros(1, dtype=np.int32)
            started = time.monotonic()
            handle, ended = self._port.post("READ", local, zero, remote, zero)
        except MoverError as error:
            self._emit(Probed(command.link, 0.0, error.code, error.message))
            return
        if ended:
            self._emit(Probed(command.link, time.monotonic() - started, "", ""))
        else:
            self._state.probes.append(Probing(command.link, handle, started))

    def _start(self, command: Move) -> None:
        started = time.monotonic()
        try:
            streams = [self._stream(command, source) for source in command.sources]
        except (AgentError, RequestError) as error:
            self._emit(Moved(command.id, 0, 0.0, error.code, error.message))
            return
        self._state.moves.append(Moving(command.id, started, streams))

    def _stream(self, command: Move, source: MoveSource) -> Stream:
        link = self._state.links.get(source.link)
        if link is None:
            raise MoverError("NotConnected", f"the source {source.link} is not connected")
        found = []
        for table, rows in link.edge.tables.items():
            src_block, dst_block, sub_tokens = _block_sizes(self._plan, link.source, self._rank, table)
            src_ids = check_blocks(
                _pages(source.pages, table),
                command.tokens,
                src_block,
                link.pool[table],
                f"prefill rank {link.source} table {table}",
                unique=True,
            )
            dst_ids = check_blocks(
                _pages(command.pages, table),
                command.tokens - command.start,
                dst_block,
                self._pool[table],
                f"decode rank {self._rank} table {table}",
                unique=True,
            )
            pairs = page_pairs(sub_tokens, src_ids, src_block, dst_ids, dst_block, command.start, command.tokens)
            found.append(indexes(rows, pairs))
        return Stream(link, deque(pieces(found)))

    def _poll(self) -> None:
        changed = self._poll_probes()
        for move in self._state.moves:
            for stream in move.streams:
                changed |= self._advance(move, stream)
        for move in [move for move in self._state.moves if is_over(move)]:
            self._state.moves.remove(move)
            failure = move.failure
            self._emit(
                Moved(
                    move.id,
                    move.bytes,
                    time.monotonic() - move.started,
                    failure.code if failure else "",
                    failure.message if failure else "",
                )
            )
            changed = True
        if changed and self._state.leaving:
            self._forget_leaving()
        if self._state.serving:
            self._port.progress()
        if self._state.busy and not changed:
            self._yield()
        elif changed:
            self._last_change = time.monotonic()

    def _yield(self) -> None:
        """Give up the core: at once while something may happen any moment, for a nap when it has been quiet."""
        if time.monotonic() - self._last_change < _SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(_NAP_SECONDS)

    def _poll_probes(self) -> bool:
        over = []
        for probe in self._state.probes:
            code = message = ""
            try:
                if not self._port.ended(probe.handle):
                    continue
                self._port.release(probe.handle)
            except MoverError as error:
                code, message = error.code, error.message
            over.append(probe)
            self._emit(Probed(probe.link, time.monotonic() - probe.started, code, message))
        for probe in over:
            self._state.probes.remove(probe)
        return bool(over)

    def _advance(self, move: Moving, stream: Stream) -> bool:
        """Poll one stream and post its next piece; whether anything happened."""
        changed = False
        try:
            if stream.handle is not None:
                if not self._port.ended(stream.handle):
                    return False
                self._finish(move, stream)
                changed = True
            if stream.pieces:
                piece = stream.pieces.popleft()
                link = stream.link
                stream.handle, ended = self._port.post("READ", link.local, piece.dst, link.remote, piece.src)
                stream.in_flight = piece.bytes
                if ended:
                    self._finish(move, stream)
                changed = True
        except MoverError as error:
            stream.handle = None
            move.fail(error)
            changed = True
        return changed

    def _finish(self, move: Moving, stream: Stream) -> None:
        handle, stream.handle = stream.handle, None
        move.bytes += stream.in_flight
        self._port.release(handle)


def _one_row(address: int, size: int, device: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array([[address, size, device, size, 1]], dtype=np.uint64)


def _pages(pages: dict[str, bytes], table: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    if table not in pages:
        raise FrameError("BadPages", f"the request has no page ids for table {table}")
    return unpack_pages(pages[table])


def _table_pages(plan: Plan, regions: Sequence[RegionCard]) -> dict[str, int]:
    return {plan.group(region.group).table: region.pages for region in regions}


def _block_sizes(plan: Plan, source: int, destination: int, table: str) -> tuple[int, int, int]:
    """Block sizes of both ranks and the sub-block size of a table; equal for all its groups."""
    group = next(
        group for group in plan.groups if group.table == table and group.name in plan.source.ranks[source].pages
    )
    src = plan.source.pages[plan.source.ranks[source].pages[group.name]]
    dst = plan.destination.pages[plan.destination.ranks[destination].pages[group.name]]
    return src.block_tokens or 1, dst.block_tokens or 1, group.sub_tokens or 1
