"""Real movers, real agents and real engine clients in one process, and a scripted peer that can misbehave."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

from disagg_agent.agent import Agent, AgentConfig
from disagg_agent.cards import HOST, MoverCard, Place, RankCard
from disagg_agent.engine_client import EngineRank
from disagg_agent.engines.synthetic.content import request_seed
from disagg_agent.engines.synthetic.pool import RankPool
from disagg_agent.frames import Codec
from disagg_agent.handshake import Address
from disagg_agent.http import build_app
from disagg_agent.loads import link_name
from disagg_agent.messages import (
    PROTOCOL,
    Connect,
    Connected,
    Hello,
    Hold,
    Load,
    Move,
    Moved,
    MoveSource,
    Probe,
    Probed,
    Ranks,
    Serve,
    SideChannel,
    SourceRef,
    pack_pages,
)
from disagg_agent.mover import Mover
from disagg_agent.plan_loader import LoadedPlan, check_plan
from disagg_agent.runtime import serve_http
from disagg_agent.segments import region_cards
from disagg_plan import wire
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.pairing import blocks_for

SECONDS = 20.0
"""How long anything may take before a test gives up."""

Role = Literal["prefill", "decode"]
Ids = Mapping[str, Sequence[int]]
REPLICA = "prefill-0"


def until(condition: Callable[[], Any], what: str, seconds: float = SECONDS) -> Any:
    """The first true value of a condition, within a deadline."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {seconds:g} s")
        pause.wait(0.002)
    return value


def pages(ids: Ids) -> dict[str, bytes]:
    return {table: pack_pages(list(blocks)) for table, blocks in ids.items()}


def arrays(ids: Ids) -> dict[str, np.ndarray]:
    return {table: np.array(blocks, dtype=np.int64) for table, blocks in ids.items()}


def tables_of(plan: wire.Plan) -> dict[str, str]:
    return {group.name: group.table for group in plan.groups}


class Inbox:
    """What a thread of the code under test said, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()

    def put(self, message: Any) -> None:
        self._queue.put(message)

    def get(self, wanted: type | tuple[type, ...] = object, seconds: float = SECONDS) -> Any:
        """The next message, which must be of that type."""
        try:
            message = self._queue.get(timeout=seconds)
        except queue.Empty:
            pytest.fail(f"no {wanted} within {seconds:g} s")
        assert isinstance(message, wanted), message
        return message

    def maybe(self, seconds: float) -> Any:
        """The next message, or None if none comes in time."""
        try:
            return self._queue.get(timeout=seconds)
        except queue.Empty:
            return None

    def none_for(self, seconds: float) -> None:
        """Assert that nothing comes for a while."""
        with contextlib.suppress(queue.Empty):
            pytest.fail(f"unexpected {self._queue.get(timeout=seconds)}")


# Movers.


class MoverRank:
    """One rank: its memory and its mover."""

    def __init__(self, loaded: LoadedPlan, role: Role, rank: int, count: int, place: Place = HOST) -> None:
        self.rank = rank
        self.pool = RankPool(loaded.side(role), rank, count, tables_of(loaded.plan))
        os.close(self.pool.fd)
        segment = self.pool.segment
        self.events = Inbox()
        self.mover = Mover(
            loaded.plan,
            role,
            rank,
            [(segment.address, segment.size)],
            region_cards([segment], self.pool.regions),
            self.events.put,
            place,
        )
        self.card: MoverCard = self.mover.card

    def ask(self, command: Any, wanted: type, seconds: float = SECONDS) -> Any:
        self.mover.submit(command)
        return self.events.get(wanted, seconds)

    def connect(self, source: MoverRank, link: str | None = None, card: MoverCard | None = None) -> Connected:
        name = link or link_name(REPLICA, source.rank)
        return self.ask(Connect(name, source.rank, card or source.card), Connected)

    def untouched(self) -> bool:
        """Whether no byte was ever written here."""
        return self.pool.stray_bytes({table: np.empty(0, np.int64) for table in set(self.pool._tables.values())}) == 0


class Movers:
    """One mover for every rank of a plan, prefill and decode."""

    def __init__(
        self,
        plan: wire.Plan,
        source_pages: int = 16,
        destination_pages: int = 20,
        prefill_place: Place = HOST,
        decode_place: Place = HOST,
    ) -> None:
        self.loaded = check_plan(wire.encode(plan), None)
        self.plan = self.loaded.plan
        self.source_pages, self.destination_pages = source_pages, destination_pages
        self.places: dict[Role, Place] = {"prefill": prefill_place, "decode": decode_place}
        self.prefill = [self.new("prefill", rank) for rank in range(len(plan.source.ranks))]
        self.decode = [self.new("decode", rank) for rank in range(len(plan.destination.ranks))]

    def new(self, role: Role, rank: int) -> MoverRank:
        count = self.source_pages if role == "prefill" else self.destination_pages
        return MoverRank(self.loaded, role, rank, count, self.places[role])

    def connect(self) -> None:
        """Connect and probe every edge, with the sources driving their progress meanwhile."""
        with self.serving():
            for edge in self.plan.edges:
                source, destination = self.prefill[edge.source], self.decode[edge.destination]
                assert destination.connect(source) == Connected(link_name(REPLICA, edge.source), "", "")
                probed = destination.ask(Probe(link_name(REPLICA, edge.source)), Probed)
                assert probed.code == "", probed
                assert 0 < probed.seconds < SECONDS

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        for source in self.prefill:
            source.mover.submit(Serve(+1))
        yield
        for source in self.prefill:
            source.mover.submit(Serve(-1))

    def fill(self, request: str, ids: Ids, tokens: int) -> None:
        for source in self.prefill:
            source.pool.fill(request_seed(request), arrays(ids), 0, tokens)

    def move(self, rank: int, name: str, tokens: int, start: int, source: Ids, destination: Ids) -> Move:
        """The move of a decode rank."""
        streams = [
            MoveSource(link_name(REPLICA, source_rank), pages(source)) for source_rank in self.loaded.sources[rank]
        ]
        return Move(name, tokens, start, pages(destination), streams)

    def moved(self, tokens: int, start: int, source: Ids, destination: Ids) -> list[Moved]:
        """Move on every decode rank at once."""
        with self.serving():
            for one in self.decode:
                one.mover.submit(self.move(one.rank, f"{one.rank}/r", tokens, start, source, destination))
            return [one.events.get(Moved) for one in self.decode]

    def close(self) -> None:
        for one in (*self.decode, *self.prefill):
            one.mover.close()


# Agents and engines.


class LoopThread:
    """An event loop on a thread of its own, as an agent's process has it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _loop, context: self.errors.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Any, seconds: float = SECONDS) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def call(self, function: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Call on the loop's thread."""

        async def main() -> Any:
            return function()

        return self.run(main(), seconds)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self.loop.close()
        assert self.errors == [], "the event loop saw exceptions that nobody handled"


class RunningAgent:
    """An agent with its engine socket, side channel and HTTP."""

    def __init__(self, threads: LoopThread, loaded: LoadedPlan, folder: Path, config: AgentConfig) -> None:
        self.threads = threads
        self.loaded = loaded
        self.config = config
        self._http = folder / f"{config.pod}.http"
        self.agent, self._stop, self._task, self._runner = threads.run(self._start())
        until(lambda: self.agent.port and config.socket.exists(), "the agent listens")

    async def _start(self) -> Any:
        agent = Agent(self.config, self.loaded)
        stop = asyncio.Event()
        task = asyncio.create_task(agent.run(stop))
        return agent, stop, task, await serve_http(build_app(agent), f"unix:{self._http}")

    @property
    def port(self) -> int:
        return self.agent.port

    def introduce(self, *others: RunningAgent) -> None:
        peers = [(one.config.role, one.config.replica, Address(one.config.host, one.port)) for one in others]
        self.threads.call(lambda: self.agent.introduce(peers))

    def peers(self) -> list[dict[str, Any]]:
        return self.threads.call(self.agent.peers)

    def ready_for(self, replica: str = REPLICA) -> None:
        """Wait until a peer of that replica is ready."""
        until(
            lambda: any(one["replica"] == replica and one["state"] == "ready" for one in self.peers()),
            f"{replica} is ready",
        )

    def transfers(self) -> dict[str, int]:
        return self.threads.call(self.agent.transfers)

    def get(self, path: str) -> tuple[int, str]:
        """Ask over HTTP as a kubelet or an operator does."""
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("agent")
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(SECONDS)
        connection.sock.connect(str(self._http))
        try:
            connection.request(method, path, body if isinstance(body, str | None) else json.dumps(body))
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def stop(self) -> None:
        if self._task.done():
            return
        self.threads.call(self._stop.set)
        self.threads.run(asyncio.wait_for(asyncio.shield(self._task), SECONDS))
        self.threads.run(self._runner.cleanup())

    def refused(self, code: str) -> float:
        """How often the agent has refused something with this code."""
        value = self.agent.metrics.registry.get_sample_value("disagg_refusals_total", {"code": code})
        return value or 0.0


class EngineWorker:
    """One engine rank, its memory, and what its agent said."""

    def __init__(self, agent: RunningAgent, rank: int, count: int, placement: str = "agent") -> None:
        self.agent = agent
        self.rank = rank
        self.placement = placement
        self.inbox, self.lost = Inbox(), Inbox()
        self._closed = False
        self.client = EngineRank(agent.config.socket, SECONDS)
        loaded = self.client.loaded
        self.pool = RankPool(loaded.side(self.client.welcome.role), rank, count, tables_of(loaded.plan))

    def register(self, rank: int | None = None, **changes: Any) -> None:
        """Register, with parts of the registration changed."""
        right: dict[str, Any] = {
            "factors": self.client.loaded.expected_factors(self.client.welcome.role),
            "segments": [self.pool.segment],
            "fds": [self.pool.fd],
            "regions": self.pool.regions,
            "placement": self.placement,
        }
        self.client.register(
            self.rank if rank is None else rank,
            **{**right, **changes},
            on_message=self.inbox.put,
            on_lost=self.lost.put,
        )

    def close(self) -> None:
        self.client.close()
        if not self._closed:
            self._closed = True
            os.close(self.pool.fd)


class Engine:
    """All ranks of a replica, as an engine has them."""

    def __init__(self, agent: RunningAgent, count: int, placement: str = "agent", **changes: Any) -> None:
        self.agent = agent
        self.plan = agent.loaded.plan
        side = agent.loaded.side(agent.config.role)
        self.blocks = {
            tables_of(self.plan)[name]: side.pages[index].block_tokens or 1
            for rank in side.ranks
            for name, index in rank.pages.items()
        }
        self.workers = [EngineWorker(agent, rank, count, placement) for rank in range(len(side.ranks))]
        for worker in self.workers:
            worker.register(**changes)

    def ids(self, tokens: int, first: int = 0, step: int = 1) -> dict[str, list[int]]:
        """Pages for a request, in falling order."""
        return {
            table: [first + step * index for index in range(blocks_for(tokens, block))][::-1]
            for table, block in self.blocks.items()
        }

    def fill(self, request: str, ids: Ids, tokens: int, start: int = 0) -> None:
        for worker in self.workers:
            worker.pool.fill(request_seed(request), arrays(ids), start, tokens)

    def hold(self, request: str, generation: str, tokens: int, ids: Ids) -> None:
        for worker in self.workers:
            worker.client.hold(Hold(request, generation, tokens, pages(ids)))

    def load(self, name: str, ref: SourceRef, tokens: int, ids: Ids, start: int = 0) -> None:
        for worker in self.workers:
            worker.client.load(Load(name, ref, tokens, start, pages(ids)))

    def abort(self, name: str) -> None:
        for worker in self.workers:
            worker.client.abort(name)

    def expect(self, wanted: type, seconds: float = SECONDS) -> list[Any]:
        """The next message of every rank."""
        return [worker.inbox.get(wanted, seconds) for worker in self.workers]

    def wrong_bytes(self, request: str, ids: Ids, tokens: int) -> int:
        return sum(worker.pool.verify(request_seed(request), arrays(ids), tokens)[1] for worker in self.workers)

    def stray_bytes(self, ids: Ids | None = None) -> int:
        owned = arrays(ids) if ids else {table: np.empty(0, np.int64) for table in self.plan.tables}
        return sum(worker.pool.stray_bytes(owned) for worker in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@dataclass
class ScriptedPrefill:
    """A prefill agent of our own making on the side channel: real memory and movers, answers as the test says."""

    movers: Movers
    replica: str = REPLICA
    hello: dict[str, Any] = field(default_factory=dict)
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    codec: Codec[SideChannel] = field(default_factory=lambda: Codec(SideChannel))

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def accept(self, ranks: bool = True) -> socket.socket:
        """Take the next connection through its greetings."""
        self.listener.settimeout(SECONDS)
        sock, _ = self.listener.accept()
        sock.settimeout(SECONDS)
        plan = self.movers.plan
        ours = Hello(PROTOCOL, "prefill", self.replica, "scripted", "life", plan.digest, plan.compat.digest)
        self.say(sock, msgspec.structs.replace(ours, **self.hello))
        assert isinstance(self.hear(sock), Hello)
        if ranks:
            factors = self.movers.loaded.expected_factors("prefill")
            self.say(sock, Ranks([RankCard(one.rank, factors, one.card) for one in self.movers.prefill]))
        return sock

    def say(self, sock: socket.socket, message: Any) -> None:
        sock.sendall(self.codec.encode(message))

    def hear(self, sock: socket.socket, wanted: type | None = None) -> Any:
        """The next message, or the next of a type; None at the end."""
        while True:
            message, _ = self.codec.receive(sock)
            if wanted is None or message is None or isinstance(message, wanted):
                return message

    def close(self) -> None:
        self.listener.close()


class ScriptedDecode:
    """A decode agent of our own making, connected to a prefill agent."""

    def __init__(
        self, agent: RunningAgent, pod: str = "scripted", replica: str = "decode-9", greet: bool = True
    ) -> None:
        self.codec: Codec[SideChannel] = Codec(SideChannel)
        self.sock = socket.create_connection(("127.0.0.1", agent.port), SECONDS)
        plan = agent.loaded.plan
        self.hello = Hello(PROTOCOL, "decode", replica, pod, "life", plan.digest, plan.compat.digest)
        if greet:
            self.say(self.hello)
            assert isinstance(self.hear(), Hello)

    def say(self, message: Any) -> None:
        self.sock.sendall(self.codec.encode(message))

    def hear(self, wanted: type | None = None) -> Any:
        """The next message, or the next of a type; None at the end."""
        while True:
            try:
                message, _ = self.codec.receive(self.sock)
            except ConnectionResetError:
                return None
            if wanted is None or message is None or isinstance(message, wanted):
                return message

    def close(self) -> None:
        self.sock.close()


@dataclass
class Stage:
    """Starts things and ends them all, last one first."""

    folder: Path
    threads: LoopThread
    _ends: contextlib.ExitStack

    def agent(
        self, role: Role, loaded: LoadedPlan, pod: str | None = None, replica: str | None = None, **config: Any
    ) -> RunningAgent:
        name = pod or f"{role}-0"
        place = {"socket": self.folder / f"{name}.sock", "host": "127.0.0.1", "port": 0}
        settings = AgentConfig(role=role, pod=name, replica=replica or f"{role}-0", **{**place, **config})
        agent = RunningAgent(self.threads, loaded, self.folder, settings)
        self._ends.callback(agent.stop)
        return agent

    def engine(self, agent: RunningAgent, count: int = 16, placement: str = "agent", **changes: Any) -> Engine:
        engine = Engine(agent, count, placement, **changes)
        self._ends.callback(engine.close)
        return engine

    def worker(self, agent: RunningAgent, rank: int, count: int = 16, placement: str = "agent") -> EngineWorker:
        worker = EngineWorker(agent, rank, count, placement)
        self._ends.callback(worker.close)
        return worker

    def movers(self, plan: wire.Plan, **options: Any) -> Movers:
        movers = Movers(plan, **options)
        self._ends.callback(movers.close)
        return movers

    def scripted(self, movers: Movers, **options: Any) -> ScriptedPrefill:
        peer = ScriptedPrefill(movers, **options)
        self._ends.callback(peer.close)
        return peer

    def scripted_decode(self, agent: RunningAgent, **options: Any) -> ScriptedDecode:
        peer = ScriptedDecode(agent, **options)
        self._ends.callback(peer.close)
        return peer

    def pair(self, plan: wire.Plan, placement: str = "agent", **config: Any) -> Pair:
        """A prefill and a decode agent with their engines, introduced and ready."""
        loaded = check_plan(wire.encode(plan), None)
        prefill, decode = self.agent("prefill", loaded, **config), self.agent("decode", loaded, **config)
        pair = Pair(prefill, decode, self.engine(prefill, 16, placement), self.engine(decode, 20, placement))
        decode.introduce(prefill)
        decode.ready_for()
        return pair

    def decode_of(self, movers: Movers, **options: Any) -> tuple[ScriptedPrefill, RunningAgent, Engine]:
        """A scripted prefill agent with these movers, and a decode agent with its engine that was introduced to it."""
        peer = self.scripted(movers)
        decode = self.agent("decode", movers.loaded, **options)
        engine = self.engine(decode, 20)
        address = Address("127.0.0.1", peer.port)
        self.threads.call(lambda: decode.agent.introduce([("prefill", peer.replica, address)]))
        return peer, decode, engine


@dataclass
class Pair:
    """Two agents that know each other, and their engines."""

    prefill: RunningAgent
    decode: RunningAgent
    source: Engine
    destination: Engine

    def ref(self, request: str = "s", generation: str = "g", **changes: Any) -> SourceRef:
        return msgspec.structs.replace(
            SourceRef(REPLICA, request, generation, "127.0.0.1", self.prefill.port), **changes
        )


@contextlib.contextmanager
def opened_stage() -> Iterator[Stage]:
    # Paths of Unix sockets are short: pytest's folders may not be.
    folder = Path(tempfile.mkdtemp(prefix="dg-"))
    before = set(threading.enumerate())
    threads = LoopThread()
    ends = contextlib.ExitStack()
    try:
        with ends:
            yield Stage(folder, threads, ends)
    finally:
        threads.close()
        shutil.rmtree(folder)

    def left() -> list[str]:
        new = set(threading.enumerate()) - before
        return [one.name for one in new if one.name.startswith(("mover-", "engine-rank-"))]

    # A client that is closed does not wait for its listener, which is on its way out.
    until(lambda: not left(), "no thread outlives the test")


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Everything that a test starts ends with it; an exception on the event loop fails the test."""
    with opened_stage() as stage:
        yield stage


@pytest.fixture(scope="module")
def shared_stage() -> Iterator[Stage]:
    """A stage for all tests of a module, for what they do not change."""
    with opened_stage() as stage:
        yield stage


@pytest.fixture
def tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Movers that are made from now on use TCP: nothing moves unless its source drives progress."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture(scope="session")
def two_tables() -> Geometry:
    """Groups with a block table each; stage 0 of two holds layers of the first alone."""
    parts = (Part("k", 2, "split", 8), Part("v", 2, "split", 8))
    return Geometry((Group("full", (0, 1, 2), parts, "full"), Group("window", (3, 4), parts, "window")))


@pytest.fixture(name="until", scope="session")
def until_fixture() -> Callable[..., Any]:
    return until


@pytest.fixture(name="pages", scope="session")
def pages_fixture() -> Callable[[Ids], dict[str, bytes]]:
    return pages


@pytest.fixture(name="arrays", scope="session")
def arrays_fixture() -> Callable[[Ids], dict[str, np.ndarray]]:
    return arrays


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Threads for calls that block."""
    with concurrent.futures.ThreadPoolExecutor(16) as executor:
        yield executor
