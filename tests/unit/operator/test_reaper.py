"""What a killed runner leaves behind is ended; what it has ended itself is left alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg_operator.local import reaper
from disagg_operator.local.processes import LocalError
from disagg_operator.local.vllm_pods import parse_metric


@pytest.fixture
def sessions() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two sessions, each a shell with a child that would outlive it."""
    started = [
        subprocess.Popen(["sh", "-c", "sleep 300 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
        for _ in range(2)
    ]
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_the_end_of_the_input_ends_every_session_and_folder(
    sessions: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    left, ended = sessions
    folder = tmp_path / "sockets"
    (folder / "0").mkdir(parents=True)
    program = subprocess.Popen([sys.executable, "-SE", reaper.__file__], stdin=subprocess.PIPE, text=True)
    program.communicate(f"{folder}\n+{left.pid}\n+{ended.pid}\n-{ended.pid}\n", timeout=20.0)
    assert program.returncode == 0
    assert left.wait(20.0) == -9
    assert left.stdout is not None
    # The pipe ends when the last process that has it does: the child too.
    left.stdout.readline()
    assert left.stdout.read() == b""
    assert ended.poll() is None
    assert not folder.exists()
    assert tmp_path.exists()


def test_metrics_are_summed_over_their_labels() -> None:
    text = 'a_total{x="1"} 2.0\na_total{x="2"} 3.5\na_total_more 9\n# HELP b 1\nb 4e-1\n'
    assert parse_metric(text, "a_total", "engine") == 5.5
    assert parse_metric(text, "b", "engine") == 0.4
    with pytest.raises(LocalError, match="engine has no metric c"):
        parse_metric(text, "c", "engine")
