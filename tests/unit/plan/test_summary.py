from __future__ import annotations

import pytest

from disagg_plan.summary import SHORT_RUN_BYTES, source_bound, summarise


def figures(plan):
    summary = plan.summary
    return (
        summary.bytes_per_token,
        summary.copies_per_block,
        summary.max_source_bytes,
        summary.mean_source_bytes,
        summary.max_destination_bytes,
    )


@pytest.mark.parametrize(
    ("units", "prefill", "decode", "expected"),
    [
        # 4 layers of 8 heads, K and V of 8 bytes: 512 bytes a token.
        (8, 1, 1, (512, 4, 512, 512, 512)),
        (8, 2, 4, (512, 16, 256, 256, 128)),
        (8, 4, 2, (512, 16, 128, 128, 256)),
        # 2 heads on 4 and on 8 ranks: 128 bytes once, 512 sent.
        (2, 4, 8, (128, 32, 128, 128, 64)),
        # Half of the sources are read.
        (4, 8, 2, (256, 16, 64, 32, 128)),
        # 6 heads over 3 and 2: the middle rank serves both.
        (6, 3, 2, (384, 16, 128, 128, 192)),
    ],
)
def test_figures(build, units, prefill, decode, expected):
    plan = build.deployment(build.heads(units), prefill, decode).plan()
    assert figures(plan) == expected
    assert plan.summary.state_bytes_per_request == 0


def test_figures_of_a_latent_in_two_and_three(build):
    plan = build.deployment(build.latent(), 2, 3).plan()
    assert figures(plan) == (32, 12, 48, 48, 32)
    assert source_bound(plan.summary) == 48


def test_bound_is_the_largest_destination_where_sources_are_many(build):
    plan = build.deployment(build.latent(), 16, 4).plan()
    assert (plan.summary.max_source_bytes, plan.summary.mean_source_bytes) == (32, 8)
    assert source_bound(plan.summary) == 32
    assert [warning.code for warning in plan.warnings] == ["ShortRuns"]


@pytest.mark.parametrize(
    ("options", "copies"),
    [
        # 2 destination ranks, 4 layers, 4 heads each; K and V of a cell adjoin.
        (({"layout": "HND"}, {"layout": "HND"}), 2 * 4 * 1),
        # A run of 4 heads for each of 16 tokens.
        (({"layout": "NHD"}, {"layout": "NHD"}), 2 * 4 * 16),
        # A run for each head and token.
        (({"layout": "HND"}, {"layout": "NHD"}), 2 * 4 * 16 * 4),
        # K and V in regions of their own.
        (({"backend": "SEPARATE"}, {"backend": "SEPARATE"}), 2 * 4 * 2),
        # K and V side by side against apart: a run for each part, head and token.
        (({"backend": "JOINT"}, {"backend": "SEPARATE"}), 2 * 4 * 2 * 4 * 16),
        (({"backend": "OPAQUE"}, {"backend": "OPAQUE"}), 2 * 4 * 1),
        # Source blocks of 32: a destination block of 16 is half of each head.
        (({"block": 32}, {"block": 16}), 2 * 4 * 4),
        # Source blocks of 16: a destination block of 32 is filled in two sub-blocks.
        (({"block": 16}, {"block": 32}), 2 * 4 * 4 * 2),
    ],
)
def test_copies_per_block(build, options, copies):
    assert build.deployment(build.heads(8), 1, 2, *options).plan().summary.copies_per_block == copies


@pytest.mark.parametrize(("cell", "run"), [(64, 2048), (127, 4064), (128, 4096)])
def test_short_runs(build, cell, run):
    """One head of 16 tokens of K and V."""
    warnings = build.deployment(build.heads(2, cell=cell), 2, 2).plan().warnings
    assert run == 16 * 2 * cell
    if run >= SHORT_RUN_BYTES:
        assert warnings == []
        return
    (warning,) = warnings
    assert warning.code == "ShortRuns"
    assert warning.message.startswith(f"p0 -> d0 moves in runs of {run} bytes, below 4096: 8 copies per block")


def test_imbalance(build):
    """Prefill stages of 3 layers and 1: the first sends three quarters, and no plan can help it."""
    plan = build.deployment(
        build.heads(1, cell=4096), 1, 1, {"stages": [(0, 1, 2), (3,)]}, {"stages": [(0, 1), (2, 3)]}
    ).plan()
    assert (plan.summary.max_source_bytes, source_bound(plan.summary)) == (24576, 16384)
    (warning,) = plan.warnings
    assert warning.code == "Imbalance"
    assert warning.message == ("the busiest prefill rank sends 24576 bytes per token, 1.50 times the bound of 16384")


def test_balanced_plans_do_not_warn(build):
    for sizes in ((2, 4), (16, 4), (3, 4), (2, 3)):
        assert build.deployment(build.latent(layers=40, cell=4096), *sizes).plan().warnings == []


def test_summary_does_not_depend_on_what_the_plan_says(build):
    plan = build.deployment(build.heads(8), 2, 4).plan()
    said = plan.summary.model_copy(update={"copies_per_block": 1, "max_source_bytes": 1})
    assert summarise(plan.model_copy(update={"summary": said, "warnings": []})) == (plan.summary, plan.warnings)
