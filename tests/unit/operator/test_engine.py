"""Real engines in local mode, the pure parts: rendered flags, prompts, and the comparison token for token."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from disagg_operator.children import CLUSTER
from disagg_operator.engine_flags import engine_args
from disagg_operator.local.chat import Answer, Prompt, _take, compare, make_prompts
from disagg_operator.reconcile import Snapshot, reconcile
from disagg_operator.types import DisaggDeployment, parse_deployment

Changed = Callable[[dict[str, Any]], dict[str, Any]]


def test_flags_come_from_the_spec(deployment: DisaggDeployment) -> None:
    words = engine_args(deployment.spec, "decode")
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--tensor-parallel-size"] == "4"
    assert flags["--block-size"] == "16"
    assert flags["--served-model-name"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert json.loads(flags["--kv-transfer-config"]) == {
        "kv_connector": "DisaggConnector",
        "kv_connector_module_path": "disagg_agent.engines.vllm.connector",
        "kv_load_failure_policy": "fail",
        "kv_role": "kv_consumer",
    }


@pytest.mark.parametrize(
    "argument",
    [
        "--block-size",
        "--block-size=32",
        "--block_size",
        "-tp",
        "--tensor-parallel-size=8",
        "--kv-transfer-config",
        "--served-model-name",
    ],
)
@pytest.mark.parametrize("key", ["args", "command"])
def test_a_user_argument_that_sets_the_same_is_refused_by_name(changed: Changed, argument: str, key: str) -> None:
    template = {"spec": {"containers": [{"name": "engine", key: ["--enforce-eager", argument]}]}}
    desired = reconcile(Snapshot(parse_deployment(changed({"spec.decode.template": template}))), CLUSTER)
    assert desired.refusal is not None
    assert desired.refusal.code == "FlagConflict"
    assert argument in desired.refusal.message
    assert desired.objects == ()


def test_users_arguments_stay_first(changed: Changed) -> None:
    template = {"spec": {"containers": [{"name": "engine", "args": ["--enforce-eager"]}]}}
    desired = reconcile(Snapshot(parse_deployment(changed({"spec.decode.template": template}))), CLUSTER)
    (engine,) = desired.objects[2]["spec"]["template"]["spec"]["containers"]
    assert engine["args"][:3] == ["--enforce-eager", "--served-model-name", "meta-llama/Llama-3.1-8B-Instruct"]


def test_prompts_hold_the_edges_of_blocks_and_share_beginnings() -> None:
    prompts = make_prompts(60, 300, seed=1)
    assert prompts == make_prompts(60, 300, seed=1)
    lengths = {len(prompt.tokens) for prompt in prompts}
    assert {1, 31, 32, 33, 63, 64, 65, 300} <= lengths
    beginnings = [prompt.tokens[:32] for prompt in prompts if len(prompt.tokens) > 32]
    assert len(set(beginnings)) < len(beginnings)


def answer(tokens: list[int], gaps: list[float] | None = None, error: str = "") -> Answer:
    return Answer(tokens, gaps or [1.0] * len(tokens), 0.1, 0.4, error)


@pytest.mark.parametrize(
    ("ours", "single", "outcome"),
    [
        (answer([1, 2, 3]), answer([1, 2, 3]), "identical"),
        (answer([1, 5, 6]), answer([1, 2, 3], [1.0, 5e-5, 1.0]), "tied"),
        (answer([1, 5, 6]), answer([1, 2, 3], [1.0, 2e-4, 1.0]), "different"),
        (answer([1, 2, 9]), answer([1, 2, 3], [5e-5, 5e-5, 1.0]), "different"),
        (answer([], error="HTTP 500"), answer([1, 2, 3]), "failed"),
        (answer([1, 2, 3]), answer([], error="HTTP 500"), "failed"),
    ],
)
def test_answers_are_compared_at_the_first_difference(ours: Answer, single: Answer, outcome: str) -> None:
    found = compare([Prompt(0, (1,))], [(ours, single)])
    document = found.document()
    assert [name for name in ("identical", "tied", "different", "failed") if document[name]] == [outcome]
    assert found.good == (outcome == "identical")


def test_ties_are_tolerated_only_as_one_in_a_hundred() -> None:
    tied = (answer([5]), answer([1], [0.0]))
    same = (answer([1]), answer([1]))
    assert compare([Prompt(n, (1,)) for n in range(100)], [tied] + [same] * 99).good
    assert not compare([Prompt(n, (1,)) for n in range(99)], [tied] + [same] * 98).good


def test_streamed_chunks_add_up() -> None:
    taken = Answer()
    for tokens, best in (([7], {"a": -0.1, "b": -2.1}), ([8, 9], {"a": -0.5, "b": -0.6})):
        choice = {"token_ids": tokens, "logprobs": {"top_logprobs": [best] * len(tokens)}}
        _take(taken, b"data: " + json.dumps({"choices": [choice]}).encode(), 0.0)
    _take(taken, b": comment", 0.0)
    _take(taken, b"data: [DONE]\n", 0.0)
    assert taken.tokens == [7, 8, 9]
    assert taken.gaps == pytest.approx([2.0, 0.1, 0.1])
    _take(taken, b'data: {"error": {"message": "boom"}}', 0.0)
    assert "boom" in taken.error
