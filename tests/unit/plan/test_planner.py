"""What the planner refuses: code, field, numbers, and a way out that works when it is taken."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from disagg_plan.errors import FormatError, Refusal
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.planner import PROTOCOL_VERSION, build_plan
from disagg_plan.profiles import find_profile
from disagg_plan.proof import prove


def refusal_of(deployment):
    with pytest.raises(Refusal) as refused:
        deployment.plan()
    return refused.value


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize(
    ("units", "prefill", "decode", "role", "tensor", "sizes"),
    [
        (8, 3, 4, "prefill", 3, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (8, 4, 6, "decode", 6, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (6, 3, 4, "decode", 4, [1, 2, 3, *range(6, 65, 6)]),
        (3, 2, 2, "prefill", 2, [1, *range(3, 65, 3)]),
    ],
)
def test_indivisible_units(build, units, prefill, decode, role, tensor, sizes):
    geometry = build.heads(units, layers=1)
    refusal = refusal_of(build.deployment(geometry, prefill, decode))
    assert (refusal.code, refusal.field) == ("IndivisibleUnits", f"{role}.parallelism.tensor")
    assert refusal.message == (
        f"{units} units of part 'k' cannot be placed on {tensor} tensor-parallel ranks: "
        "neither number divides the other"
    )
    assert numbers(refusal.remedy) == sizes
    for size in sizes:
        chosen = {"prefill": (size, 1), "decode": (1, size)}[role]
        prove(build.deployment(geometry, *chosen).plan())


def test_indivisible_units_of_several_parts(build):
    """The sizes named suit every part of the model, not only the one that did not fit."""
    geometry = Geometry(
        (
            Group("attention", (0, 1), (Part("k", 6, "split", 8), Part("v", 6, "split", 8)), "attention"),
            Group("index", (0, 1), (Part("index_k", 4, "split", 4),), "attention"),
        )
    )
    refusal = refusal_of(build.deployment(geometry, 1, 5))
    assert (refusal.code, refusal.field) == ("IndivisibleUnits", "decode.parallelism.tensor")
    sizes = numbers(refusal.remedy)
    assert sizes == [1, 2, *range(12, 65, 12)]
    for size in sizes:
        prove(build.deployment(geometry, 1, size).plan())


def test_decode_context(build):
    deployment = build.deployment(build.latent(), 2, 4)
    for role in ("prefill", "decode"):
        side = getattr(deployment, role)
        cut = replace(side, parallelism=side.parallelism.model_copy(update={"decode_context": 2}))
        refusal = refusal_of(replace(deployment, **{role: cut}))
        assert (refusal.code, refusal.field) == ("UnsupportedTopology", f"{role}.parallelism.decodeContext")
        assert "decode context parallelism of 2 is not planned yet" in refusal.message
        assert refusal.remedy == "Use 1"
        one = replace(cut, parallelism=cut.parallelism.model_copy(update={"decode_context": 1}))
        prove(replace(deployment, **{role: one}).plan())


def test_state(build):
    state = Group("ssm", (0, 1), (Part("ssm", 8, "split", 64),), "ssm", kind="state")
    geometry = Geometry((*build.heads(8, layers=(2, 3)).groups, state))
    refusal = refusal_of(build.deployment(geometry, 2, 4))
    assert (refusal.code, refusal.field) == ("UnsupportedCache", "model.geometry.groups[ssm].kind")
    assert refusal.message == "group 'ssm' holds state, and only paged groups are planned yet"
    assert refusal.remedy == "Serve this model without disaggregation"


@pytest.mark.parametrize(
    ("geometry", "prefill", "decode", "held"),
    [
        ("heads", "JOINT", "OPAQUE", ("k+v", "kv")),
        ("heads", "OPAQUE", "SEPARATE", ("kv", "k+v")),
        ("latent", "JOINT", "OPAQUE", ("latent", "latent")),
        ("latent", "OPAQUE", "JOINT", ("latent", "latent")),
    ],
)
def test_layout_mismatch(build, geometry, prefill, decode, held):
    made = build.heads(4) if geometry == "heads" else build.latent()
    deployment = build.deployment(made, 2, 2, {"backend": prefill}, {"backend": decode})
    refusal = refusal_of(deployment)
    assert (refusal.code, refusal.field) == ("LayoutMismatch", "decode.engine.backend")
    assert f"prefill pages (synthetic/{prefill}) hold {held[0]}, decode pages (synthetic/{decode}) hold {held[1]}" in (
        refusal.message
    )
    assert refusal.remedy == "Use the same attention backend on both sides"
    prove(replace(deployment, decode=replace(deployment.decode, profile=deployment.prefill.profile)).plan())


def test_two_kernels_of_their_own_order(build):
    """Two opaque backends hold equal parts, and still each has its own order of bytes."""
    other = replace(find_profile("synthetic", "1", "OPAQUE"), backend="OTHER")
    deployment = build.deployment(build.heads(4), 2, 2, backend="OPAQUE")
    refusal = refusal_of(replace(deployment, decode=replace(deployment.decode, profile=other)))
    assert refusal.code == "LayoutMismatch"
    assert "synthetic/OTHER" in refusal.message


def test_opaque_blocks_of_two_sizes(build):
    deployment = build.deployment(build.heads(4), 2, 4, {"block": 32}, {"block": 16}, backend="OPAQUE")
    refusal = refusal_of(deployment)
    assert (refusal.code, refusal.field) == ("OpaqueBlockSize", "decode.kvCache.blockSize")
    assert refusal.message == (
        "synthetic/OPAQUE pages can be cut by head only, and block sizes differ: prefill 32, decode 16"
    )
    assert refusal.remedy == "Use 32 on both sides"
    (size,) = numbers(refusal.remedy)
    prove(build.deployment(build.heads(4), 2, 4, backend="OPAQUE", block=size).plan())


def test_a_joint_page_and_a_separate_one_hold_the_same_cells(build):
    prove(build.deployment(build.heads(4), 2, 4, {"backend": "JOINT"}, {"backend": "SEPARATE"}).plan())


def test_unlike_parts(build):
    uneven = (Part("k", 8, "split", 8), Part("scale", 1, "replicated", 4))
    geometry = Geometry((Group("mixed", (0, 1), uneven, "mixed"),))
    refusal = refusal_of(build.deployment(geometry, 2, 4))
    assert (refusal.code, refusal.field) == ("UnsupportedLayout", "model.geometry.groups[mixed].parts")
    prove(build.deployment(geometry, 2, 4, backend="SEPARATE").plan())


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([[0, 1], [1, 2, 3]], "stage 1 repeats layers 1"),
        ([[0, 1], [3]], "no stage holds layers 2"),
        ([[0, 1, 2, 3], []], "stage 1 is empty"),
        ([[0, 1], [2, 3, 4]], "stage 1 names layers 4 that the model lacks"),
    ],
)
def test_stages(build, stages, message):
    geometry = build.heads(4)
    refusal = refusal_of(build.deployment(geometry, 2, 2, {}, {"stages": stages}))
    assert (refusal.code, refusal.field) == ("BadStages", "decode.parallelism.pipelineLayers")
    assert refusal.message == message
    assert refusal.remedy == "Give every layer of 0-3 to one stage"
    prove(build.deployment(geometry, 2, 2, {}, {"stages": [[3, 1], [0, 2]]}).plan())


@pytest.mark.parametrize("pipeline", [1, 3])
def test_stages_of_another_number(build, pipeline):
    deployment = build.deployment(build.heads(4), 2, 2, {"stages": [[0, 1], [2, 3]]}, {})
    side = deployment.prefill
    cut = replace(side, parallelism=side.parallelism.model_copy(update={"pipeline": pipeline}))
    refusal = refusal_of(replace(deployment, prefill=cut))
    assert (refusal.code, refusal.field) == ("BadStages", "prefill.parallelism.pipelineLayers")
    assert refusal.message == f"2 stages are given for {pipeline} pipeline ranks"
    assert refusal.remedy == f"Give {pipeline} stages, or set parallelism.pipeline to 2"
    prove(deployment.plan())


def test_bad_geometry_is_refused_first(build):
    parts = (Part("k", 0, "split", 8),)
    deployment = build.deployment(Geometry((Group("attention", (0,), parts, "attention"),)), 2, 2)
    refusal = refusal_of(deployment)
    assert (refusal.code, refusal.field) == ("BadGeometry", "model.geometry")


def test_what_both_sides_must_agree_on(build):
    deployment = build.deployment(build.heads(4), 2, 4, {"block": 32}, {"layout": "NHD"})
    plan = deployment.plan()
    factors = dict(plan.compat.factors)
    assert factors.pop("groups").startswith("sha256:")
    assert factors == {
        "model": "test",
        "protocol": PROTOCOL_VERSION,
        "prefill": {"blockTokens": 32, "profile": "synthetic/JOINT", "layout": "HND"},
        "decode": {"blockTokens": 16, "profile": "synthetic/JOINT", "layout": "NHD"},
    }


def test_factors_decide_compatibility_and_nothing_else(build):
    deployment = build.deployment(build.heads(4), 2, 4)
    one, other = (
        build_plan(deployment.geometry, deployment.prefill, deployment.decode, {"model": name}) for name in ("a", "b")
    )
    assert one.compat.digest != other.compat.digest
    assert one.digest != other.digest
    assert (one.edges, one.shapes, one.source, one.destination) == (
        other.edges,
        other.shapes,
        other.source,
        other.destination,
    )


@pytest.mark.parametrize("value", [0.5, None, float("nan")])
def test_factors_have_a_canonical_form(build, value):
    deployment = build.deployment(build.heads(4), 2, 4)
    with pytest.raises(FormatError) as refused:
        build_plan(deployment.geometry, deployment.prefill, deployment.decode, {"x": value})
    assert refused.value.code == "NotCanonical"
