"""`disagg probe`: rank files of a folder, an engine started here, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny-llama-vllm.yaml"
PYTHON = Path(os.environ.get("DISAGG_VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python")

with_vllm = pytest.mark.skipif(
    not PYTHON.exists(), reason="vLLM IS NOT INSTALLED, so no real engine is probed: run `make install-vllm`"
)

# Stands for a Python with vLLM: a worker that says its process id, writes what it is told to, and stays.
STUB = """#!{python}
import json, os, subprocess, sys, time
if "api_server" not in " ".join(sys.argv):
    sys.exit(0)
transfer = json.loads(sys.argv[sys.argv.index("--kv-transfer-config") + 1])
output = transfer["kv_connector_extra_config"]["output"]
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({pids!r}, "w") as pids:
    json.dump([os.getpid(), worker.pid], pids)
for name, document in json.load(open({files!r})).items():
    with open(os.path.join(output, name + ".new"), "w") as file:
        json.dump(document, file)
    os.rename(file.name, os.path.join(output, name))
print("the engine says " + " ".join(sys.argv[3:]), flush=True)
{end}
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Installs an engine that writes these rank files; where it says its process ids."""

    def install(files: dict[str, Any], end: str = "time.sleep(600)") -> Path:
        pids, told, program = tmp_path / "pids.json", tmp_path / "told.json", tmp_path / "python"
        told.write_text(json.dumps(files))
        program.write_text(STUB.format(python=sys.executable, pids=str(pids), files=str(told), end=end))
        program.chmod(0o755)
        monkeypatch.setenv("DISAGG_VLLM_PYTHON", str(program))
        return pids

    return install


def gone(pids: Path, alive: Callable[[int], bool]) -> bool:
    return not any(alive(pid) for pid in json.loads(pids.read_text()))


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, document in files.items():
        (folder / name).write_text(json.dumps(document))
    return folder


def test_a_folder_gives_exactly_what_to_paste(disagg: Any, probe_files: Any) -> None:
    write(disagg.cwd / "ranks", probe_files(tensor=2, backend="NEW_ATTN"))
    result = disagg.run("probe", "ranks")
    assert (result.code, result.err) == (0, "")
    spec = yaml.safe_load(result.out)
    assert list(spec) == ["model", "engine", "kvCache"]
    assert spec["engine"]["pages"] == "opaque"
    comments = [line for line in result.out.splitlines() if line.startswith("#")]
    assert any("cut by head only" in line for line in " ".join(comments).split("- "))
    as_json = disagg.run("probe", "ranks", "-o", "json").document
    assert as_json["spec"] == spec
    assert as_json["profile"] is None
    kept = disagg.run("probe", "ranks", "--output-file", "found.yaml")
    assert (kept.code, kept.out) == (0, "")
    assert (disagg.cwd / "found.yaml").read_text() == result.out


def test_a_folder_that_lacks_a_rank_is_refused(disagg: Any, probe_files: Any) -> None:
    files = probe_files(tensor=2)
    del files["rank-1.json"]
    write(disagg.cwd / "ranks", files)
    result = disagg.run("probe", "ranks")
    assert (result.code, result.out) == (1, "")
    assert "refused: MissingRank" in result.err
    assert "rank-1.json" in result.err
    (disagg.cwd / "ranks" / "rank-0.json").write_text("{")
    result = disagg.run("probe", "ranks")
    assert (result.code, result.out) == (1, "")
    assert "BadFacts: rank-0.json" in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("no-such-folder",),
        ("one", "two"),
        ("-f", str(EXAMPLE)),
        ("--engine", "vllm"),
        ("--engine", "vllm", "-f", "missing.yaml"),
        ("--engine", "other", "-f", str(EXAMPLE)),
        ("--engine", "vllm", "-f", str(ROOT / "examples" / "llama-3.1-8b.yaml"), "--role", "both"),
    ],
)
def test_usage_errors_are_exit_2(disagg: Any, arguments: tuple[str, ...]) -> None:
    result = disagg.run("probe", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err


def test_an_engine_is_started_probed_and_ended(disagg: Any, probe_files: Any, stub: Any, alive: Any) -> None:
    pids = stub(probe_files(tensor=2))
    result = disagg.run("probe", "--engine", "vllm", "-f", str(EXAMPLE), "--role", "decode", "--", "--seed", "7")
    assert result.code == 0, result.err
    assert yaml.safe_load(result.out)["kvCache"]["blockSize"] == 32
    assert "every rank has written" in result.err
    assert gone(pids, alive)
    log = (disagg.cwd / ".disagg" / "probe" / "logs" / "tiny-llama-decode-0-engine.log").read_text()
    assert "--tensor-parallel-size 2" in log
    assert "--seed 7" in log
    assert "DisaggConnector" not in log
    again = disagg.run("probe", str(disagg.cwd / ".disagg" / "probe" / "ranks"))
    assert (again.code, again.out) == (0, result.out)


def test_an_engine_of_arguments_alone(disagg: Any, probe_files: Any, stub: Any, alive: Any) -> None:
    pids = stub(probe_files())
    result = disagg.run("probe", "--engine", "vllm", "-o", "json", "--", "--model", "/some/model", "-tp", "1")
    assert result.code == 0, result.err
    assert result.document["tensor"] == 1
    assert gone(pids, alive)
    log = (disagg.cwd / ".disagg" / "probe" / "logs" / "engine-0-engine.log").read_text()
    assert "--model /some/model -tp 1 --kv-transfer-config" in log


def test_an_engine_that_dies_is_shown_with_the_end_of_its_log(
    disagg: Any, probe_files: Any, stub: Any, alive: Any
) -> None:
    files = probe_files(tensor=2)
    del files["rank-0.json"]
    pids = stub(files, end='sys.exit("RuntimeError: no memory")')
    result = disagg.run("probe", "--engine", "vllm", "-f", str(EXAMPLE))
    assert (result.code, result.out) == (1, "")
    assert "1 of 2 ranks have written" in result.err
    assert "RuntimeError: no memory" in result.err
    assert gone(pids, alive)


def test_an_engine_that_never_writes_is_given_up(disagg: Any, stub: Any, alive: Any) -> None:
    pids = stub({})
    result = disagg.run("probe", "--engine", "vllm", "-f", str(EXAMPLE), "--timeout", "2")
    assert (result.code, result.out) == (1, "")
    assert "no rank has written within 2 s" in result.err
    assert "the engine says" in result.err
    assert gone(pids, alive)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process(
    disagg: Any, stub: Any, alive: Any, wait_for: Any, number: signal.Signals
) -> None:
    pids = stub({})
    process: subprocess.Popen[str] = disagg.start("probe", "--engine", "vllm", "-f", str(EXAMPLE))
    wait_for(lambda: pids.exists() and pids.read_text().endswith("]"), 30.0, "the engine was not started")
    process.send_signal(number)
    out, err = process.communicate(timeout=30.0)
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    assert gone(pids, alive)


def test_a_missing_installation_says_what_to_install(disagg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_VLLM_PYTHON", str(Path(sys.prefix) / "no-such-python"))
    result = disagg.run("probe", "--engine", "vllm", "-f", str(EXAMPLE))
    assert result.code == 1
    assert "make install-vllm" in result.err


@with_vllm
@pytest.mark.timeout(600)
def test_a_real_engine_has_the_geometry_that_its_config_says(disagg: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_VLLM_PYTHON", str(PYTHON))
    result = disagg.run(
        "probe", "--engine", "vllm", "-f", str(EXAMPLE), "--role", "decode", "-o", "json", timeout=500.0
    )
    assert result.code == 0, result.err
    found = result.document
    assert (found["tensor"], found["pages"], found["profile"]) == (2, "opaque", "vllm/CPU_ATTN")
    assert not found["geometryNeeded"]
    document = yaml.safe_load(EXAMPLE.read_text())
    by_config = plan_of(disagg, document)
    for pages in ({}, {"pages": "opaque"}):
        document["spec"] |= {**found["spec"], "engine": {**found["spec"]["engine"], **pages}}
        by_probe = plan_of(disagg, document)
        for same in ("edges", "shapes", "source", "destination", "compat"):
            assert by_probe[same] == by_config[same]


def plan_of(disagg: Any, document: dict[str, Any]) -> dict[str, Any]:
    (disagg.cwd / "deployment.yaml").write_text(yaml.safe_dump(document))
    result = disagg.run("plan", "-f", "deployment.yaml", "-o", "json")
    assert result.code == 0, result.err
    return dict(result.document)
