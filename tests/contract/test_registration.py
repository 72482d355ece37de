"""Engine ranks register with a real agent: what is refused is refused by name, and the agent stays well."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from disagg_agent.cards import HOST, SegmentDeclaration
from disagg_agent.engine_client import EngineRank
from disagg_agent.errors import AgentError, RegistrationRefused
from disagg_agent.frames import Codec, send_with_fds
from disagg_agent.messages import (
    PROTOCOL,
    Abort,
    Freed,
    Held,
    Hold,
    Load,
    Refused,
    Register,
    Registered,
    SourceRef,
    ToEngine,
    Welcome,
)
from disagg_agent.plan_loader import LoadedPlan, check_plan
from disagg_agent.segments import create_segment
from disagg_plan import wire

pytestmark = pytest.mark.nixl

replace = msgspec.structs.replace


@pytest.fixture
def loaded(build: Any) -> LoadedPlan:
    """P TP 2 to D TP 4."""
    return check_plan(wire.encode(build.deployment(build.heads(4, layers=2), 2, 4).plan()), None)


@pytest.fixture
def prefill(stage: Any, loaded: LoadedPlan) -> Any:
    return stage.agent("prefill", loaded)


@pytest.fixture
def decode(stage: Any, loaded: LoadedPlan) -> Any:
    return stage.agent("decode", loaded)


def refused(worker: Any, code: str, *parts: str, **changes: Any) -> None:
    """The registration is refused by name, and the agent can tell an operator."""
    agent = worker.agent
    with pytest.raises(RegistrationRefused) as caught:
        worker.register(**changes)
    assert caught.value.code == code
    for part in parts:
        assert part in caught.value.message, caught.value.message
    status, text = agent.get("/readyz")
    assert status == 503
    assert f"last refusal: {code}: {caught.value.message}" in text
    last = json.loads(agent.get("/identity")[1])["lastRefusal"]
    assert last == {"code": code, "message": caught.value.message}
    assert agent.refused(code) == 1
    assert f'disagg_refusals_total{{code="{code}"}} 1.0' in agent.get("/metrics")[1]


# What comes up.


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_an_agent_is_ready_when_every_rank_is_registered(stage: Any, decode: Any, placement: str, until: Any) -> None:
    assert decode.get("/healthz") == (200, "ok\n")
    assert decode.get("/readyz") == (503, "engine ranks [0, 1, 2, 3] are not registered\n")
    workers = [stage.worker(decode, rank, placement=placement) for rank in (2, 0, 3)]
    for worker in workers:
        worker.register()
    assert decode.get("/readyz") == (503, "engine ranks [1] are not registered\n")
    assert json.loads(decode.get("/identity")[1])["ranks"] == [0, 2, 3]
    last = stage.worker(decode, 1, placement=placement)
    last.register()
    assert decode.get("/readyz") == (200, "ready\n")
    workers[0].close()
    until(lambda: decode.get("/readyz") == (503, "engine ranks [2] are not registered\n"), "rank 2 is gone")
    assert decode.get("/healthz") == (200, "ok\n")
    again = stage.worker(decode, 2, placement=placement)
    again.register()
    assert decode.get("/readyz") == (200, "ready\n")


def test_the_welcome_tells_an_engine_all_it_needs(prefill: Any, stage: Any, loaded: LoadedPlan) -> None:
    worker = stage.worker(prefill, 0)
    welcome = worker.client.welcome
    assert (welcome.protocol, welcome.role, welcome.replica) == (PROTOCOL, "prefill", "prefill-0")
    assert (welcome.side_host, welcome.side_port) == ("127.0.0.1", prefill.port)
    assert welcome.plan == loaded.text
    assert worker.client.loaded == loaded


def test_what_an_agent_says_of_itself(prefill: Any, loaded: LoadedPlan) -> None:
    identity = json.loads(prefill.get("/identity")[1])
    assert identity.pop("incarnation") == prefill.agent.incarnation
    assert identity == {
        "role": "prefill",
        "replica": "prefill-0",
        "pod": "prefill-0",
        "host": "127.0.0.1",
        "port": prefill.port,
        "plan": loaded.plan.digest,
        "compat": loaded.plan.compat.digest,
        "ranks": [],
        "lastRefusal": None,
    }
    assert prefill.get("/plan") == (200, loaded.text.decode())
    status, text = prefill.get("/transfers")
    assert status == 200
    assert {"holds": 0, "loads": 0}.items() <= json.loads(text).items()


def test_an_engine_connects_all_its_ranks_before_it_registers_the_first(stage: Any, build: Any) -> None:
    loaded = check_plan(wire.encode(build.deployment(build.heads(16, layers=1), 16, 1).plan()), None)
    agent = stage.agent("prefill", loaded)
    workers = [stage.worker(agent, rank, count=2) for rank in range(16)]
    for worker in workers:
        worker.register()
    assert agent.get("/readyz") == (200, "ready\n")


def test_stages_may_have_different_tables(stage: Any, build: Any, two_tables: Any) -> None:
    loaded = check_plan(wire.encode(build.deployment(two_tables, (1, 2), 1).plan()), None)
    agent = stage.agent("prefill", loaded)
    stage.engine(agent)
    assert agent.get("/readyz") == (200, "ready\n")


# What is refused.


def test_a_wrong_shape(stage: Any, decode: Any) -> None:
    worker = stage.worker(decode, 1)
    stride = worker.pool.regions[1].stride
    wrong = [*worker.pool.regions[:1], replace(worker.pool.regions[1], stride=stride * 2)]
    refused(worker, "WrongShape", "layer 1 region 0", f"is {stride * 2}, the plan has {stride}", regions=wrong)


def test_unequal_factors(stage: Any, decode: Any, loaded: LoadedPlan) -> None:
    factors = {**loaded.expected_factors("decode"), "model": "another", "blockTokens": 32}
    refused(
        stage.worker(decode, 1),
        "CompatMismatch",
        "decode rank 1",
        "model is 'another', the plan has 'test'",
        "blockTokens is 32, the plan has 16",
        factors=factors,
    )


def test_a_rank_that_the_plan_lacks(stage: Any, decode: Any) -> None:
    refused(stage.worker(decode, 1), "UnknownRank", "rank 4", "0 to 3", rank=4)


def test_a_missing_region(stage: Any, decode: Any) -> None:
    worker = stage.worker(decode, 1)
    refused(worker, "MissingRegion", "layer 0", regions=worker.pool.regions[1:])


def test_a_segment_that_is_smaller_than_it_is_said_to_be(stage: Any, decode: Any) -> None:
    worker = stage.worker(decode, 1)
    size = worker.pool.segment.size
    fd, _ = create_segment("small", size - 4096)
    refused(worker, "BadSegments", f"{size} bytes", f"{size - 4096}", fds=[fd])
    os.close(fd)


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_descriptors(stage: Any, decode: Any, count: int) -> None:
    worker = stage.worker(decode, 1)
    refused(worker, "BadSegments", f"{count} file descriptors came for 1 segments", fds=[worker.pool.fd] * count)


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_a_rank_that_is_taken(stage: Any, decode: Any, placement: str) -> None:
    first = stage.worker(decode, 1)
    first.register()
    refused(stage.worker(decode, 1, placement=placement), "RankTaken", "rank 1")
    # The first is as well as before.
    first.client.abort("r")
    assert first.inbox.get() == Freed("r")


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_unequal_pools_of_two_ranks(stage: Any, decode: Any, placement: str) -> None:
    first = stage.worker(decode, 0, count=16)
    first.register()
    refused(stage.worker(decode, 1, count=15, placement=placement), "UnequalPools", "rank 1", "15", "16")
    first.client.abort("r")
    assert first.inbox.get() == Freed("r")


def test_a_refused_rank_can_come_again(stage: Any, decode: Any) -> None:
    refused(stage.worker(decode, 1), "CompatMismatch", factors={})
    for rank in range(4):
        stage.worker(decode, rank).register()
    assert decode.get("/readyz") == (200, "ready\n")


# Raw conversations.


class Raw:
    """An engine without our client library."""

    def __init__(self, agent: Any) -> None:
        self.codec: Codec[ToEngine] = Codec(ToEngine)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20.0)
        self.sock.connect(str(agent.config.socket))
        assert isinstance(self.hear(), Welcome)

    def hear(self) -> Any:
        message, fds = self.codec.receive(self.sock)
        assert fds == []
        return message

    def say(self, message: msgspec.Struct, fds: list[int] | None = None) -> None:
        send_with_fds(self.sock, self.codec.encode(message), fds or [])

    def refused(self, code: str) -> Refused:
        answer = self.hear()
        assert isinstance(answer, Refused), answer
        assert answer.code == code
        with contextlib.suppress(ConnectionResetError):
            assert self.sock.recv(1) == b""
        return answer

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def raw(decode: Any) -> Any:
    raw = Raw(decode)
    yield raw
    raw.close()


@pytest.fixture
def right(stage: Any, decode: Any, loaded: LoadedPlan) -> tuple[Register, int]:
    """A registration that is right, and its descriptor."""
    worker = stage.worker(decode, 0)
    size = worker.pool.segment.size
    factors = loaded.expected_factors("decode")
    return Register(
        PROTOCOL, 0, factors, "agent", [SegmentDeclaration(size, HOST)], worker.pool.regions
    ), worker.pool.fd


def test_another_protocol_is_refused_with_both_numbers(raw: Raw, right: tuple[Register, int]) -> None:
    raw.say(replace(right[0], protocol=PROTOCOL + 1), [right[1]])
    answer = raw.refused("ProtocolMismatch")
    assert f"protocol {PROTOCOL + 1}, the agent {PROTOCOL}" in answer.message


def test_placement_engine_without_a_mover(raw: Raw, right: tuple[Register, int]) -> None:
    raw.say(replace(right[0], placement="engine"))
    raw.refused("NoMover")


def test_a_mover_whose_memory_differs_from_what_is_registered(
    stage: Any, build: Any, raw: Raw, loaded: LoadedPlan
) -> None:
    """With placement `engine` the memory is stated twice: what is judged must be what is read."""
    movers = stage.movers(loaded.plan, destination_pages=6)
    worker = movers.decode[0]
    regions = [replace(region, pages=5) for region in worker.pool.regions]
    size = worker.pool.segment.size
    factors = loaded.expected_factors("decode")
    raw.say(Register(PROTOCOL, 0, factors, "engine", [SegmentDeclaration(size, HOST)], regions, worker.card))
    assert "6" in raw.refused("UnequalPools").message


@pytest.mark.parametrize("message", [Abort("r"), Hold("r", "g", 1, {})], ids=["abort", "hold"])
def test_a_first_message_that_is_no_registration(raw: Raw, message: Any) -> None:
    raw.say(message)
    assert type(message).__name__ in raw.refused("BadFrame").message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1", "BadFrame"),
        (struct.pack(">I", 0), "BadFrame"),
        (b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n", "FrameTooLarge"),
        (struct.pack(">I", 2**32 - 1), "FrameTooLarge"),
    ],
    ids=["garbage", "empty", "http", "too large"],
)
def test_malformed_bytes_are_answered(raw: Raw, decode: Any, data: bytes, code: str) -> None:
    raw.sock.sendall(data)
    raw.refused(code)
    assert decode.get("/healthz") == (200, "ok\n")


def test_a_message_deeper_than_any_stack(raw: Raw, decode: Any, right: tuple[Register, int]) -> None:
    body = raw.codec.encode(replace(right[0], factors={"x": 1}))[4:].replace(
        b"\xa1x\x01", b"\xa1x" + b"\x91" * 99_999 + b"\x01"
    )
    raw.sock.sendall(struct.pack(">I", len(body)) + body)
    raw.refused("BadFrame")
    assert decode.get("/healthz") == (200, "ok\n")


def test_those_that_only_look_in_are_no_trouble(stage: Any, decode: Any) -> None:
    for data in (b"", b"\0", struct.pack(">I", 100) + b"half"):
        looker = Raw(decode)
        looker.sock.sendall(data)
        looker.close()
    stage.worker(decode, 0).register()
    assert decode.agent.engine.sessions.keys() == {0}


def test_an_engine_that_reads_nothing_does_not_hold_up_the_agent(
    stage: Any, build: Any, decode: Any, right: tuple[Register, int]
) -> None:
    raw = Raw(decode)
    raw.say(replace(right[0], factors={}), [right[1]])
    # Refused, and it does not care; the agent answers everybody else meanwhile.
    assert decode.get("/healthz") == (200, "ok\n")
    stage.worker(decode, 0).register()
    raw.close()


def test_a_registered_rank_that_sends_garbage_is_cut_off_alone(
    stage: Any, decode: Any, right: tuple[Register, int], until: Any
) -> None:
    other = stage.worker(decode, 1)
    other.register()
    for data in (
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 2**31),
        Codec(ToEngine).encode(right[0]),
        os.urandom(4096),
    ):
        raw = Raw(decode)
        raw.say(right[0], [right[1]])
        assert raw.hear() == Registered()
        raw.sock.sendall(data)
        raw.sock.shutdown(socket.SHUT_WR)
        until(lambda: decode.agent.engine.sessions.keys() == {1}, "rank 0 is gone")
        raw.close()
    other.client.abort("r")
    assert other.inbox.get() == Freed("r")


def test_segments_are_given_back_with_their_rank(stage: Any, decode: Any, until: Any) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:synthetic-decode-0" in line for line in maps)

    before = mapped()
    worker = stage.worker(decode, 0)
    worker.register()
    assert mapped() == before + 2
    worker.client.close()
    # Ours stays; the agent's is gone, with its mover.
    until(lambda: mapped() == before + 1, "the agent has unmapped the segment")


# The engine's end.


class Listener:
    """Somebody who answers at the engine socket's path in an agent's place."""

    def __init__(self, stage: Any, *frames: bytes) -> None:
        self.path = stage.folder / "other.sock"
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.bind(str(self.path))
        self.sock.listen()
        self.frames = frames

    def serve(self) -> None:
        connection, _ = self.sock.accept()
        with connection:
            for frame in self.frames:
                connection.sendall(frame)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (lambda plan: [Welcome(PROTOCOL + 1, "decode", "d", "h", 1, plan)], "ProtocolMismatch"),
        (lambda plan: [Welcome(PROTOCOL, "decode", "d", "h", 1, b"{}")], "BadSchema"),
        (lambda plan: [Registered()], "BadFrame"),
        (lambda plan: [], "AgentGone"),
    ],
    ids=["protocol", "unproven plan", "no welcome", "nothing"],
)
def test_an_engine_refuses_an_agent_that_it_does_not_understand(
    stage: Any, loaded: LoadedPlan, pool: Any, frames: Callable[[bytes], list[Any]], code: str
) -> None:
    codec: Codec[ToEngine] = Codec(ToEngine)
    listener = Listener(stage, *(codec.encode(frame) for frame in frames(loaded.text)))
    served = pool.submit(listener.serve)
    with pytest.raises(AgentError) as caught:
        EngineRank(listener.path, 20.0)
    assert caught.value.code == code
    served.result(20.0)
    listener.sock.close()


def test_an_engine_without_an_agent(stage: Any) -> None:
    with pytest.raises(OSError, match="No such file"):
        EngineRank(stage.folder / "nobody.sock")


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_an_engine_hears_that_its_agent_is_gone(stage: Any, decode: Any, placement: str) -> None:
    engine = stage.engine(decode, placement=placement)
    decode.stop()
    for worker in engine.workers:
        assert worker.lost.get(str)
    assert not decode.config.socket.exists()


def test_roles_keep_to_their_own_messages(stage: Any, prefill: Any, decode: Any) -> None:
    source, destination = stage.worker(prefill, 0), stage.worker(decode, 0)
    source.register()
    destination.register()
    destination.client.hold(Hold("r", "g", 1, {}))
    failed = destination.inbox.get()
    assert (failed.request, failed.code, failed.freed) == ("r", "WrongRole", True)
    source.client.load(Load("r", SourceRef("p", "s", "g", "h", 1), 1, 0, {}))
    failed = source.inbox.get()
    assert (failed.request, failed.code, failed.freed) == ("r", "WrongRole", True)


@pytest.mark.parametrize(
    ("ids", "code"),
    [([0, 16], "PageOutOfRange"), ([0, -1], "PageOutOfRange"), ([3, 3], "RepeatedPage"), ([3], "TooFewPages")],
)
def test_a_hold_of_pages_that_are_wrong(stage: Any, prefill: Any, pages: Any, ids: list[int], code: str) -> None:
    worker = stage.worker(prefill, 0, count=16)
    worker.register()
    worker.client.hold(Hold("r", "g", 20, pages({"attention": ids})))
    failed = worker.inbox.get()
    assert (failed.request, failed.code, failed.freed) == ("r", code, True)
    worker.client.hold(Hold("r", "g", 20, {"window": b""}))
    assert worker.inbox.get().code == "BadPages"
    assert prefill.transfers()["holds"] == 0
    worker.client.hold(Hold("r", "g", 20, pages({"attention": [15, 0]})))
    assert worker.inbox.get(Held).lease == 30.0
