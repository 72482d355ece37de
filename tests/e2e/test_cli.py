"""`disagg plan` and `disagg verify`: exit codes, and what stands on standard output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


def test_plan_json_is_the_document_and_nothing_else(disagg: Any, example: Path) -> None:
    result = disagg.run("plan", "-f", str(example), "-o", "json")
    assert (result.code, result.err) == (0, "")
    document = result.document
    assert document["schema"] == "disagg.dev/transfer-plan/v1"
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert result.out == canonical + "\n"
    assert [(edge["from"], edge["to"]) for edge in document["edges"]] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert document["completions"] == {"0": [0, 1], "1": [2, 3]}


def test_plan_table_says_who_reads_what(disagg: Any, example: Path) -> None:
    result = disagg.run("plan", "-f", str(example))
    assert result.code == 0
    assert "\x1b" not in result.out
    rows = [line.split() for line in result.out.splitlines()]
    assert ["d1", "p0", "attention", "0-31", "k,v", "2-3", "32,768", "32", "16,384", "B"] in rows
    assert any("131072 bytes per token" in line for line in result.out.splitlines())


def test_plan_config_map_holds_the_same_plan(disagg: Any, example: Path) -> None:
    config_map = yaml.safe_load(disagg.run("plan", "-f", str(example), "-o", "configmap").out)
    assert config_map["kind"] == "ConfigMap"
    assert config_map["data"]["plan.json"] + "\n" == disagg.run("plan", "-f", str(example), "-o", "json").out


def test_a_refusal_is_exit_1_with_field_reason_and_remedy(disagg: Any, write_deployment: Callable[..., Path]) -> None:
    result = disagg.run("plan", "-f", str(write_deployment(prefill=4, heads=6)), "-o", "json")
    assert (result.code, result.out) == (1, "")
    assert "refused: IndivisibleUnits" in result.err
    assert "field   spec.prefill.parallelism.tensor" in result.err
    assert "6 units" in result.err
    assert "4 tensor-parallel ranks" in result.err
    assert "1, 2, 3, 6" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan",),
        ("plan", "-f", "missing.yaml"),
        ("plan", "-f", ".", "-o", "xml"),
        ("up", "-f", "missing.yaml"),
        ("verify", "missing.json"),
        ("verify",),
        ("nonsense",),
    ],
)
def test_usage_errors_are_exit_2(disagg: Any, arguments: tuple[str, ...]) -> None:
    result = disagg.run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err


def test_several_deployments_need_a_name(disagg: Any, example: Path) -> None:
    first = yaml.safe_load(example.read_text())
    second = yaml.safe_load(example.read_text())
    second["metadata"]["name"] = "other"
    second["spec"]["decode"]["parallelism"]["tensor"] = 8
    (disagg.cwd / "two.yaml").write_text(yaml.safe_dump_all([first, {"kind": "Service"}, second]))
    assert disagg.run("plan", "-f", "two.yaml").code == 2
    result = disagg.run("plan", "-f", "two.yaml", "--name", "other", "-o", "json")
    assert result.code == 0
    assert len(result.document["edges"]) == 8


def test_verify_accepts_what_plan_prints(disagg: Any, example: Path) -> None:
    text = disagg.run("plan", "-f", str(example), "-o", "json").out
    (disagg.cwd / "plan.json").write_text(text)
    result = disagg.run("verify", "plan.json")
    assert result.code == 0
    assert "every one written exactly once" in result.out
    piped = disagg.run("verify", "-", "-o", "json", stdin=json.dumps(json.loads(text), indent=2))
    assert piped.code == 0
    assert piped.document == {
        "valid": True,
        "digest": json.loads(text)["digest"],
        "edges": 4,
        "bytesWrittenPerToken": 131072,
    }


@pytest.mark.parametrize("remade", [False, True], ids=["stale digest", "digest made anew"])
def test_verify_refuses_a_plan_that_moves_wrong_bytes(disagg: Any, example: Path, remade: bool) -> None:
    import hashlib

    document = disagg.run("plan", "-f", str(example), "-o", "json").document
    document["shapes"][0][0]["src"] += 512
    if remade:
        del document["digest"]
        body = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        document["digest"] = "sha256:" + hashlib.sha256(body.encode()).hexdigest()
    result = disagg.run("verify", "-", "-o", "json", stdin=json.dumps(document))
    assert result.code == 1
    assert result.document["valid"] is False
    assert result.document["code"] == ("ProofFailed" if remade else "BadDigest")
    assert disagg.run("verify", "-", stdin="not json").code == 1


@pytest.mark.parametrize("command", [(), ("plan",), ("verify",), ("up",), ("probe",)])
def test_help_teaches(disagg: Any, command: tuple[str, ...]) -> None:
    result = disagg.run(*command, "--help")
    assert result.code == 0
    assert len(result.out.splitlines()) > 10
