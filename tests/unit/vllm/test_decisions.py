"""The scheduler half: exact orders for every path that a request can take through vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from disagg_agent.engines.vllm.decisions import HoldOrder, Identity, LoadOrder, Orders, SchedulerHalf, wire_id

BLOCK = 32
IDENTITY = Identity("prefill-0", "10.0.0.7", 9411, "sha256:p", tensor=2, pipeline=1)


@pytest.fixture
def half() -> SchedulerHalf:
    generations = iter(["g1", "g2", "g3"])
    return SchedulerHalf(IDENTITY, [BLOCK], lambda: next(generations))


def from_prefill(**changes: Any) -> dict[str, Any]:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[9, 8, 7]],
        "remote_engine_id": "prefill-0",
        "remote_request_id": "p-1",
        "remote_host": "10.0.0.7",
        "remote_port": 9411,
        "remote_num_tokens": 70,
        "disagg": {"generation": "g9", "plan": "sha256:p"},
    }
    return {key: value for key, value in {**params, **changes}.items() if value is not None}


TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


@pytest.mark.parametrize(
    ("params", "prompt", "computed", "expected"),
    [
        (None, 70, 0, (0, False)),
        ({}, 70, 0, (0, False)),
        (TO_DECODE, 70, 0, (0, False)),
        (from_prefill(), 70, 0, (70, True)),
        (from_prefill(), 70, 64, (6, True)),
        (from_prefill(), 70, 70, (0, False)),
        (from_prefill(do_remote_prefill=False), 70, 0, (0, False)),
    ],
)
def test_what_prefill_holds_beyond_the_local_prefix(
    half: SchedulerHalf, params: Any, prompt: int, computed: int, expected: tuple[int, bool]
) -> None:
    assert half.matched(params, prompt, computed) == expected


@pytest.mark.parametrize(
    ("external", "start", "blocks"), [(70, 0, ((1, 2, 3),)), (38, 32, ((2, 3),)), (6, 64, ((3,),))]
)
def test_a_load_names_the_pages_from_its_first_position(
    half: SchedulerHalf, external: int, start: int, blocks: Any
) -> None:
    params = from_prefill()
    half.allocated("d-1", params, 70, external, [[1, 2, 3]])
    assert half.orders() == Orders(
        loads=(LoadOrder("d-1", 70, start, blocks, "prefill-0", "p-1", "g9", "10.0.0.7", 9411),)
    )
    assert half.orders() == Orders()


def test_a_request_is_loaded_once(half: SchedulerHalf) -> None:
    params = from_prefill()
    half.allocated("d-1", params, 70, 70, [[1, 2, 3]])
    assert half.matched(params, 70, 0) == (0, False)
    half.allocated("d-1", params, 70, 0, [[1, 2, 3, 4]])
    assert len(half.orders().loads) == 1


def test_a_full_local_hit_still_tells_prefill(half: SchedulerHalf) -> None:
    half.allocated("d-1", from_prefill(), 64, 0, [[1, 2]])
    (load,) = half.orders().loads
    assert (load.start, load.tokens, load.blocks) == (64, 64, ((),))


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ({"disagg": None}, "disagg.generation"),
        ({"disagg": {"plan": "x"}}, "disagg.generation"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_port": None}, "remote_port"),
    ],
)
def test_parameters_of_another_connector_are_refused_by_name(
    half: SchedulerHalf, missing: dict[str, Any], named: str
) -> None:
    half.allocated("d-1", from_prefill(**missing), 70, 70, [[1, 2, 3]])
    (load,) = half.orders().loads
    assert named in load.refusal
    assert "does not run the disagg connector" in load.refusal


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_port", "http"),
        ("remote_port", 0),
        ("remote_port", 65536),
        ("remote_port", 9411.0),
        ("remote_port", True),
        ("remote_host", "\ud800"),
        ("remote_host", "10.0.0.7\n"),
        ("remote_engine_id", 7),
        ("remote_engine_id", "x" * 257),
        ("remote_host", ["10.0.0.7"]),
        ("remote_request_id", {"a": "b"}),
        ("disagg", {"generation": 7}),
        ("disagg", {"generation": "g" * 257}),
        ("disagg", ["generation"]),
    ],
)
def test_parameters_of_odd_types_are_refused_by_name(half: SchedulerHalf, name: str, value: Any) -> None:
    """They come from a client: nothing of them may end the engine, or reach an agent that would refuse the frame."""
    half.allocated("d-1", from_prefill(**{name: value}), 70, 70, [[1, 2, 3]])
    (load,) = half.orders().loads
    assert name in load.refusal
    assert (load.replica, load.source_request, load.generation, load.host, load.port) == ("", "", "", "", 0)


def test_an_id_that_is_too_long_is_told_as_a_digest(half: SchedulerHalf) -> None:
    request = "r" * 300
    _, params = half.finished(request, dict(TO_DECODE), True, 70, [[4, 5, 6]])
    assert params is not None
    assert params["remote_request_id"] == wire_id(request) != request
    assert len(wire_id(request)) <= 256
    assert wire_id("r" * 256) == "r" * 256
    assert wire_id("r" * 257) != wire_id("r" * 258)
    assert half.orders().holds[0].request == request


def test_a_finished_prefill_is_held_and_described(half: SchedulerHalf) -> None:
    delay, params = half.finished("p-1", dict(TO_DECODE), True, 70, [[4, 5, 6]])
    assert delay
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[4, 5, 6]],
        "remote_engine_id": "prefill-0",
        "remote_request_id": "p-1",
        "remote_host": "10.0.0.7",
        "remote_port": 9411,
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "remote_num_tokens": 70,
        "disagg": {"generation": "g1", "plan": "sha256:p"},
    }
    assert half.orders() == Orders(holds=(HoldOrder("p-1", "g1", 70, ((4, 5, 6),)),))


@pytest.mark.parametrize(
    ("params", "complete", "blocks"),
    [(None, True, [[1]]), ({}, True, [[1]]), (TO_DECODE, False, [[1]]), (TO_DECODE, True, [[]])],
    ids=["no parameters", "empty parameters", "aborted", "no pages"],
)
def test_what_is_not_held(half: SchedulerHalf, params: Any, complete: bool, blocks: Any) -> None:
    assert half.finished("p-1", params, complete, 70, blocks) == (False, None)
    assert half.orders() == Orders()


def test_an_abort_before_the_load_began_frees_prefill(half: SchedulerHalf) -> None:
    assert half.finished("d-1", from_prefill(), False, 0, []) == (False, None)
    (load,) = half.orders().loads
    assert (load.start, load.tokens, load.source_request) == (0, 0, "p-1")


def test_an_abort_of_a_running_load_is_passed_on_once(half: SchedulerHalf) -> None:
    params = from_prefill()
    half.allocated("d-1", params, 70, 70, [[1, 2, 3]])
    half.orders()
    assert half.finished("d-1", params, False, 0, [[1, 2, 3]]) == (False, None)
    assert half.orders() == Orders(aborts=("d-1",))


def test_a_request_that_ends_after_its_load_aborts_nothing(half: SchedulerHalf) -> None:
    params = from_prefill()
    half.allocated("d-1", params, 70, 70, [[1, 2, 3]])
    half.orders()
    half.loaded({"d-1"})
    assert half.finished("d-1", params, True, 80, [[1, 2, 3]]) == (False, None)
    assert half.orders() == Orders()
