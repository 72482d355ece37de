"""The synthetic engine of one pod: ranks registered with the agent, requests prefilled or decoded."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from disagg_agent.cards import Placement
from disagg_agent.engine_client import EngineMessage, EngineRank
from disagg_agent.engines.synthetic.blocks import BlockAllocator, Ids
from disagg_agent.engines.synthetic.content import request_seed
from disagg_agent.engines.synthetic.pool import RankPool
from disagg_agent.errors import AgentError
from disagg_agent.messages import Failed, Freed, Held, Hold, Load, Loaded, Released, SourceRef, pack_pages
from disagg_plan.pairing import blocks_for
from disagg_plan.wire import Side

log = logging.getLogger(__name__)


class EngineError(AgentError):
    """A request that the engine could not serve; `code` and message go to the client."""


@dataclass(frozen=True)
class EngineConfig:
    """What a pod tells its engine.

    Attributes:
        socket: the agent's Unix socket.
        factors: compatibility factors that every rank reports.
        pages: pages of every block table; differs freely between replicas.
        placement: where the movers live.
        seed: order in which pages are handed out.
    """

    socket: Path
    factors: Mapping[str, Any]
    pages: int
    placement: Placement
    seed: int


@dataclass
class Decoded:
    """Outcome of a decode request."""

    moved_bytes: int
    verified_bytes: int
    wrong_bytes: int
    transfer_seconds: float


@dataclass
class _Request:
    """A request that the agent works on: one answer per rank."""

    answers: dict[int, asyncio.Future[Held | Loaded]]
    freed: dict[int, asyncio.Event]
    sent: bool = False


class SyntheticEngine:
    """Prefills (fills pages and holds them) or decodes (loads pages, checks every byte), as its agent's role says."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.lost: str = ""
        self.ranks: list[EngineRank] = []
        self.pools: list[RankPool] = []
        self._requests: dict[str, _Request] = {}
        self._owned: dict[str, dict[str, Ids]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._work = ThreadPoolExecutor(max_workers=2, thread_name_prefix="engine-work")

    async def start(self) -> None:
        """Connect and register every rank.

        Raises:
            AgentError: the agent refuses a rank.
            OSError: no agent listens.
        """
        self._loop = asyncio.get_running_loop()
        first = await asyncio.to_thread(EngineRank, self.config.socket)
        self.welcome = first.welcome
        self.plan = first.loaded.plan
        self.side: Side = first.loaded.side(first.welcome.role)
        self._tables = {group.name: group.table for group in self.plan.groups}
        self._block = {
            self._tables[name]: self.side.pages[index].block_tokens or 1
            for rank in self.side.ranks
            for name, index in rank.pages.items()
        }
        self.blocks = BlockAllocator(self.plan.tables, self.config.pages, self.config.seed)
        connections = [first]
        for _ in range(1, len(self.side.ranks)):
            connections.append(await asyncio.to_thread(EngineRank, self.config.socket))
        self.ranks = connections
        self.pools = list(
            await asyncio.gather(
                *(asyncio.to_thread(self._register, connection, rank) for rank, connection in enumerate(connections))
            )
        )
        log.info("registered", extra={"ranks": len(self.ranks), "pages": self.config.pages})

    def _register(self, connection: EngineRank, number: int) -> RankPool:
        pool = RankPool(self.side, number, self.config.pages, self._tables)
        connection.register(
            number,
            self.config.factors,
            [pool.segment],
            [pool.fd],
            pool.regions,
            self.config.placement,
            self._threadsafe(lambda message: self._on_message(number, message)),
            self._threadsafe(self._on_lost),
        )
        return pool

    def close(self) -> None:
        """Leave the agent."""
        for connection in self.ranks:
            connection.close()
        self._work.shutdown(cancel_futures=True)

    # Requests.

    async def prefill(self, request: str, tokens: int) -> dict[str, Any]:
        """Compute (fill) a request's cache and put it under a lease.

        Returns:
            `kv_transfer_params` for the decode side, with the names that routers pass through.

        Raises:
            EngineError: with the reason.
        """
        self._check_alive()
        if request in self._requests:
            raise EngineError("DuplicateRequest", f"request {request} is being served already")
        ids = await self._take(tokens)
        generation = uuid4().hex
        pending = self._begin(request)
        self._owned[request] = ids
        try:
            await self._each_pool(lambda pool: pool.fill(request_seed(request), ids, 0, tokens))
            pages = {table: pack_pages(blocks) for table, blocks in ids.items()}
            pending.sent = True
            for connection in self.ranks:
                connection.hold(Hold(request, generation, tokens, pages))
            await self._answers(pending)
        finally:
            self._release_later(request, pending)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [ids[table].tolist() for table in self.plan.tables],
            "remote_engine_id": self.welcome.replica,
            "remote_request_id": request,
            "remote_host": self.welcome.side_host,
            "remote_port": self.welcome.side_port,
            "tp_size": self.side.parallelism.tensor,
            "pp_size": self.side.parallelism.pipeline,
            "dcp_size": self.side.parallelism.decode_context,
            "remote_num_tokens": tokens,
            "disagg": {"generation": generation, "plan": self.plan.digest},
        }

    async def decode(self, request: str, tokens: int, cached: int, source: SourceRef) -> Decoded:
        """Load a request's cache and check every byte of it.

        Args:
            cached: tokens that this replica is taken to hold already (a prefix-cache hit); they are not moved.

        Raises:
            EngineError: with the reason; nothing that failed is ever reported as loaded.
        """
        self._check_alive()
        seed = request_seed(source.request)
        ids = await self._take(tokens)
        pending = self._begin(request)
        self._owned[request] = ids
        try:
            await self._each_pool(lambda pool: pool.fill(seed, ids, 0, cached))
            missing = {table: blocks[self._first_missing(table, cached, tokens) :] for table, blocks in ids.items()}
            pages = {table: pack_pages(blocks) for table, blocks in missing.items()}
            pending.sent = True
            for connection in self.ranks:
                connection.load(Load(request, source, tokens, cached, pages))
            answers = await self._answers(pending)
            checked = await self._each_pool(lambda pool: pool.verify(seed, ids, tokens))
            loaded = [answer for answer in answers if isinstance(answer, Loaded)]
            return Decoded(
                moved_bytes=sum(answer.bytes for answer in loaded),
                verified_bytes=sum(count for count, _ in checked),
                wrong_bytes=sum(wrong for _, wrong in checked),
                transfer_seconds=max(answer.seconds for answer in loaded),
            )
        finally:
            self._release_later(request, pending)

    async def stray_bytes(self) -> int:
        """Bytes that somebody wrote outside the pages of living requests, on all ranks."""
        owned = {
            table: np.concatenate([np.empty(0, dtype=np.int64), *(ids[table] for ids in self._owned.values())])
            for table in self.plan.tables
        }
        return sum(await self._each_pool(lambda pool: pool.stray_bytes(owned)))

    def _first_missing(self, table: str, cached: int, tokens: int) -> int:
        return blocks_for(cached, self._block[table]) if cached == tokens else cached // self._block[table]

    async def _take(self, tokens: int) -> dict[str, Ids]:
        counts = {table: blocks_for(tokens, block) for table, block in self._block.items()}
        try:
            return await self.blocks.take(counts)
        except ValueError as error:
            raise EngineError("RequestTooLong", str(error)) from error

    def _begin(self, request: str) -> _Request:
        if request in self._requests:
            raise EngineError("DuplicateRequest", f"request {request} is being served already")
        ranks = range(len(self.ranks))
        pending = _Request(
            {rank: self._loop.create_future() for rank in ranks}, {rank: asyncio.Event() for rank in ranks}
        )
        self._requests[request] = pending
        return pending

    async def _answers(self, pending: _Request) -> list[Held | Loaded]:
        results = await asyncio.gather(*pending.answers.values(), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    def _release_later(self, request: str, pending: _Request) -> None:
        if not pending.sent:
            # The agent never heard of it: nobody else can hold its pages.
            for event in pending.freed.values():
                event.set()
        task = asyncio.create_task(self._release(request, pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report)

    async def _release(self, request: str, pending: _Request) -> None:
        """Give pages back once no rank has a use for them: on prefill after `Released`, on decode after the last
        byte.
        """
        await asyncio.gather(*(event.wait() for event in pending.freed.values()))
        self._requests.pop(request, None)
        ids = self._owned.get(request)
        if ids is not None:
            await self._each_pool(lambda pool: pool.poison(ids))
            # Owned until it is poison again: a check for stray bytes in between would find the request's own.
            del self._owned[request]
            await self.blocks.give_back(ids)

    async def _each_pool(self, work: Callable[[RankPool], Any]) -> list[Any]:
        # Numpy gives up the interpreter lock, and the event loop must stay free for health and aborts.
        calls = [self._loop.run_in_executor(self._work, work, pool) for pool in self.pools]
        return list(await asyncio.gather(*calls))

    def _check_alive(self) -> None:
        if self.lost:
            raise EngineError("AgentGone", f"the connection to the agent is lost: {self.lost}")

    # Messages of the agent, brought onto the event loop.

    def _threadsafe(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        def deliver(argument: Any) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(call, argument)

        return deliver

    def _on_message(self, rank: int, message: EngineMessage) -> None:
        pending = self._requests.get(message.request)
        if pending is None:
            return
        future = pending.answers[rank]
        match message:
            case Held():
                _resolve(future, message)
            case Loaded():
                _resolve(future, message)
                pending.freed[rank].set()
            case Failed():
                if not future.done():
                    future.set_exception(EngineError(message.code, message.message))
                if message.freed:
                    pending.freed[rank].set()
            case Freed() | Released():
                if isinstance(message, Released) and message.reason != "completed":
                    log.warning("released", extra={"request": message.request, "reason": message.reason})
                pending.freed[rank].set()

    def _on_lost(self, reason: str) -> None:
        """The agent is gone, and with it every mover that could still write here."""
        self.lost = self.lost or reason
        for pending in list(self._requests.values()):
            for future in pending.answers.values():
                if not future.done():
                    future.set_exception(EngineError("AgentGone", f"the connection to the agent is lost: {reason}"))
            for event in pending.freed.values():
                event.set()


def _resolve(future: asyncio.Future[Held | Loaded], message: Held | Loaded) -> None:
    if not future.done():
        future.set_result(message)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("releasing pages failed", exc_info=task.exception())
