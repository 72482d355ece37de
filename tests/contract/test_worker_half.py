"""The worker half of a real engine against real agents: long request ids, refusals, an agent that is restarted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from disagg_agent.engine_client import EngineRank
from disagg_agent.engines.synthetic.content import request_seed
from disagg_agent.engines.synthetic.pool import RankPool
from disagg_agent.engines.vllm.decisions import Blocks, HoldOrder, LoadOrder, Orders, wire_id
from disagg_agent.engines.vllm.ordering import Step
from disagg_agent.engines.vllm.worker import Registration, Results, WorkerHalf
from disagg_agent.plan_loader import check_plan
from disagg_plan import wire

SECONDS = 20.0
TOKENS = 40
BLOCKS: Blocks = ((0, 1, 2),)

pytestmark = pytest.mark.nixl


class Half:
    """A `WorkerHalf` over the memory of one rank, and what it has reported."""

    def __init__(self, agent: Any) -> None:
        connect = partial(EngineRank, agent.config.socket, SECONDS)
        connection = connect()
        loaded, role = connection.loaded, connection.welcome.role
        self.tables = {group.name: group.table for group in loaded.plan.groups}
        self.pool = RankPool(loaded.side(role), 0, 16, self.tables)
        registration = Registration(
            0, loaded.expected_factors(role), [self.pool.segment], [self.pool.fd], self.pool.regions, "agent"
        )
        self.half = WorkerHalf(connection, registration, sorted(set(self.tables.values())), connect)
        self.results = Results()

    def hold(self, request: str, generation: str = "g") -> None:
        self.half.execute(Orders(holds=(HoldOrder(request, generation, TOKENS, BLOCKS),)), Step(1))

    def load(self, request: str, source: str, replica: str, port: int, **changes: Any) -> None:
        values = {"generation": "g", "host": "127.0.0.1", "refusal": "", **changes}
        order = LoadOrder(request, TOKENS, 0, BLOCKS, replica, source, port=port, **values)
        self.half.execute(Orders(loads=(order,)), Step(1))

    def collect(self, idle: bool = True) -> Results:
        new = self.half.results(idle)
        self.results.sent |= new.sent
        self.results.received |= new.received
        self.results.failed |= new.failed
        return self.results

    def close(self) -> None:
        self.half.close()
        os.close(self.pool.fd)


@pytest.fixture
def halves(stage: Any, build: Any) -> Iterator[Any]:
    """Both sides of a plan of one rank each, paired."""
    plan = build.deployment(build.heads(4, layers=2), 1, 1).plan()
    loaded = check_plan(wire.encode(plan), None)
    prefill, decode = stage.agent("prefill", loaded), stage.agent("decode", loaded)
    source, target = Half(prefill), Half(decode)
    decode.introduce(prefill)
    decode.ready_for()
    yield prefill, decode, source, target
    source.close()
    target.close()


def moves(prefill: Any, source: Half, target: Half, until: Any, name: str) -> None:
    """A whole request works."""
    ids = {table: np.asarray(BLOCKS[0], np.int64) for table in source.tables.values()}
    source.pool.fill(request_seed(name), ids, 0, TOKENS)
    source.hold(name)
    target.load(f"{name}-d", wire_id(name), "prefill-0", prefill.port)
    until(lambda: f"{name}-d" in target.collect().received, "the load ends")
    until(lambda: name in source.collect().sent, "the hold ends")
    assert f"{name}-d" not in target.results.failed
    assert target.pool.verify(request_seed(name), ids, TOKENS)[1] == 0


def test_ids_that_are_too_long_for_agents_come_back_as_they_were(halves: Any, until: Any) -> None:
    """A client may choose the id of its request; a frame that is refused would cost the engine its agent."""
    prefill, decode, source, target = halves
    moves(prefill, source, target, until, "short")
    moves(prefill, source, target, until, "long-" * 400)
    assert prefill.transfers() == decode.transfers() == {"holds": 0, "loads": 0}


def test_what_cannot_be_followed_fails_without_asking_the_agent(halves: Any, until: Any) -> None:
    _, decode, _, target = halves
    target.load("r", "s", "", 0, refusal="kv_transfer_params lack everything")
    assert target.collect(idle=False).failed == target.results.received == {"r"}
    assert decode.transfers()["loads"] == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_restarted_agent_is_found_again(halves: Any, stage: Any, until: Any, role: str) -> None:
    """What was under way fails or is given back at once; the engine registers again and serves on."""
    prefill, decode, source, target = halves
    source.hold("held")
    target.load("late", "nobody", "prefill-0", prefill.port)
    until(lambda: decode.transfers()["loads"] == prefill.transfers()["holds"] == 1, "both are under way")
    old = prefill if role == "prefill" else decode
    old.stop()
    half, ended = (source, "held") if role == "prefill" else (target, "late")
    until(lambda: ended in half.collect().sent | half.results.received, "what was under way ends")
    if role == "decode":
        assert "late" in target.results.failed
    new = stage.agent(role, old.loaded)
    until(lambda: not new.agent.not_ready(), "the engine registers again")
    prefill, decode = (new, decode) if role == "prefill" else (prefill, new)
    decode.introduce(prefill)
    decode.ready_for()
    until(lambda: "late" in target.collect().received, "the load of the earlier life ends")
    moves(prefill, source, target, until, "after")


def test_while_the_agent_is_away_nothing_waits(halves: Any, until: Any) -> None:
    prefill, decode, source, target = halves
    prefill.stop()
    decode.stop()
    until(lambda: source.half.lost and target.half.lost, "both know")
    source.hold("h")
    target.load("l", "h", "prefill-0", 1)
    assert source.collect(idle=False).sent == {"h"}
    assert target.collect(idle=False).failed == {"l"}


def test_an_agent_with_another_plan_is_no_successor(
    halves: Any, stage: Any, build: Any, until: Any, caplog: Any
) -> None:
    prefill, _, source, _ = halves
    prefill.stop()
    other = check_plan(wire.encode(build.deployment(build.heads(4, layers=3), 1, 1).plan()), None)
    wrong = stage.agent("prefill", other)
    until(lambda: "refuses this engine" in caplog.text, "the engine has looked in")
    assert wrong.agent.not_ready()
    assert source.half.lost
