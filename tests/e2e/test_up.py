"""The main job: declared topology, proven plan, real agents, real NIXL, every byte checked."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.nixl

SMALL = ("--requests", "8", "--max-tokens", "120", "--max-memory", "24Mi", "-o", "json")


def assert_good(result: Any, requests: int) -> dict[str, Any]:
    assert result.code == 0, result.err
    document: dict[str, Any] = result.document
    assert document["requests"] == requests
    assert document["failedRequests"] == 0
    assert document["wrongBytes"] == 0
    assert document["movedBytes"] > 0
    assert document["verifiedBytes"] > 0
    assert document["seconds"] > 0
    return document


def holdable(units: int, tensor: int) -> bool:
    return units % tensor == 0 or tensor % units == 0


def sample_pairs(count: int) -> list[tuple[int, int, int]]:
    """`(P TP, D TP, KV heads)` drawn evenly over what both sides can hold, the odd ones always in."""
    every = [
        (prefill, decode, heads)
        for prefill, decode, heads in itertools.product(range(1, 9), range(1, 9), (1, 2, 3, 4, 6, 8, 16))
        if holdable(heads, prefill) and holdable(heads, decode)
    ]
    always = [
        (2, 4, 8),
        (3, 2, 6),
        (2, 3, 6),
        (4, 6, 2),
        (8, 8, 2),
        (1, 8, 2),
        (8, 1, 4),
        (8, 2, 4),
        (6, 4, 2),
        (8, 6, 1),
    ]
    rest = [pair for pair in every if pair not in always]
    random.Random(7).shuffle(rest)
    return always + rest[: count - len(always)]


@pytest.mark.parametrize(("prefill", "decode", "heads"), sample_pairs(40))
def test_every_sampled_pair_moves_exact_bytes_between_processes(
    disagg: Any, write_deployment: Callable[..., Path], prefill: int, decode: int, heads: int
) -> None:
    # Placement and transport alternate over the sample, so that each is run with many topologies.
    placement = "InEngine" if (prefill + decode) % 2 else "Sidecar"
    protocol = "TCP" if (prefill * decode) % 3 == 0 else "Auto"
    file = write_deployment(prefill=prefill, decode=decode, heads=heads)
    document = assert_good(
        disagg.run("up", "-f", str(file), "--placement", placement, "--protocol", protocol, *SMALL), 8
    )
    tokens = sum(request["tokens"] for request in disagg.requests("small"))
    held = max(heads, decode)  # units over all decode ranks, replicas counted
    assert document["verifiedBytes"] == tokens * held * 2 * 32 * 2 * 3


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"latent": True, "prefill": 4, "decode": 1}, id="mla-4-to-1"),
        pytest.param({"latent": True, "prefill": 2, "decode": 3, "layers": 5}, id="mla-2-to-3-layers-split"),
        pytest.param({"heads": 4, "prefill": 2, "decode": 4, "backend": "SEPARATE"}, id="separate-regions"),
        pytest.param({"heads": 4, "prefill": 4, "decode": 2, "backend": "OPAQUE"}, id="opaque-runs"),
        pytest.param({"heads": 4, "prefill": 2, "decode": 4, "decode_cache": {"layout": "NHD"}}, id="mixed-hnd-nhd"),
        pytest.param({"heads": 4, "prefill": 4, "decode": 2, "decode_cache": {"blockSize": 32}}, id="blocks-16-to-32"),
        pytest.param({"heads": 4, "prefill": 1, "decode": 2, "prefill_cache": {"blockSize": 48}}, id="blocks-48-to-16"),
        pytest.param(
            {"heads": 4, "prefill": 2, "decode": 2, "layers": 7, "prefill_stages": 3, "decode_stages": 2},
            id="pipeline-3-to-2",
        ),
        pytest.param({"heads": 4, "prefill": 2, "decode": 4, "replicas": (2, 2)}, id="two-replicas-each"),
    ],
)
@pytest.mark.parametrize("placement", ["Sidecar", "InEngine"])
def test_layouts_and_splits(
    disagg: Any, write_deployment: Callable[..., Path], case: dict[str, Any], placement: str
) -> None:
    file = write_deployment(**case)
    assert_good(disagg.run("up", "-f", str(file), "--placement", placement, *SMALL), 8)


def test_the_example_states_its_layers_and_memory(disagg: Any, example: Path) -> None:
    result = disagg.run(
        "up", "-f", str(example), "--requests", "12", "--max-tokens", "200", "--max-memory", "64Mi", "-o", "json"
    )
    document = assert_good(result, 12)
    assert "memory: first 16 of 32 layers within 64 MiB" in result.err
    tokens = sum(request["tokens"] for request in disagg.requests("llama-8b"))
    assert document["verifiedBytes"] == tokens * 2 * 8 * 128 * 2 * 16


def test_layers_can_be_chosen(disagg: Any, example: Path) -> None:
    result = disagg.run(
        "up", "-f", str(example), "--layers", "2", "--requests", "4", "--max-tokens", "64", "--max-memory", "32Mi",
        "-o", "json",
    )  # fmt: skip
    assert_good(result, 4)
    assert "memory: first 2 of 32 layers" in result.err


def test_the_plan_config_map_is_written(disagg: Any, write_deployment: Callable[..., Path]) -> None:
    file = write_deployment()
    assert_good(disagg.run("up", "-f", str(file), *SMALL), 8)
    (written,) = (disagg.cwd / ".disagg" / "small").glob("configmap-*.yaml")
    config_map = yaml.safe_load(written.read_text())
    printed = yaml.safe_load(disagg.run("plan", "-f", str(file), "-o", "configmap").out)
    assert config_map == printed
    assert config_map["immutable"] is True
    assert json.loads(config_map["data"]["plan.json"])["schema"] == "disagg.dev/transfer-plan/v1"


def test_table_output_ends_with_the_account(disagg: Any, write_deployment: Callable[..., Path]) -> None:
    file = write_deployment(prefill=2, decode=4, heads=8)
    result = disagg.run("up", "-f", str(file), *SMALL[:-2])
    assert result.code == 0, result.err
    assert "\x1b" not in result.out + result.err
    lines = result.out.splitlines()
    assert lines[0] == "prefill TP2 -> decode TP4, 4 edges"
    assert lines[-1] == "wrong bytes     0"


def test_too_little_memory_is_refused_with_the_way_out(disagg: Any, example: Path) -> None:
    result = disagg.run("up", "-f", str(example), "--max-memory", "1Mi", "-o", "json")
    assert (result.code, result.out) == (1, "")
    assert "NotEnoughMemory" in result.err
    assert "--max-tokens" in result.err
