"""Caches that are torch tensors, each in a process of its own, moved by NIXL and compared byte by byte.

Where torch sees a GPU, in its memory too: run this file there as it is. The Python that has torch is this one, or
DISAGG_TORCH_PYTHON, or that of `make install-vllm`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from disagg_plan import wire

pytestmark = pytest.mark.nixl

SCRIPT = Path(__file__).with_name("torch_rank.py")
SECONDS = 120.0
CANDIDATES = [
    os.environ.get("DISAGG_TORCH_PYTHON"),
    sys.executable,
    str(Path(__file__).parents[2] / ".venv-vllm/bin/python"),
]


@cache
def torch_python() -> tuple[str, int] | None:
    """A Python that has torch and the agent, and the GPUs that it sees."""
    question = "import torch, disagg_agent.mover; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    for python in filter(None, CANDIDATES):
        with contextlib.suppress(OSError):
            answer = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=SECONDS)
            if answer.returncode == 0:
                return python, int(answer.stdout.split()[-1])
    return None


def place(device: str) -> str:
    kind, _, index = device.partition(":")
    return f"VRAM of device {index or 0}" if kind == "cuda" else "DRAM of device 0"


@contextlib.contextmanager
def rank(python: str, plan: Path, role: str, number: int, device: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [python, str(SCRIPT), str(plan), role, str(number), device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        ("cpu", "cpu"),
        ("cuda:0", "cuda:0"),
        ("cpu", "cuda:0"),
        ("cuda:0", "cpu"),
        ("cuda:0", "cuda:1"),
    ],
)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
def test_a_request_moves_between_tensors(
    build: Any, tmp_path: Path, prefill: int, decode: int, source: str, destination: str
) -> None:
    found = torch_python()
    if found is None:
        pytest.skip("NOT TESTED: no Python with torch here; name one in DISAGG_TORCH_PYTHON")
    python, gpus = found
    needed = max(int(device[5:]) + 1 if device.startswith("cuda:") else 0 for device in (source, destination))
    if needed > gpus:
        pytest.skip(f"NOT TESTED: {source} to {destination} needs {needed} GPUs, torch sees {gpus}")
    plan = build.deployment(build.heads(4, layers=3, cell=64), prefill, decode, None, {"block": 32}).plan()
    path = tmp_path / "plan.json"
    path.write_bytes(wire.encode(plan))
    reader = decode - 1
    sources = [edge.source for edge in plan.edges if edge.destination == reader]
    with contextlib.ExitStack() as running:
        holders = [running.enter_context(rank(python, path, "prefill", number, source)) for number in sources]
        cards = [holder.stdout.readline() for holder in holders if holder.stdout]
        other = running.enter_context(rank(python, path, "decode", reader, destination))
        output, _ = other.communicate("".join(cards), timeout=SECONDS)
    result = json.loads(output)
    assert result["place"] == place(destination)
    assert result["links"] == [[place(source), "", ""] for _ in sources]
    assert result["moved"] == ""
    assert result["checked"] > 0
    assert (result["wrong"], result["stray"]) == (0, 0)
    assert result["bytes"] >= result["checked"]
