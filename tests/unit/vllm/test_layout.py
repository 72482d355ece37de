"""What a worker registers: regions from facts about its tensors, matched by layer and never by position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from disagg_agent.cards import HOST, SegmentDeclaration
from disagg_agent.engines.vllm.layout import TensorFacts, layer_id, regions, tables
from disagg_agent.errors import RegistrationRefused
from disagg_agent.messages import Register
from disagg_agent.plan_loader import check_plan
from disagg_agent.registry import check_registration
from disagg_operator.children import LOCAL, expected_factors
from disagg_operator.reconcile import Snapshot, reconcile
from disagg_operator.types import parse_deployment
from disagg_plan import wire

PAGES, HEADS, BLOCK, HEAD = 40, 2, 32, 32
PAGE = HEADS * BLOCK * 2 * HEAD * 4


@pytest.fixture
def plan() -> wire.Plan:
    document = yaml.safe_load((Path(__file__).parents[3] / "examples" / "tiny-llama-vllm.yaml").read_text())
    desired = reconcile(Snapshot(parse_deployment(document)), LOCAL)
    assert desired.plan is not None
    return desired.plan


@pytest.fixture
def tensors() -> list[TensorFacts]:
    """A decode rank of two: two of four heads, all layers views of one storage, in no helpful order."""
    strides = (HEADS * BLOCK * 2 * HEAD, BLOCK * 2 * HEAD, 2 * HEAD, 1)
    return [
        TensorFacts(
            f"model.layers.{layer}.self_attn.attn", 0, layer * PAGES * PAGE, (PAGES, HEADS, BLOCK, 2 * HEAD), strides, 4
        )
        for layer in (2, 0, 3, 1)
    ]


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.3.self_attn.attn", 3), ("transformer.h.11.attn", 11), ("language_model.model.layers.0.attn", 0)],
)
def test_layer_of_a_cache_entry(name: str, layer: int) -> None:
    assert layer_id(name) == layer


@pytest.mark.parametrize("name", ["attn", "layers.x.attn", "model.layers.1.layers.2.attn"])
def test_an_entry_that_names_no_layer_is_refused(name: str) -> None:
    with pytest.raises(RegistrationRefused) as refused:
        layer_id(name)
    assert refused.value.code == "UnknownLayer"
    assert name in refused.value.message


def test_registered_regions_are_those_of_the_plan(plan: wire.Plan, tensors: list[TensorFacts]) -> None:
    declared = regions(plan, tensors)
    assert [(one.layer, one.offset) for one in declared] == [(layer, layer * PAGES * PAGE) for layer in (2, 0, 3, 1)]
    message = Register(
        1, 1, expected_factors(plan, "decode"), "agent", [SegmentDeclaration(4 * PAGES * PAGE, HOST)], declared
    )
    pool = check_registration(check_plan(wire.encode(plan), None), "decode", message)
    assert pool.pages == {"attention": PAGES}


def register(plan: wire.Plan, tensors: list[TensorFacts]) -> None:
    segments = [SegmentDeclaration(4 * PAGES * PAGE, HOST)]
    message = Register(1, 1, expected_factors(plan, "decode"), "agent", segments, regions(plan, tensors))
    check_registration(check_plan(wire.encode(plan), None), "decode", message)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"element": 2}, "WrongShape", f"bytes of a page is {PAGE // 2}, the plan has {PAGE}"),
        ({"shape": (PAGES, 4, BLOCK, 2 * HEAD)}, "WrongShape", "is not contiguous"),
        ({"name": "model.layers.7.self_attn.attn"}, "UnknownLayer", "layer 7"),
    ],
)
def test_what_differs_from_the_plan_is_refused_with_both_values(
    plan: wire.Plan, tensors: list[TensorFacts], change: dict[str, object], code: str, said: str
) -> None:
    # The strides stay as they were where the shape grows, so the block is not contiguous any more.
    wrong = [replace(tensors[0], **change), *tensors[1:]]  # type: ignore[arg-type]
    if "shape" in change:
        wrong[0] = replace(wrong[0], strides=(HEADS * BLOCK * 2 * HEAD, BLOCK * 2 * HEAD + 1, 2 * HEAD, 1))
    with pytest.raises(RegistrationRefused) as refused:
        register(plan, wrong)
    assert refused.value.code == code
    assert said in refused.value.message


def test_a_missing_layer_is_refused(plan: wire.Plan, tensors: list[TensorFacts]) -> None:
    with pytest.raises(RegistrationRefused) as refused:
        register(plan, tensors[1:])
    assert (refused.value.code, "layer 2" in refused.value.message) == ("MissingRegion", True)


def test_cache_groups_map_to_block_tables(plan: wire.Plan) -> None:
    assert tables(plan, [["model.layers.0.self_attn.attn", "model.layers.3.self_attn.attn"]]) == ["attention"]
