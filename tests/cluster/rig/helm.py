"""helm against one API server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rig.binaries import RigError, find
from rig.kubectl import Result


class Helm:
    """helm as the user of a kubeconfig; its own files are kept in a folder of the test."""

    def __init__(self, folder: Path, kubeconfig: Path | None = None, namespace: str = "default") -> None:
        self._program = str(find("helm")["helm"])
        self._namespace = namespace
        homes = {f"HELM_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        self._env = {**os.environ, **homes, **({"KUBECONFIG": str(kubeconfig)} if kubeconfig else {})}

    def call(self, *arguments: str) -> Result:
        """Run it, whatever comes of it."""
        command = [self._program, *arguments, "--namespace", self._namespace]
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=120, check=False)
        return Result(done.returncode, done.stdout, done.stderr)

    def run(self, *arguments: str) -> str:
        """Run it and expect success."""
        result = self.call(*arguments)
        if result.code:
            raise RigError(f"helm {' '.join(arguments)}: {result.err}")
        return result.out
