"""Real vLLM engines through an unchanged router, token for token like one engine that is not disaggregated."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("DISAGG_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(1200)]

with_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="vLLM IS NOT INSTALLED, so no real engine is tested: run `make install-vllm`"
)

LONG = os.environ.get("DISAGG_PROFILE") == "long"
PAIRS = [(1, 1), (1, 2), (2, 1), (2, 2)] if LONG else [(1, 2)]
CACHING = ["--enable-prefix-caching", "--no-enable-prefix-caching"] if LONG else ["--enable-prefix-caching"]


@pytest.fixture
def deployment(tmp_path: Path) -> Any:
    def write(prefill: int, decode: int) -> Path:
        document = yaml.safe_load((ROOT / "examples" / "tiny-llama-vllm.yaml").read_text())
        document["spec"]["prefill"]["parallelism"]["tensor"] = prefill
        document["spec"]["decode"]["parallelism"]["tensor"] = decode
        path = tmp_path / "deployment.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


def run(disagg: Any, monkeypatch: pytest.MonkeyPatch, file: Path, *arguments: str) -> Any:
    monkeypatch.setenv("DISAGG_VLLM_PYTHON", str(PYTHON))
    return disagg.run(
        "up", "--engine", "vllm", "-f", str(file), "--requests", "50", "--concurrency", "4", "-o", "json", *arguments,
        timeout=1100.0,
    )  # fmt: skip


def assert_token_for_token(result: Any) -> None:
    assert result.out, result.err
    document = result.document
    assert document["failures"] == []
    assert document["differences"] == []
    assert document["identical"] + document["tied"] == document["prompts"] == 50
    assert document["movedBytes"] > 0
    assert result.code == 0, result.err


@with_vllm
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
@pytest.mark.parametrize("caching", CACHING)
def test_tokens_are_those_of_a_single_engine(
    disagg: Any, deployment: Any, monkeypatch: pytest.MonkeyPatch, prefill: int, decode: int, caching: str
) -> None:
    result = run(disagg, monkeypatch, deployment(prefill, decode), f"--engine-arg={caching}")
    assert_token_for_token(result)


@with_vllm
@pytest.mark.skipif(not LONG, reason="long profile only: `make soak`")
def test_movers_in_the_engine_move_the_same(disagg: Any, deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_token_for_token(run(disagg, monkeypatch, deployment(1, 2), "--placement", "InEngine"))


def test_a_missing_installation_says_what_to_install(disagg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_VLLM_PYTHON", str(Path(sys.prefix) / "no-such-python"))
    result = disagg.run("up", "--engine", "vllm", "-f", str(ROOT / "examples" / "tiny-llama-vllm.yaml"))
    assert result.code == 1
    assert "make install-vllm" in result.err
    assert "6.5 GB" in result.err


@pytest.mark.parametrize("argument", ["--tensor-parallel-size=4", "-tp=4", "--kv-transfer-config={}"])
def test_an_engine_argument_that_the_spec_decides_is_refused(
    disagg: Any, monkeypatch: pytest.MonkeyPatch, argument: str
) -> None:
    monkeypatch.setenv("DISAGG_VLLM_PYTHON", sys.executable)
    example = str(ROOT / "examples" / "tiny-llama-vllm.yaml")
    result = disagg.run("up", "--engine", "vllm", "-f", example, f"--engine-arg={argument}")
    assert result.code == 1
    assert "FlagConflict" in result.err
    assert "--engine-arg" in result.err


def test_a_program_that_is_none_is_named(disagg: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISAGG_VLLM_PYTHON", str(tmp_path))
    result = disagg.run("up", "--engine", "vllm", "-f", str(ROOT / "examples" / "tiny-llama-vllm.yaml"))
    assert result.code == 1
    assert f"DISAGG_VLLM_PYTHON is {tmp_path}" in result.err
