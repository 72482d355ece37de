"""Laws of every plan, over random geometries, cuts and layouts."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_plan import canonical, wire
from disagg_plan.geometry import Geometry
from disagg_plan.planner import build_plan
from disagg_plan.proof import prove


def held_bytes(geometry, side):
    """Bytes per token that the ranks of one side hold together, by counting."""
    total = 0
    tensor = side.parallelism.tensor
    for group in geometry.groups:
        for part in group.parts:
            copies = part.units * tensor if part.sharding == "replicated" else max(part.units, tensor)
            total += len(group.layers) * copies * part.cell_bytes
    return total


def moved_bytes(plan):
    """Bytes per token that all edges carry, times the sub-block of each group."""
    total = 0
    for edge in plan.edges:
        for copy in plan.shapes[edge.shape]:
            layers = len(layer_ids(copy.layers))
            whole, rest = divmod(
                copy.bytes * prod(loop.count for loop in copy.repeat), plan.group(copy.group).sub_tokens
            )
            assert rest == 0
            total += layers * whole
    return total


def layer_ids(text):
    ends = [[int(number) for number in piece.split("-")] for piece in text.split(",")]
    return [layer for end in ends for layer in range(end[0], end[-1] + 1)]


@given(data=st.data())
def test_every_byte_arrives_once(deployments, execution, data):
    deployment = data.draw(deployments())
    plan = deployment.plan()
    proof = prove(plan)
    held = held_bytes(deployment.geometry, deployment.decode)
    assert proof.bytes_per_token == moved_bytes(plan) == held
    assert plan.summary.bytes_per_token == deployment.geometry.bytes_per_token
    assert wire.decode(wire.encode(plan)) == plan
    start_blocks = data.draw(st.integers(0, 3))
    tokens = data.draw(st.integers(0, 20))
    executed = execution(wire.document(plan), deployment, start_blocks, tokens, data.draw(st.integers(0, 99)))
    executed.by_copies()
    executed.by_runs()
    assert executed.is_right()


@given(data=st.data())
def test_order_of_a_declaration_carries_no_meaning(deployments, data):
    deployment = data.draw(deployments())
    groups = [
        dataclasses.replace(group, layers=tuple(data.draw(st.permutations(group.layers))))
        for group in data.draw(st.permutations(deployment.geometry.groups))
    ]
    prefill, decode = (
        dataclasses.replace(side, stages=tuple(tuple(data.draw(st.permutations(stage))) for stage in side.stages))
        for side in (deployment.prefill, deployment.decode)
    )
    shuffled = build_plan(Geometry(tuple(groups)), prefill, decode, {"b": 1, "a": "x"})
    straight = build_plan(deployment.geometry, deployment.prefill, deployment.decode, {"a": "x", "b": 1})
    assert shuffled.digest == straight.digest
    assert shuffled.compat.digest == straight.compat.digest
    assert wire.encode(shuffled) == wire.encode(straight)


@given(data=st.data())
def test_a_side_against_itself_is_the_identity(deployments, data):
    deployment = data.draw(deployments())
    twin = dataclasses.replace(deployment.prefill, role="decode")
    plan = dataclasses.replace(deployment, decode=twin).plan()
    prove(plan)
    assert plan.source.pages == plan.destination.pages
    assert plan.source.ranks == plan.destination.ranks
    assert [(edge.source, edge.destination) for edge in plan.edges] == [
        (rank, rank) for rank in range(len(plan.source.ranks))
    ]
    for shape in plan.shapes:
        for copy in shape:
            assert (copy.src, copy.src_sub) == (copy.dst, copy.dst_sub)
            assert all(loop.src == loop.dst for loop in copy.repeat)


@given(data=st.data())
def test_edges_are_said_once(deployments, data):
    """Sorted edges, shapes in order of first use and unlike each other, pages likewise."""
    plan = data.draw(deployments()).plan()
    pairs = [(edge.source, edge.destination) for edge in plan.edges]
    assert pairs == sorted(set(pairs))
    first_uses = list(dict.fromkeys(edge.shape for edge in plan.edges))
    assert first_uses == list(range(len(plan.shapes)))
    assert len({canonical.dumps([copy.model_dump(mode="json") for copy in shape]) for shape in plan.shapes}) == len(
        plan.shapes
    )
    for side in (plan.source, plan.destination):
        used = list(dict.fromkeys(index for rank in side.ranks for index in rank.pages.values()))
        assert used == list(range(len(side.pages)))


@given(data=st.data())
def test_completions_name_the_readers(deployments, data):
    plan = data.draw(deployments()).plan()
    for rank in range(len(plan.source.ranks)):
        readers = sorted(edge.destination for edge in plan.edges if edge.source == rank)
        told = plan.completions[str(rank)]
        assert told == readers or (not readers and len(told) == 1 and told[0] in range(len(plan.destination.ranks)))


@pytest.mark.parametrize("copies", [1, 2])
@given(data=st.data())
def test_a_plan_does_not_depend_on_what_was_planned_before(deployments, copies, data):
    deployment = data.draw(deployments(most_groups=1))
    before = wire.encode(deployment.plan())
    for _ in range(copies):
        data.draw(deployments(most_groups=1)).plan()
    assert wire.encode(deployment.plan()) == before
