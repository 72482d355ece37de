"""Who reads what from whom, as exact tables; those of vLLM's mapping where it has one."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path

import pytest

from disagg_plan import wire
from disagg_plan.architectures import from_config
from disagg_plan.planner import Replica, build_plan
from disagg_plan.profiles import find_profile
from disagg_plan.proof import prove
from disagg_plan.ranges import parse_ranges
from disagg_plan.topology import default_stages

GOLDEN = Path(__file__).parents[2] / "golden" / "llama-3.1-8b-p2-d4.plan.json"


def edges_of(plan):
    """(from, to, units, layers) of every edge, for plans whose parts all move alike."""
    found = []
    for edge in plan.edges:
        moved = {(units_of(plan, edge, copy), copy.layers) for copy in plan.shapes[edge.shape]}
        found += [(edge.source, edge.destination, list(units), layers) for units, layers in sorted(moved)]
    return found


def units_of(plan, edge, copy):
    (page, part) = placed(plan.source, edge.source, copy)
    sub_tokens = plan.group(copy.group).sub_tokens
    first = part.units[0] + (copy.src - part.offset) // part.unit_stride
    cells = copy.bytes * prod(loop.count for loop in copy.repeat) // part.cell_bytes
    source = (first, first + cells // sub_tokens)
    (page, part) = placed(plan.destination, edge.destination, copy)
    assert page.block_tokens >= sub_tokens
    assert part.units[0] + (copy.dst - part.offset) // part.unit_stride == first
    return source


def placed(side, rank, copy):
    page = side.pages[side.ranks[rank].pages[copy.group]]
    return page, next(part for part in page.parts if part.name == copy.part)


def completions_of(plan):
    return [plan.completions[str(rank)] for rank in range(len(plan.source.ranks))]


HEADS = [
    # (KV heads, P TP, D TP, edges as (from, to, units), completions of each prefill rank)
    (8, 2, 4, [(0, 0, [0, 2]), (0, 1, [2, 4]), (1, 2, [4, 6]), (1, 3, [6, 8])], [[0, 1], [2, 3]]),
    (8, 4, 2, [(0, 0, [0, 2]), (1, 0, [2, 4]), (2, 1, [4, 6]), (3, 1, [6, 8])], [[0], [0], [1], [1]]),
    (8, 1, 1, [(0, 0, [0, 8])], [[0]]),
    # More prefill ranks than heads: one holder of each head is read, the others are told by one rank.
    (4, 8, 2, [(0, 0, [0, 1]), (2, 0, [1, 2]), (4, 1, [2, 3]), (6, 1, [3, 4])], [[0]] * 4 + [[1]] * 4),
    (4, 16, 2, [(0, 0, [0, 1]), (4, 0, [1, 2]), (8, 1, [2, 3]), (12, 1, [3, 4])], [[0]] * 8 + [[1]] * 8),
    # More decode ranks than heads: the head, not the piece, decides.
    (
        4,
        2,
        8,
        [(rank // 4, rank, [rank // 2, rank // 2 + 1]) for rank in range(8)],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
    ),
    (
        2,
        1,
        8,
        [(0, rank, [0, 1]) for rank in range(4)] + [(0, rank, [1, 2]) for rank in range(4, 8)],
        [list(range(8))],
    ),
    (2, 1, 4, [(0, 0, [0, 1]), (0, 1, [0, 1]), (0, 2, [1, 2]), (0, 3, [1, 2])], [[0, 1, 2, 3]]),
    # Both sides above the number of heads.
    (2, 4, 4, [(0, 0, [0, 1]), (1, 1, [0, 1]), (2, 2, [1, 2]), (3, 3, [1, 2])], [[0], [1], [2], [3]]),
    (2, 4, 8, [(r // 2, r, [r // 4, r // 4 + 1]) for r in range(8)], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    (2, 8, 4, [(2 * r, r, [r // 2, r // 2 + 1]) for r in range(4)], [[r // 2] for r in range(8)]),
    # Sizes that do not divide each other.
    (6, 3, 2, [(0, 0, [0, 2]), (1, 0, [2, 3]), (1, 1, [3, 4]), (2, 1, [4, 6])], [[0], [0, 1], [1]]),
    (6, 2, 3, [(0, 0, [0, 2]), (0, 1, [2, 3]), (1, 1, [3, 4]), (1, 2, [4, 6])], [[0, 1], [1, 2]]),
    # MQA: one head on every rank.
    (1, 4, 4, [(rank, rank, [0, 1]) for rank in range(4)], [[0], [1], [2], [3]]),
    (1, 4, 2, [(0, 0, [0, 1]), (2, 1, [0, 1])], [[0], [0], [1], [1]]),
    (1, 2, 4, [(0, 0, [0, 1]), (0, 1, [0, 1]), (1, 2, [0, 1]), (1, 3, [0, 1])], [[0, 1], [2, 3]]),
]


@pytest.mark.parametrize(("units", "prefill", "decode", "edges", "completions"), HEADS)
def test_heads(build, units, prefill, decode, edges, completions):
    plan = build.deployment(build.heads(units), prefill, decode).plan()
    prove(plan)
    assert edges_of(plan) == [(*edge, "0-3") for edge in sorted(edges)]
    assert completions_of(plan) == completions


@pytest.mark.parametrize(
    ("prefill", "decode", "edges", "completions"),
    [
        (1, 4, [(0, rank, "0-3") for rank in range(4)], [[0, 1, 2, 3]]),
        (4, 4, [(rank, rank, "0-3") for rank in range(4)], [[0], [1], [2], [3]]),
        (16, 4, [(4 * rank, rank, "0-3") for rank in range(4)], [[rank // 4] for rank in range(16)]),
        # Three readers of two sources: one of them reads half of the layers from each.
        (2, 3, [(0, 0, "0-3"), (0, 1, "0-1"), (1, 1, "2-3"), (1, 2, "0-3")], [[0, 1], [1, 2]]),
        (3, 2, [(0, 0, "0-3"), (1, 1, "0-3")], [[0], [1], [1]]),
    ],
)
def test_latent(build, prefill, decode, edges, completions):
    plan = build.deployment(build.latent(), prefill, decode).plan()
    prove(plan)
    assert edges_of(plan) == [(source, to, [0, 1], layers) for source, to, layers in edges]
    assert completions_of(plan) == completions


def test_unequal_pipelines(build):
    """Stages of 4 and 6 layers on one side, 5 and 5 on the other, in TP 2."""
    plan = build.deployment(
        build.heads(2, layers=10),
        2,
        2,
        {"stages": [range(4), range(4, 10)]},
        {"stages": [range(5), range(5, 10)]},
    ).plan()
    prove(plan)
    assert edges_of(plan) == [
        (0, 0, [0, 1], "0-3"),
        (1, 1, [1, 2], "0-3"),
        (2, 0, [0, 1], "4"),
        (2, 2, [0, 1], "5-9"),
        (3, 1, [1, 2], "4"),
        (3, 3, [1, 2], "5-9"),
    ]
    assert completions_of(plan) == [[0], [1], [0, 2], [1, 3]]


def test_stages_of_scattered_layers(build):
    plan = build.deployment(
        build.heads(2, layers=(0, 2, 5, 7, 8)), 1, 1, {"stages": [(0, 5, 8), (2, 7)]}, {"stages": [(0, 2), (5, 7, 8)]}
    ).plan()
    prove(plan)
    assert edges_of(plan) == [
        (0, 0, [0, 2], "0"),
        (0, 1, [0, 2], "5,8"),
        (1, 0, [0, 2], "2"),
        (1, 1, [0, 2], "7"),
    ]


def vllm_sources(units, prefill, decode, rank):
    """The ranks that vLLM's decode rank reads, one TP size being a multiple of the other."""
    if decode >= prefill:
        return [rank * prefill // decode]
    ratio = prefill // decode
    heads = {}
    for candidate in range(rank * ratio, (rank + 1) * ratio):
        heads.setdefault(candidate * units // prefill, candidate)
    return sorted(heads.values())


@pytest.mark.parametrize("units", [1, 2, 4, 8, 16])
def test_agrees_with_vllm(build, units):
    geometry = build.heads(units, layers=1)
    compared = 0
    for prefill in range(1, 17):
        for decode in range(1, 17):
            if max(prefill, decode) % min(prefill, decode):
                continue
            if any(max(units, size) % min(units, size) for size in (prefill, decode)):
                continue
            plan = build.deployment(geometry, prefill, decode).plan()
            for rank in range(decode):
                sources = sorted(edge.source for edge in plan.edges if edge.destination == rank)
                assert sources == vllm_sources(units, prefill, decode, rank), (prefill, decode, rank)
            compared += 1
    assert compared >= 21


def test_a_latent_is_read_where_vllm_reads_it(build):
    for prefill in range(1, 17):
        for decode in range(1, 17):
            if max(prefill, decode) % min(prefill, decode) == 0:
                plan = build.deployment(build.latent(layers=2), prefill, decode).plan()
                assert [
                    (edge.destination, edge.source) for edge in sorted(plan.edges, key=lambda e: e.destination)
                ] == [(rank, rank * prefill // decode) for rank in range(decode)]


def side(role, geometry, tensor):
    return Replica(
        role=role,
        parallelism=wire.Parallelism(tensor=tensor, pipeline=1, decode_context=1, interleave=1),
        stages=default_stages(geometry.layers, 1),
        profile=find_profile("vllm", "0.33.0", "FLASH_ATTN"),
        layout="HND",
        block_tokens=16,
    )


def test_golden_plan(model_configs):
    geometry = from_config(model_configs["meta-llama/Meta-Llama-3.1-8B"], 2)
    factors = {"model": "meta-llama/Meta-Llama-3.1-8B", "dtype": "bfloat16", "engine": "vllm 0.33.0"}
    plan = build_plan(geometry, side("prefill", geometry, 2), side("decode", geometry, 4), factors)
    data = wire.encode(plan)
    if os.environ.get("DISAGG_UPDATE_GOLDEN") == "1":
        GOLDEN.write_bytes(data)
    assert GOLDEN.read_bytes() == data


def test_golden_plan_says_what_a_person_expects():
    plan = wire.decode(GOLDEN.read_bytes())
    assert wire.encode(plan) == GOLDEN.read_bytes()
    proof = prove(plan)
    # 32 layers, 8 heads, K and V of 128 elements of 2 bytes.
    assert plan.summary.bytes_per_token == proof.bytes_per_token == 131_072
    assert (plan.summary.max_source_bytes, plan.summary.mean_source_bytes) == (65_536, 65_536)
    assert plan.summary.max_destination_bytes == 32_768
    # Two heads of 16 tokens adjoin: one run of 16 KiB per layer and destination rank.
    assert plan.summary.copies_per_block == 4 * 32
    assert plan.warnings == []
    assert edges_of(plan) == [
        (0, 0, [0, 2], "0-31"),
        (0, 1, [2, 4], "0-31"),
        (1, 2, [4, 6], "0-31"),
        (1, 3, [6, 8], "0-31"),
    ]
    # A layer's page: P holds 4 heads in 32 KiB, D 2 heads in 16 KiB.
    assert [page.regions[0].bytes for page in plan.source.pages] == [32_768] * 2
    assert [page.regions[0].bytes for page in plan.destination.pages] == [16_384] * 4
    assert [parse_ranges(group.layers) for group in plan.groups] == [tuple(range(32))]
