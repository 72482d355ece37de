"""Whole requests between two real agents and their engines: what arrives, and what is refused before a byte moves."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from disagg_agent.handshake import Address
from disagg_agent.messages import Failed, Freed, Held, Hold, Loaded, Released, SourceRef
from disagg_agent.plan_loader import check_plan
from disagg_plan import wire

pytestmark = pytest.mark.nixl

PLANS: dict[str, Callable[[Any, Any], Any]] = {
    "HND, TP 2 to 4": lambda b, t: b.deployment(b.heads(4, layers=2), 2, 4),
    "blocks 32 to 16, NHD to HND": lambda b, t: b.deployment(
        b.heads(2, layers=2), 2, 1, {"block": 32, "layout": "NHD"}, {"layout": "HND"}
    ),
    "MLA": lambda b, t: b.deployment(b.latent(layers=2, cell=72), 2, 2, backend="LATENT"),
    "two tables in two stages": lambda b, t: b.deployment(t, (1, 2), 2),
    "sources that nobody reads": lambda b, t: b.deployment(b.heads(1, layers=1), 4, 2),
}


def plan_of(build: Any, prefill: int = 2, decode: int = 2, **options: Any) -> Any:
    return build.deployment(build.heads(4, layers=2), prefill, decode, **options).plan()


def held(pair: Any, request: str = "s", generation: str = "g", tokens: int = 40, first: int = 0) -> dict[str, Any]:
    """Prefill fills and holds a request; its page ids."""
    ids = pair.source.ids(tokens, first)
    pair.source.fill(request, ids, tokens)
    pair.source.hold(request, generation, tokens, ids)
    assert {(one.request, one.generation, one.lease) for one in pair.source.expect(Held)} == {
        (request, generation, 30.0)
    }
    return ids


def fails(pair: Any, code: str, *parts: str) -> list[Failed]:
    """Every decode rank hears of the failure, its pages are free, and nothing was written."""
    found = pair.destination.expect(Failed)
    assert {one.code for one in found} == {code}, found
    assert {one.freed for one in found} == {True}
    for part in parts:
        assert all(part in one.message for one in found), found
    assert pair.destination.stray_bytes() == 0
    assert pair.decode.transfers()["loads"] == 0
    return found


# What arrives.


@pytest.mark.parametrize("placement", ["agent", "engine"])
@pytest.mark.parametrize("name", PLANS)
def test_a_request_moves_from_prefill_to_decode(
    name: str, placement: str, stage: Any, build: Any, two_tables: Any, until: Any
) -> None:
    pair = stage.pair(PLANS[name](build, two_tables).plan(), placement)
    for number in range(3):
        request = f"s{number}"
        held(pair, request, tokens=40 + number)
        assert pair.prefill.transfers()["holds"] == len(pair.source.workers)
        ids = pair.destination.ids(40 + number, first=3)
        pair.destination.load(f"r{number}", pair.ref(request), 40 + number, ids)
        loaded = pair.destination.expect(Loaded)
        assert {one.request for one in loaded} == {f"r{number}"}
        assert min(one.bytes for one in loaded) > 0
        assert pair.destination.wrong_bytes(request, ids, 40 + number) == 0
        assert pair.destination.stray_bytes(ids) == 0
        assert {(one.request, one.reason) for one in pair.source.expect(Released)} == {(request, "completed")}
    until(lambda: pair.prefill.transfers()["holds"] == pair.decode.transfers()["loads"] == 0, "all requests have ended")


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_the_longest_names(stage: Any, build: Any, placement: str) -> None:
    pair = stage.pair(plan_of(build, 1, 1), placement)
    request, name, generation = "s" * 256, "ü" * 256, "g" * 256
    held(pair, request, generation)
    ids = pair.destination.ids(40)
    pair.destination.load(name, pair.ref(request, generation), 40, ids)
    assert {one.request for one in pair.destination.expect(Loaded)} == {name}
    assert pair.destination.wrong_bytes(request, ids, 40) == 0
    assert {one.reason for one in pair.source.expect(Released)} == {"completed"}


def test_many_requests_at_once(stage: Any, build: Any) -> None:
    loaded = check_plan(wire.encode(plan_of(build, 2, 4)), None)
    prefill, decode = stage.agent("prefill", loaded), stage.agent("decode", loaded)
    source, destination = stage.engine(prefill, 80), stage.engine(decode, 90)
    decode.introduce(prefill)
    for number in range(20):
        ids = source.ids(40, first=4 * number)
        source.fill(f"s{number}", ids, 40)
        source.hold(f"s{number}", "g", 40, ids)
        ref = SourceRef("prefill-0", f"s{number}", "g", "", 0)
        destination.load(f"r{number}", ref, 40, destination.ids(40, first=number, step=20))
    for worker in destination.workers:
        assert {worker.inbox.get(Loaded).request for _ in range(20)} == {f"r{number}" for number in range(20)}
    for number in range(20):
        assert destination.wrong_bytes(f"s{number}", destination.ids(40, first=number, step=20), 40) == 0
    for worker in source.workers:
        answers = [worker.inbox.get((Held, Released)) for _ in range(40)]
        assert sum(isinstance(one, Held) for one in answers) == 20
        assert {one.reason for one in answers if isinstance(one, Released)} == {"completed"}


def test_a_prefix_that_decode_has_already(stage: Any, build: Any) -> None:
    pair = stage.pair(plan_of(build))
    held(pair, tokens=40)
    ids = pair.destination.ids(40, first=3)
    pair.destination.fill("s", ids, 32)
    missing = {table: blocks[2:] for table, blocks in ids.items()}
    pair.destination.load("r", pair.ref(), 40, missing, start=32)
    assert {one.bytes for one in pair.destination.expect(Loaded)} == {16 * 2 * 2 * 16}
    assert pair.destination.wrong_bytes("s", ids, 40) == 0
    assert {one.reason for one in pair.source.expect(Released)} == {"completed"}


def test_a_request_that_decode_has_altogether(stage: Any, build: Any) -> None:
    pair = stage.pair(plan_of(build))
    held(pair)
    pair.destination.load("r", pair.ref(), 40, {}, start=40)
    assert {one.bytes for one in pair.destination.expect(Loaded)} == {0}
    assert {one.reason for one in pair.source.expect(Released)} == {"completed"}
    assert pair.destination.stray_bytes() == 0


def test_decode_may_ask_before_prefill_holds(stage: Any, build: Any, until: Any) -> None:
    pair = stage.pair(plan_of(build))
    ids = pair.destination.ids(40)
    pair.destination.load("r", pair.ref(), 40, ids)
    until(lambda: pair.decode.transfers()["loads"] == 2, "decode has asked")
    held(pair)
    pair.destination.expect(Loaded)
    assert pair.destination.wrong_bytes("s", ids, 40) == 0
    assert {one.reason for one in pair.source.expect(Released)} == {"completed"}


def test_a_peer_is_learned_from_a_request(stage: Any, build: Any) -> None:
    loaded = check_plan(wire.encode(plan_of(build)), None)
    prefill, decode = stage.agent("prefill", loaded), stage.agent("decode", loaded)
    source, destination = stage.engine(prefill), stage.engine(decode)
    ids = source.ids(40)
    source.fill("s", ids, 40)
    source.hold("s", "g", 40, ids)
    source.expect(Held)
    destination.load("r", SourceRef("prefill-0", "s", "g", "127.0.0.1", prefill.port), 40, destination.ids(40))
    destination.expect(Loaded)
    assert destination.wrong_bytes("s", destination.ids(40), 40) == 0


def test_replicas_of_prefill_are_told_apart(stage: Any, build: Any) -> None:
    loaded = check_plan(wire.encode(plan_of(build)), None)
    prefills = [stage.agent("prefill", loaded, pod=f"p{n}", replica=f"prefill-{n}") for n in range(2)]
    decode = stage.agent("decode", loaded)
    sources = [stage.engine(prefill) for prefill in prefills]
    destination = stage.engine(decode)
    decode.introduce(*prefills)
    for number, source in enumerate(sources):
        ids = source.ids(40)
        source.fill(f"of {number}", ids, 40)
        # The same request id and generation on both: only the replica tells them apart.
        source.hold("s", "g", 40, ids)
    for number in (1, 0):
        ids = destination.ids(40, first=4 * number)
        destination.load(f"r{number}", SourceRef(f"prefill-{number}", "s", "g", "", 0), 40, ids)
        destination.expect(Loaded)
        assert destination.wrong_bytes(f"of {number}", ids, 40) == 0


def test_two_decode_replicas_are_served_by_one_prefill(stage: Any, build: Any) -> None:
    loaded = check_plan(wire.encode(plan_of(build, 2, 4)), None)
    prefill = stage.agent("prefill", loaded)
    source = stage.engine(prefill)
    decodes = [stage.agent("decode", loaded, pod=f"d{n}", replica=f"decode-{n}") for n in range(2)]
    for number, decode in enumerate(decodes):
        destination = stage.engine(decode)
        decode.introduce(prefill)
        ids = source.ids(40)
        source.fill(f"s{number}", ids, 40)
        source.hold(f"s{number}", "g", 40, ids)
        source.expect(Held)
        destination.load("r", SourceRef("prefill-0", f"s{number}", "g", "", 0), 40, destination.ids(40))
        destination.expect(Loaded)
        assert destination.wrong_bytes(f"s{number}", destination.ids(40), 40) == 0
        source.expect(Released)
    assert sorted(one["replica"] for one in prefill.peers()) == ["decode-0", "decode-1"]


def test_addresses_of_ipv6(stage: Any, build: Any) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    loaded = check_plan(wire.encode(plan_of(build, 1, 1)), None)
    prefill, decode = stage.agent("prefill", loaded, host="::1"), stage.agent("decode", loaded, host="::1")
    source, destination = stage.engine(prefill), stage.engine(decode)
    decode.introduce(prefill)
    decode.ready_for()
    assert decode.peers()[0]["address"] == f"[::1]:{prefill.port}"
    ids = source.ids(40)
    source.fill("s", ids, 40)
    source.hold("s", "g", 40, ids)
    source.expect(Held)
    destination.load("r", SourceRef("prefill-0", "s", "g", "::1", prefill.port), 40, destination.ids(40))
    destination.expect(Loaded)


# What an operator sees.


def test_peers_are_introduced_and_dropped_over_http(stage: Any, build: Any, until: Any) -> None:
    loaded = check_plan(wire.encode(plan_of(build, 1, 2)), None)
    prefill, decode = stage.agent("prefill", loaded), stage.agent("decode", loaded)
    stage.engine(prefill)
    stage.engine(decode)
    peers = [
        {"role": "prefill", "replica": "prefill-0", "host": "127.0.0.1", "port": prefill.port},
        {"role": "decode", "replica": "decode-0", "host": "127.0.0.1", "port": decode.port},
    ]
    for agent in (prefill, decode):
        status, text = agent.request("POST", "/peers", {"peers": peers})
        assert (status, json.loads(text)) == (200, {"introduced": 2})
    decode.ready_for()
    (outgoing,) = json.loads(decode.get("/peers")[1])["peers"]
    assert (outgoing["role"], outgoing["replica"], outgoing["pod"]) == ("prefill", "prefill-0", "prefill-0")
    assert outgoing["incarnation"] == prefill.agent.incarnation
    assert [(link["from"], link["to"], link["state"]) for link in outgoing["links"]] == [
        (0, 0, "ready"),
        (0, 1, "ready"),
    ]
    assert all(link["probeMicroseconds"] > 0 for link in outgoing["links"])
    (incoming,) = json.loads(prefill.get("/peers")[1])["peers"]
    assert (incoming["role"], incoming["replica"], incoming["state"]) == ("decode", "decode-0", "connected")
    # Introducing the same again changes nothing; leaving one out drops it.
    decode.request("POST", "/peers", {"peers": peers})
    assert decode.peers()[0]["state"] == "ready"
    decode.request("POST", "/peers", {"peers": peers[1:]})
    assert decode.peers() == []
    until(lambda: prefill.peers() == [], "prefill has noticed")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[]",
        "{}",
        '{"peers": [{"role": "router", "replica": "r", "host": "h", "port": 1}]}',
        '{"peers": [{"role": "prefill", "replica": "r", "host": "h", "port": 70000}]}',
        '{"peers": [{"role": "prefill", "replica": "r", "host": "h", "port": 0}]}',
        '{"peers": [{"role": "prefill", "replica": "r", "host": "h", "port": 1, "more": 1}]}',
        json.dumps({"peers": [{"role": "prefill", "replica": "r" * 300, "host": "h", "port": 1}]}),
        json.dumps({"peers": [{"role": "prefill", "replica": "r", "host": "h" * 300, "port": 1}]}),
    ],
)
def test_introductions_that_are_wrong_are_refused_whole(stage: Any, build: Any, body: str) -> None:
    decode = stage.agent("decode", check_plan(wire.encode(plan_of(build, 1, 1)), None))
    status, text = decode.request("POST", "/peers", body)
    assert status == 400
    assert json.loads(text)["error"]
    assert decode.peers() == []


def test_metrics_count_what_happened(stage: Any, build: Any) -> None:
    pair = stage.pair(plan_of(build, 1, 1), hold_grace_seconds=0.1)
    held(pair)
    pair.destination.load("r", pair.ref(), 40, pair.destination.ids(40))
    (loaded,) = pair.destination.expect(Loaded)
    pair.source.expect(Released)
    pair.destination.load("q", pair.ref("never"), 40, pair.destination.ids(40))
    pair.destination.expect(Failed)
    text = pair.decode.get("/metrics")[1]
    assert 'disagg_loads_total{code="Loaded"} 1.0' in text
    assert 'disagg_loads_total{code="UnknownRequest"} 1.0' in text
    assert f"disagg_moved_bytes_total {float(loaded.bytes)}" in text
    assert "disagg_active_requests 0.0" in text
    assert 'disagg_holds_total{reason="completed"} 1.0' in pair.prefill.get("/metrics")[1]


# What is refused.


def test_a_peer_with_another_plan_is_refused_with_both_digests(stage: Any, build: Any, until: Any) -> None:
    ours = check_plan(wire.encode(plan_of(build)), None)
    theirs = check_plan(wire.encode(plan_of(build, block=32)), None)
    prefill, decode = stage.agent("prefill", theirs), stage.agent("decode", ours)
    pair = type("Pair", (), {})()
    pair.prefill, pair.decode = prefill, decode
    pair.source, pair.destination = stage.engine(prefill), stage.engine(decode)
    decode.introduce(prefill)
    until(lambda: decode.peers()[0]["state"] == "refused", "the peer is refused")
    assert decode.peers()[0]["code"] == "PlanMismatch"
    for digest in (ours.plan.digest, theirs.plan.digest):
        assert digest in decode.peers()[0]["message"]
    held(pair)
    ref = SourceRef("prefill-0", "s", "g", "127.0.0.1", prefill.port)
    pair.destination.load("r", ref, 40, pair.destination.ids(40))
    fails(pair, "PlanMismatch", ours.plan.digest, theirs.plan.digest)
    assert decode.refused("PlanMismatch") >= 1
    until(lambda: prefill.refused("PlanMismatch") >= 1, "prefill has refused it too")
    assert prefill.peers() == []


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_engines_that_report_other_factors_are_kept_apart(stage: Any, build: Any, first: str, until: Any) -> None:
    """A factor that the plan does not know, but that both engines report; whoever comes up first."""
    loaded = check_plan(wire.encode(plan_of(build, 1, 1)), None)
    pair = type("Pair", (), {})()
    pair.prefill, pair.decode = stage.agent("prefill", loaded), stage.agent("decode", loaded)
    pair.decode.introduce(pair.prefill)
    engines = {}
    for role in (first, "decode" if first == "prefill" else "prefill"):
        factors = {**loaded.expected_factors(role), "kernel": f"kernel of {role}"}
        agent = pair.prefill if role == "prefill" else pair.decode
        engines[role] = stage.engine(agent, factors=factors)
        # The first rank is known to both before the second comes.
        if role == "prefill" and first == "prefill":
            until(lambda: pair.decode.peers()[0]["state"] == "connecting", "decode has heard of prefill's rank")
    pair.source, pair.destination = engines["prefill"], engines["decode"]
    until(lambda: pair.decode.peers()[0]["state"] == "refused", "the peer is refused")
    assert pair.decode.peers()[0]["code"] == "CompatMismatch"
    for role in ("prefill", "decode"):
        assert f"kernel of {role}" in pair.decode.peers()[0]["message"]
    held(pair)
    pair.destination.load("r", SourceRef("prefill-0", "s", "g", "", 0), 40, pair.destination.ids(40))
    fails(pair, "CompatMismatch", "kernel of prefill", "kernel of decode")


@pytest.fixture(scope="module")
def shared(shared_stage: Any, build: Any) -> Any:
    """A pair for tests in which nothing is moved."""
    return shared_stage.pair(plan_of(build), hold_grace_seconds=0.2)


def let_go(pair: Any) -> None:
    """Prefill gives up what it still holds of `s`."""
    pair.source.abort("s")
    assert {one.reason for one in pair.source.expect(Released)} <= {"aborted", "completed"}


@pytest.mark.parametrize("tokens", [39, 41, 80])
def test_unequal_spans_are_refused_with_both_numbers(shared: Any, tokens: int) -> None:
    held(shared)
    shared.destination.load("r", shared.ref(), tokens, shared.destination.ids(tokens))
    fails(shared, "UnequalSpan", f"decode names {tokens} tokens, prefill holds 40")
    # Decode will not come again: prefill is told so, and does not hold for nothing.
    assert {one.reason for one in shared.source.expect(Released)} == {"completed"}


def test_a_stale_generation_is_refused_with_both(shared: Any) -> None:
    held(shared, generation="new")
    shared.destination.load("r", shared.ref(generation="old"), 40, shared.destination.ids(40))
    fails(shared, "StaleGeneration", "generation new, not old")
    let_go(shared)


def test_a_request_that_is_not_held(shared: Any) -> None:
    shared.destination.load("r", shared.ref("never"), 40, shared.destination.ids(40))
    fails(shared, "UnknownRequest", "never")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda ids: {"attention": [*ids["attention"][:-1], 20]}, "PageOutOfRange"),
        (lambda ids: {"attention": [*ids["attention"][:-1], -1]}, "PageOutOfRange"),
        (lambda ids: {"attention": [ids["attention"][0]] * 3}, "RepeatedPage"),
        (lambda ids: {"attention": ids["attention"][:-1]}, "TooFewPages"),
        (lambda ids: {}, "BadPages"),
    ],
)
def test_a_load_into_pages_that_are_wrong(shared: Any, change: Any, code: str) -> None:
    held(shared)
    shared.destination.load("r", shared.ref(), 40, change(shared.destination.ids(40)))
    fails(shared, code)
    assert {one.reason for one in shared.source.expect(Released)} == {"completed"}


def test_a_replica_that_nobody_knows(shared: Any) -> None:
    ref = SourceRef("prefill-7", "s", "g", "", 0)
    shared.destination.load("r", ref, 40, shared.destination.ids(40))
    fails(shared, "UnknownPeer", "prefill-7")


@pytest.mark.parametrize("host", ["no such host", "h" * 100, "a\0b", "256.256.256.256", "ü" * 70, "-", "127.0.0.1"])
def test_a_request_with_an_address_where_nobody_is(stage: Any, build: Any, host: str, until: Any) -> None:
    decode = stage.agent("decode", check_plan(wire.encode(plan_of(build, 1, 1)), None))
    destination = stage.engine(decode)
    # Twice: the second finds a peer that is known already.
    for name in ("r", "q"):
        destination.load(name, SourceRef("prefill-0", "s", "g", host, 1), 40, destination.ids(40))
        (failed,) = destination.expect(Failed)
        assert (failed.request, failed.code, failed.freed) == (name, "PeerUnreachable", True)
    # A client may name any address: nobody goes on dialling it.
    until(lambda: decode.peers() == [], "it is forgotten")


def test_a_request_is_held_once(shared: Any) -> None:
    ids = held(shared)
    shared.source.hold("s", "other", 40, ids)
    assert {(one.code, one.freed) for one in shared.source.expect(Failed)} == {("DuplicateHold", False)}
    let_go(shared)


def test_a_load_is_begun_once(shared: Any) -> None:
    for name in ("r", "r", "q"):
        shared.destination.load(name, shared.ref("not yet"), 40, shared.destination.ids(40))
    for freed, name in ((False, "r"), (True, "q")):
        found = shared.destination.expect(Failed)
        assert {(one.request, one.code, one.freed) for one in found} == {(name, "DuplicateLoad", freed)}
    shared.destination.abort("r")
    assert set(shared.destination.expect(Freed)) == {Freed("r")}


def test_a_hold_that_nobody_reads_expires(stage: Any, build: Any) -> None:
    loaded = check_plan(wire.encode(plan_of(build, 1, 1)), None)
    prefill = stage.agent("prefill", loaded, lease_seconds=0.2)
    source = stage.engine(prefill)
    ids = source.ids(40)
    source.hold("s", "g", 40, ids)
    assert source.expect(Held)[0].lease == 0.2
    assert source.expect(Released) == [Released("s", "g", "expired")]
    assert prefill.transfers()["holds"] == 0
    # The same pages, another life.
    source.workers[0].client.hold(Hold("s", "h", 40, {"attention": b"\0\0\0\0\1\0\0\0\2\0\0\0"}))
    source.expect(Held)
    assert source.expect(Released) == [Released("s", "h", "expired")]


def test_a_load_without_a_peer_ends_at_its_deadline(stage: Any, build: Any, until: Any) -> None:
    movers = stage.movers(plan_of(build, 1, 1))
    peer, decode, engine = stage.decode_of(movers, deadline_seconds=0.5)
    sock = peer.accept(ranks=False)
    engine.load("r", SourceRef("prefill-0", "s", "g", "", 0), 40, engine.ids(40))
    (failed,) = engine.expect(Failed)
    assert (failed.code, failed.freed) == ("DeadlineExceeded", True)
    assert decode.transfers()["loads"] == 0
    sock.close()


def test_abort_of_a_request_that_nobody_reads(shared: Any) -> None:
    held(shared)
    shared.source.abort("s")
    assert set(shared.source.expect(Released)) == {Released("s", "g", "aborted")}
    shared.destination.abort("never")
    assert set(shared.destination.expect(Freed)) == {Freed("never")}


def test_a_replica_that_came_back_elsewhere_is_found_by_the_request(stage: Any, build: Any) -> None:
    """What was introduced is older than what prefill says of itself."""
    loaded = check_plan(wire.encode(plan_of(build)), None)
    prefill, decode = stage.agent("prefill", loaded), stage.agent("decode", loaded)
    source, destination = stage.engine(prefill), stage.engine(decode, 20)
    gone = Address("127.0.0.1", 1)
    stage.threads.call(lambda: decode.agent.introduce([("prefill", "prefill-0", gone)]))
    ids, target = source.ids(40), destination.ids(40, first=5)
    source.fill("s", ids, 40)
    source.hold("s", "g", 40, ids)
    source.expect(Held)
    destination.load("r", SourceRef("prefill-0", "s", "g", "127.0.0.1", prefill.port), 40, target)
    destination.expect(Loaded)
    assert destination.wrong_bytes("s", target, 40) == 0
