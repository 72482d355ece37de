"""kubectl, and waiting for what it shows."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rig.binaries import RigError, find

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """How a call ended."""

    code: int
    out: str
    err: str


class Kubectl:
    """kubectl as one user, in one namespace."""

    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self._program = find("kubectl")["kubectl"]

    def call(self, *arguments: str, stdin: str | None = None) -> Result:
        """Run it, whatever comes of it."""
        command = [str(self._program), f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
        return Result(done.returncode, done.stdout, done.stderr)

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Run it and expect success."""
        result = self.call(*arguments, stdin=stdin)
        if result.code:
            raise RigError(f"kubectl {' '.join(arguments)}: {result.err}")
        return result.out

    def apply(self, *documents: dict[str, Any]) -> None:
        """Apply objects."""
        self.run("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object, or None."""
        result = self.call("get", kind, name, "-o", "json", "--ignore-not-found")
        return dict(json.loads(result.out)) if result.code == 0 and result.out.strip() else None

    def list(self, kinds: str, selector: str = "") -> list[dict[str, Any]]:
        """All objects of some kinds."""
        return list(json.loads(self.run("get", kinds, "-l", selector, "-o", "json"))["items"])


def eventually(what: str, probe: Callable[[], T | None], seconds: float = 30.0) -> T:
    """The first true answer of a probe.

    Raises:
        RigError: there was none in time, with the last answer.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise RigError(f"{what}: not within {seconds:.0f} s, last answer {answer!r}")
        time.sleep(0.1)
