"""Peers that misbehave on the side channel: the listener lives on, and a good peer is served all the while."""

from __future__ import annotations

import os
import random
import socket
import struct
from typing import Any

import msgspec
import pytest

from disagg_agent.cards import RankCard
from disagg_agent.frames import Codec
from disagg_agent.handshake import Address
from disagg_agent.messages import (
    PROTOCOL,
    Bye,
    Done,
    Failed,
    Held,
    Hello,
    Loaded,
    Open,
    Opened,
    OpenRefused,
    Ranks,
    Released,
    SideChannel,
    SourceRef,
    Watch,
)

pytestmark = pytest.mark.nixl

replace = msgspec.structs.replace


@pytest.fixture
def plan(build: Any) -> Any:
    """P TP 2 to D TP 2."""
    return build.deployment(build.heads(4, layers=2), 2, 2).plan()


@pytest.fixture
def pair(stage: Any, plan: Any) -> Any:
    return stage.pair(plan, hold_grace_seconds=0.1)


def serves(pair: Any, name: str = "good") -> None:
    """A whole request works between the good peers."""
    ids = pair.source.ids(40)
    pair.source.fill(name, ids, 40)
    pair.source.hold(name, "g", 40, ids)
    pair.source.expect(Held)
    target = pair.destination.ids(40, first=5)
    pair.destination.load(name, pair.ref(name), 40, target)
    pair.destination.expect(Loaded)
    assert pair.destination.wrong_bytes(name, target, 40) == 0
    pair.source.expect(Released)


# Strangers at prefill's door.


def knock(agent: Any, data: bytes) -> bytes:
    """Send bytes, and read until the agent ends the connection."""
    with socket.create_connection(("127.0.0.1", agent.port), 20.0) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while more := sock.recv(65536):
                answer += more
        except ConnectionResetError:
            pass
        return answer


def test_malformed_bytes_end_their_own_connection(pair: Any) -> None:
    numbers = random.Random(7)
    wild = [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 2**32 - 1),
        struct.pack(">I", 10) + b"\xc1" * 10,
        struct.pack(">I", 1000) + b"cut",
        struct.pack(">I", 0),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200),
        *(numbers.randbytes(numbers.randrange(1, 300)) for _ in range(20)),
        *(struct.pack(">I", size) + numbers.randbytes(size) for size in (1, 5, 60, 2000)),
    ]
    for data in wild:
        knock(pair.prefill, data)
    # One that says nothing and stays.
    with socket.create_connection(("127.0.0.1", pair.prefill.port)):
        serves(pair)
    assert len(pair.prefill.peers()) == 1


def test_a_greeting_damaged_anywhere_ends_its_own_connection(pair: Any) -> None:
    codec: Codec[SideChannel] = Codec(SideChannel)
    numbers = random.Random(3)
    digests = pair.prefill.loaded.plan
    hello = codec.encode(Hello(PROTOCOL, "decode", "d", "p", "i", digests.digest, digests.compat.digest))
    for _ in range(60):
        damaged = bytearray(hello)
        damaged[numbers.randrange(4, len(damaged))] = numbers.randrange(256)
        knock(pair.prefill, bytes(damaged))
    serves(pair)
    assert len(pair.prefill.peers()) == 1


def test_a_request_that_names_another_replica_at_a_good_address_disturbs_nobody(pair: Any) -> None:
    """The wrong name must not take the place of the connection that other requests use."""
    before = [(peer["pod"], peer["incarnation"], peer["state"]) for peer in pair.prefill.peers()]
    connections = list(pair.prefill.agent.readers.connections)
    pair.destination.load("r", pair.ref("r", replica="nobody"), 40, pair.destination.ids(40))
    assert {(one.code, one.freed) for one in pair.destination.expect(Failed)} == {("WrongReplica", True)}
    assert list(pair.prefill.agent.readers.connections) == connections
    assert [(peer["pod"], peer["incarnation"], peer["state"]) for peer in pair.prefill.peers()] == before
    serves(pair)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"protocol": PROTOCOL + 1}, "ProtocolMismatch"),
        ({"plan": "sha256:" + "1" * 64}, "PlanMismatch"),
        ({"compat": "sha256:" + "2" * 64}, "CompatMismatch"),
        ({"role": "prefill"}, "RoleMismatch"),
    ],
)
def test_a_greeting_that_differs_is_answered_with_the_reason(
    stage: Any, pair: Any, change: dict[str, Any], code: str
) -> None:
    stranger = stage.scripted_decode(pair.prefill, greet=False)
    stranger.say(replace(stranger.hello, **change))
    assert isinstance(stranger.hear(), Hello)
    bye = stranger.hear()
    assert isinstance(bye, Bye)
    assert bye.code == code
    (value,) = change.values()
    assert str(value) in bye.message
    # Neither ranks nor metadata were shown to it.
    assert stranger.hear() is None
    assert pair.prefill.refused(code) == 1
    serves(pair)


WRONG_MESSAGES = {
    "a grant": Opened("s", "g", 0, 0, {}, 1.0),
    "a refusal": OpenRefused("s", "g", 0, 0, "c", "m"),
    "ranks": Ranks([]),
    "a second greeting": Hello(PROTOCOL, "decode", "d", "p", "i", "x", "y"),
}


@pytest.mark.parametrize("message", WRONG_MESSAGES.values(), ids=WRONG_MESSAGES)
def test_a_message_that_is_not_for_prefill_ends_its_own_connection(stage: Any, pair: Any, message: Any) -> None:
    stranger = stage.scripted_decode(pair.prefill)
    assert isinstance(stranger.hear(), Ranks)
    stranger.say(message)
    bye = stranger.hear()
    assert isinstance(bye, Bye)
    assert bye.code == "BadFrame"
    assert type(message).__name__ in bye.message
    assert stranger.hear() is None
    serves(pair)


def test_questions_about_nothing_are_answered_and_change_nothing(stage: Any, pair: Any) -> None:
    stranger = stage.scripted_decode(pair.prefill)
    assert len(stranger.hear(Ranks).ranks) == 2
    for source in (0, 1, 2, 65536):
        for on in (False, True, True):
            stranger.say(Watch(source, on))
        stranger.say(Done("never", "g", source, 0))
        stranger.say(Done("never", "g", source, 65536))
        stranger.say(Open("never", "g", source, 0, 1))
        answer = stranger.hear()
        assert isinstance(answer, OpenRefused)
        assert (answer.source, answer.code) == (source, "UnknownRequest")
    serves(pair)
    stranger.close()


def test_completions_that_mean_nothing_end_no_hold(stage: Any, pair: Any) -> None:
    ids = pair.source.ids(40)
    pair.source.fill("s", ids, 40)
    pair.source.hold("s", "g", 40, ids)
    pair.source.expect(Held)
    stranger = stage.scripted_decode(pair.prefill)
    for generation, source, destination in (("stale", 0, 0), ("g", 0, 1), ("g", 1, 0), ("g", 1, 65536), ("g", 9, 0)):
        stranger.say(Done("s", generation, source, destination))
    stranger.say(Open("s", "stale", 0, 0, 40))
    assert stranger.hear(OpenRefused).code == "StaleGeneration"
    pair.destination.load("r", pair.ref(), 40, pair.destination.ids(40))
    pair.destination.expect(Loaded)


def test_one_pod_has_one_connection(stage: Any, pair: Any, until: Any) -> None:
    first = stage.scripted_decode(pair.prefill, pod="restarted")
    first.hear(Ranks)
    second = stage.scripted_decode(pair.prefill, pod="restarted")
    second.hear(Ranks)
    assert first.hear() is None
    second.say(Open("never", "g", 0, 0, 1))
    assert isinstance(second.hear(), OpenRefused)
    until(lambda: len(pair.prefill.peers()) == 2, "the good peer and the second")
    serves(pair)


def test_a_reader_that_reads_nothing_delays_nobody(stage: Any, pair: Any) -> None:
    stranger = stage.scripted_decode(pair.prefill)
    for number in range(20_000):
        stranger.say(Open("never" * 40, f"{number}", 0, 0, 1))
    serves(pair)


# Prefill agents that misbehave, seen from decode.


class Garbage:
    """A listener that answers every connection with the same bytes."""

    def __init__(self, data: bytes, pool: Any) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.data = data
        self.task = pool.submit(self.serve)

    def serve(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with sock:
                sock.sendall(self.data)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.task.result(20.0)


def knows(stage: Any, agent: Any, *addresses: tuple[str, int]) -> None:
    peers = [("prefill", replica, Address("127.0.0.1", port)) for replica, port in addresses]
    stage.threads.call(lambda: agent.agent.introduce(peers))


def state_of(agent: Any, replica: str) -> tuple[str, str]:
    (peer,) = [one for one in agent.peers() if one["replica"] == replica]
    return peer["state"], peer["code"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "PeerClosed"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "FrameTooLarge"),
        (struct.pack(">I", 5) + b"\xc1" * 5, "BadFrame"),
        (struct.pack(">I", 50) + b"cut", "TornFrame"),
        (Codec(SideChannel).encode(Ranks([])), "BadFrame"),
        (Codec(SideChannel).encode(Bye("CustomCode", "the reason")), "CustomCode"),
    ],
    ids=["nothing", "http", "garbage", "torn", "no greeting", "bye"],
)
def test_a_listener_that_is_no_agent(stage: Any, pair: Any, pool: Any, until: Any, data: bytes, code: str) -> None:
    garbage = Garbage(data, pool)
    knows(stage, pair.decode, ("prefill-0", pair.prefill.port), ("prefill-9", garbage.port))
    # A peer that closes at once may be seen as a lost connection too.
    until(
        lambda: state_of(pair.decode, "prefill-9") in (("lost", code), ("lost", "PeerLost")), f"it is lost for {code}"
    )
    pair.destination.load("r", SourceRef("prefill-9", "s", "g", "", 0), 40, pair.destination.ids(40))
    assert {one.code for one in pair.destination.expect(Failed)} <= {code, "PeerLost"}
    assert pair.destination.stray_bytes() == 0
    serves(pair)
    garbage.close()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"protocol": PROTOCOL + 1}, "ProtocolMismatch"),
        ({"plan": "sha256:" + "1" * 64}, "PlanMismatch"),
        ({"compat": "sha256:" + "2" * 64}, "CompatMismatch"),
        ({"role": "decode"}, "RoleMismatch"),
        ({"replica": "prefill-1"}, "WrongReplica"),
    ],
)
def test_a_prefill_agent_that_is_another_than_was_meant(
    stage: Any, plan: Any, until: Any, change: dict[str, Any], code: str
) -> None:
    movers = stage.movers(plan)
    peer, decode, engine = stage.decode_of(movers)
    peer.hello = change
    sock = peer.accept(ranks=False)
    until(lambda: state_of(decode, "prefill-0") == ("refused", code), "it is refused")
    (value,) = change.values()
    assert str(value) in decode.peers()[0]["message"]
    engine.load("r", SourceRef("prefill-0", "s", "g", "", 0), 40, engine.ids(40))
    assert {(one.code, one.freed) for one in engine.expect(Failed)} == {(code, True)}
    assert engine.stray_bytes() == 0
    sock.close()


def test_cards_that_are_wrong_are_refused_before_they_are_used(stage: Any, plan: Any, until: Any) -> None:
    movers = stage.movers(plan)
    peer, decode, _engine = stage.decode_of(movers)
    factors = movers.loaded.expected_factors("prefill")
    right = [RankCard(one.rank, factors, one.card) for one in movers.prefill]
    narrow = replace(right[0].mover, regions=[replace(one, stride=8) for one in right[0].mover.regions])
    for cards, code in (
        ([replace(right[0], factors={**factors, "model": "other" * 2000})], "CompatMismatch"),
        ([replace(right[0], rank=7)], "UnknownRank"),
        ([replace(right[0], mover=narrow)], "WrongShape"),
        ([right[0], right[0]], "DoubledRank"),
        ([replace(right[0], mover=replace(right[0].mover, regions=[]))], "MissingRegion"),
    ):
        sock = peer.accept(ranks=False)
        peer.say(sock, Ranks(cards))
        bye = peer.hear(sock, Bye)
        assert bye.code == code
        until(lambda: state_of(decode, "prefill-0")[1] == code, code)  # noqa: B023
        sock.close()
    # A good card in the end is as good as ever.
    with movers.serving():
        sock = peer.accept()
        decode.ready_for()
    sock.close()


@pytest.mark.parametrize("damage", ["garbage", "truncated", "stolen", "empty"])
def test_metadata_that_nixl_refuses_ends_its_own_peer(
    stage: Any, pair: Any, plan: Any, until: Any, damage: str
) -> None:
    movers = stage.movers(plan)
    victim = pair.prefill.agent.engine.sessions[0].card.mover
    card = movers.prefill[0].card
    metadata = {
        "garbage": os.urandom(300),
        "truncated": card.metadata[:-20],
        "stolen": victim.metadata,
        "empty": b"",
    }[damage]
    movers.prefill[0].card = replace(card, metadata=metadata)
    peer = stage.scripted(movers, replica="prefill-9")
    knows(stage, pair.decode, ("prefill-0", pair.prefill.port), ("prefill-9", peer.port))
    sock = peer.accept()
    code = "WrongName" if damage == "stolen" else "ConnectFailed"
    until(lambda: state_of(pair.decode, "prefill-9") == ("lost", code), f"it is lost for {code}")
    assert peer.hear(sock, Bye) is None
    serves(pair)
    sock.close()


def test_what_a_prefill_agent_must_not_say(stage: Any, plan: Any, until: Any) -> None:
    movers = stage.movers(plan)
    peer, decode, engine = stage.decode_of(movers)
    for message in (Watch(0, on=True), Open("s", "g", 0, 0, 1), Done("s", "g", 0, 0)):
        sock = peer.accept()
        peer.say(sock, message)
        until(lambda: state_of(decode, "prefill-0") == ("lost", "BadFrame"), "it is lost")
        sock.close()
    # Grants, refusals and takings-back of what was never asked mean nothing.
    sock = peer.accept()
    for rank in (0, 1, 9):
        peer.say(sock, Opened("s", "g", rank, rank, {"attention": b"abc"}, 1.0))
        peer.say(sock, OpenRefused("s", "g", rank, rank, "c", "m"))
    engine.load("r", SourceRef("prefill-0", "another", "g", "", 0), 40, engine.ids(40))
    until(lambda: decode.transfers()["loads"] == 2, "decode asks")
    assert state_of(decode, "prefill-0")[0] == "connecting"
    sock.close()
    engine.expect(Failed)


def test_a_dead_address_of_a_replica_does_not_fail_what_its_living_one_serves(
    stage: Any, plan: Any, until: Any
) -> None:
    """After a restart, the old address and the new one may be known under one name for a while."""
    movers = stage.movers(plan)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()[1]
    peer, decode, engine = stage.decode_of(movers)
    knows(stage, decode, ("prefill-0", peer.port), ("prefill-0", dead))
    with movers.serving():
        sock = peer.accept()
        decode.ready_for()
    engine.load("r", SourceRef("prefill-0", "s", "g", "", 0), 40, engine.ids(40))
    questions = [peer.hear(sock, Open) for _ in range(2)]
    attempts = decode.refused("PeerUnreachable")
    until(lambda: decode.refused("PeerUnreachable") > attempts + 1, "the dead address was tried again, twice")
    for question in questions:
        peer.say(sock, OpenRefused("s", "g", question.source, question.destination, "StaleGeneration", "as we said"))
    assert {one.code for one in engine.expect(Failed)} == {"StaleGeneration"}
    sock.close()


def test_loads_name_the_peer_at_fault_however_long_its_reasons_are(stage: Any, plan: Any, until: Any) -> None:
    """A reason that a peer made long must not end the conversation with our own engine."""
    movers = stage.movers(plan)
    peer, _decode, engine = stage.decode_of(movers)
    engine.load("r", SourceRef("prefill-0", "s", "g", "", 0), 40, engine.ids(40))
    sock = peer.accept(ranks=False)
    factors = {**movers.loaded.expected_factors("prefill"), "model": "x" * 100_000}
    peer.say(sock, Ranks([RankCard(0, factors, movers.prefill[0].card)]))
    assert {one.code for one in engine.expect(Failed)} == {"CompatMismatch"}
    sock.close()
