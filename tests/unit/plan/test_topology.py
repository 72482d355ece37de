from __future__ import annotations

import re

import pytest

from disagg_plan.errors import Refusal
from disagg_plan.topology import can_hold, check_stages, default_stages, unit_interval, workable_sizes


@pytest.mark.parametrize(
    ("units", "tensor", "intervals"),
    [
        (8, 1, [(0, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (8, 8, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)]),
        (2, 8, [(0, 1)] * 4 + [(1, 2)] * 4),
        (1, 3, [(0, 1)] * 3),
        (6, 2, [(0, 3), (3, 6)]),
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (3, 6, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]),
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_split_units(units, tensor, intervals):
    assert can_hold(units, tensor)
    assert [unit_interval(units, "split", tensor, rank) for rank in range(tensor)] == intervals


@pytest.mark.parametrize("units", [1, 3, 8])
@pytest.mark.parametrize("tensor", [1, 2, 5])
def test_replicated_units(units, tensor):
    assert {unit_interval(units, "replicated", tensor, rank) for rank in range(tensor)} == {(0, units)}


@pytest.mark.parametrize(("units", "tensor"), [(8, 3), (6, 4), (3, 2), (4, 6), (8, 12)])
def test_units_that_cannot_be_placed(units, tensor):
    assert not can_hold(units, tensor)
    with pytest.raises(ValueError, match=f"{units} units cannot be placed on {tensor} ranks"):
        unit_interval(units, "split", tensor, 0)


@pytest.mark.parametrize(
    ("units", "limit", "sizes"),
    [
        (8, 64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (6, 12, [1, 2, 3, 6, 12]),
        (1, 4, [1, 2, 3, 4]),
        (7, 6, [1]),
    ],
)
def test_workable_sizes(units, limit, sizes):
    assert workable_sizes(units, limit) == sizes


@pytest.mark.parametrize(
    ("layers", "pipeline", "sizes"),
    [
        # What vLLM's get_pp_indices gives: the rest goes to the stages before the last, backwards.
        (61, 1, [61]),
        (61, 2, [31, 30]),
        (61, 3, [20, 21, 20]),
        (61, 4, [15, 15, 16, 15]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        (32, 3, [11, 11, 10]),
        (32, 4, [8, 8, 8, 8]),
        (32, 5, [6, 6, 7, 7, 6]),
        (80, 3, [27, 27, 26]),
        (5, 4, [1, 1, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
def test_default_stages(layers, pipeline, sizes):
    stages = default_stages(range(layers), pipeline)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_default_stages_of_scattered_layers():
    assert default_stages([9, 3, 5, 0, 7], 2) == ((0, 3, 5), (7, 9))


def test_too_many_stages():
    with pytest.raises(Refusal) as refused:
        default_stages(range(3), 4)
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("TooManyStages", "parallelism.pipeline")
    assert refusal.message == "4 pipeline stages for 3 layers leave a stage empty"
    (most,) = re.findall(r"\d+", refusal.remedy)
    assert [len(stage) for stage in default_stages(range(3), int(most))] == [1, 1, 1]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([[0, 1], []], "stage 1 is empty"),
        ([[0, 1], [1, 2, 3]], "stage 1 repeats layers 1"),
        ([[0, 1, 1], [2, 3]], "stage 0 repeats layers 1"),
        ([[0, 1], [2, 3, 7, 8]], "stage 1 names layers 7-8 that the model lacks"),
        ([[0], [3]], "no stage holds layers 1-2"),
    ],
)
def test_bad_stages(stages, message):
    with pytest.raises(Refusal) as refused:
        check_stages(stages, range(4), "prefill.parallelism.pipelineLayers")
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("BadStages", "prefill.parallelism.pipelineLayers")
    assert refusal.message == message
    assert refusal.remedy == "Give every layer of 0-3 to one stage"
    check_stages([[0, 2], [3, 1]], range(4), "prefill.parallelism.pipelineLayers")
