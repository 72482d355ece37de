from __future__ import annotations

import numpy as np
import pytest

from disagg_plan.runs import edge_runs, expand, join, shortest_run
from disagg_plan.wire import Copy, Repeat


def copy(size, src, dst, *repeat):
    loops = [Repeat(count=count, src=s, dst=d) for count, s, d in repeat]
    return Copy(group="g", layers="0", part="k", bytes=size, src=src, dst=dst, repeat=loops, src_sub=0, dst_sub=0)


@pytest.mark.parametrize(
    ("one", "rows"),
    [
        (copy(8, 4, 0), [[4, 0, 8]]),
        (copy(8, 4, 0, (3, 16, 8)), [[4, 0, 8], [20, 8, 8], [36, 16, 8]]),
        (
            copy(2, 0, 100, (2, 50, 10), (3, 4, 2)),
            [[0, 100, 2], [4, 102, 2], [8, 104, 2], [50, 110, 2], [54, 112, 2], [58, 114, 2]],
        ),
        (copy(2, 1, 1, (2, 0, 2)), [[1, 1, 2], [1, 3, 2]]),
    ],
)
def test_expand(one, rows):
    assert expand(one).tolist() == rows


@pytest.mark.parametrize(
    ("rows", "joined"),
    [
        ([[0, 0, 4]], [[0, 0, 4]]),
        ([[0, 0, 4], [4, 4, 4]], [[0, 0, 8]]),
        ([[4, 4, 4], [0, 0, 4]], [[0, 0, 8]]),
        ([[0, 10, 4], [4, 14, 2], [6, 16, 1]], [[0, 10, 7]]),
        ([[0, 0, 4], [4, 8, 4]], [[0, 0, 4], [4, 8, 4]]),
        ([[0, 0, 4], [8, 4, 4]], [[0, 0, 4], [8, 4, 4]]),
        ([[0, 0, 4], [4, 4, 4], [9, 8, 4], [13, 12, 1]], [[0, 0, 8], [9, 8, 5]]),
    ],
)
def test_join(rows, joined):
    assert join(np.array(rows)).tolist() == joined


def runs_of(plan):
    return {(edge.source, edge.destination): edge_runs(plan, edge) for edge in plan.edges}


def test_k_and_v_of_one_head_are_one_run(build):
    # 4 heads of 16 tokens, K and V of 8 bytes: 256 bytes a head.
    found = runs_of(build.deployment(build.heads(4), 1, 2).plan())
    assert sorted(found) == [(0, 0), (0, 1)]
    (low,), (high,) = found[0, 0], found[0, 1]
    assert low.rows.tolist() == [[0, 0, 512]]
    assert high.rows.tolist() == [[512, 0, 512]]
    assert (low.group, low.layers, low.src_region, low.dst_region) == ("attention", (0, 1, 2, 3), 0, 0)
    assert low.bytes == 512


def test_separate_regions_are_runs_of_their_own(build):
    found = runs_of(build.deployment(build.heads(4), 1, 2, backend="SEPARATE").plan())
    assert [(one.src_region, one.dst_region, one.rows.tolist()) for one in found[0, 1]] == [
        (0, 0, [[256, 0, 256]]),
        (1, 1, [[256, 0, 256]]),
    ]


def test_heads_inside_tokens_are_a_run_a_token(build):
    found = runs_of(build.deployment(build.heads(4), 1, 2, layout="NHD", block=4).plan())
    # A token holds 4 heads of 16 bytes at the source, 2 at the destination.
    assert found[0, 1][0].rows.tolist() == [[32 + 64 * token, 32 * token, 32] for token in range(4)]


def test_a_sub_block_is_a_run_a_head(build):
    one = build.deployment(build.heads(2), 1, 1, {"block": 32}, {"block": 48})
    (runs,) = runs_of(one.plan())[0, 0]
    # 16 tokens of 16 bytes in heads of 32 tokens at the source and 48 at the destination.
    assert runs.rows.tolist() == [[0, 0, 256], [512, 768, 256]]
    assert (runs.src_sub, runs.dst_sub) == (256, 256)


def test_layers_served_alike_are_one_entry(build):
    plan = build.deployment(build.latent(4), 2, 3).plan()
    found = runs_of(plan)
    assert {edge: [one.layers for one in runs] for edge, runs in found.items()} == {
        (0, 0): [(0, 1, 2, 3)],
        (0, 1): [(0, 1)],
        (1, 1): [(2, 3)],
        (1, 2): [(0, 1, 2, 3)],
    }


def test_shortest_run(build):
    plan = build.deployment(build.heads(4), 1, 2, layout="NHD").plan()
    assert shortest_run(edge_runs(plan, plan.edges[0])) == 32
    assert shortest_run([]) == 0
