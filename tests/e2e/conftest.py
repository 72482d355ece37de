"""Running `disagg` as a user does: as a process, judged by exit code, output and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@dataclass
class Result:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output as exactly one JSON document."""
        return dict(json.loads(self.out))


@dataclass
class Disagg:
    """The installed command, run in a folder of the test's."""

    cwd: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def program(self) -> str:
        return str(Path(sys.executable).parent / "disagg")

    def run(self, *arguments: str, timeout: float = 120.0, stdin: str | None = None) -> Result:
        """Run to the end."""
        done = subprocess.run(
            [self.program, *arguments],
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            input=stdin,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start, and end at the end of the test whatever happens."""
        process = subprocess.Popen(
            [self.program, *arguments], cwd=self.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    def pods(self, name: str, timeout: float = 60.0) -> list[dict[str, Any]]:
        """Pods of a run, once they are ready and paired."""
        path = self.cwd / ".disagg" / name / "pods.json"
        wait_for(path.exists, timeout, f"{path} was not written")
        return list(json.loads(path.read_text()))

    def requests(self, name: str) -> list[dict[str, Any]]:
        """Per-request account of a run."""
        text = (self.cwd / ".disagg" / name / "requests.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]


def wait_for(condition: Callable[[], Any], timeout: float, failure: str) -> None:
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(failure)
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def disagg(tmp_path: Path) -> Iterator[Disagg]:
    command = Disagg(tmp_path)
    yield command
    for process in command.started:
        if process.poll() is None:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture(name="wait_for")
def wait_for_fixture() -> Callable[[Callable[[], Any], float, str], None]:
    return wait_for


@pytest.fixture(name="alive")
def alive_fixture() -> Callable[[int], bool]:
    return alive


@pytest.fixture
def long_profile() -> bool:
    return os.environ.get("DISAGG_PROFILE") == "long"


@pytest.fixture
def example() -> Path:
    return ROOT / "examples" / "llama-3.1-8b.yaml"


@pytest.fixture
def write_deployment(tmp_path: Path) -> Callable[..., Path]:
    """A small deployment on disk: explicit geometry, synthetic engine, few bytes."""

    def write(
        prefill: int = 2,
        decode: int = 2,
        heads: int = 4,
        latent: bool = False,
        layers: int = 3,
        backend: str = "JOINT",
        prefill_stages: int = 1,
        decode_stages: int = 1,
        prefill_cache: dict[str, Any] | None = None,
        decode_cache: dict[str, Any] | None = None,
        replicas: tuple[int, int] = (1, 1),
        transport: dict[str, Any] | None = None,
    ) -> Path:
        parts = (
            [{"name": "latent", "units": 1, "sharding": "replicated", "elements": 72}]
            if latent
            else [{"name": part, "units": heads, "sharding": "split", "elements": 32} for part in ("k", "v")]
        )

        def role(tensor: int, pipeline: int, cache: dict[str, Any] | None, count: int) -> dict[str, Any]:
            declared: dict[str, Any] = {
                "replicas": count,
                "parallelism": {"tensor": tensor, "pipeline": pipeline},
                "template": {"spec": {"containers": [{"name": "engine", "image": "engine:1"}]}},
            }
            if cache:
                declared["kvCache"] = cache
            return declared

        document = {
            "apiVersion": "disagg.dev/v1alpha1",
            "kind": "DisaggDeployment",
            "metadata": {"name": "small"},
            "spec": {
                "model": {
                    "name": "small",
                    "revision": "r1",
                    "geometry": {"groups": [{"name": "cache", "layers": f"0-{layers - 1}", "parts": parts}]},
                },
                "engine": {"name": "synthetic", "version": "1.0", "backend": backend},
                "kvCache": {"blockSize": 16},
                "prefill": role(prefill, prefill_stages, prefill_cache, replicas[0]),
                "decode": role(decode, decode_stages, decode_cache, replicas[1]),
                "transport": transport or {},
            },
        }
        path = tmp_path / "deployment.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write
