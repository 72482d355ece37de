"""The cluster's programs: built once from Go modules into a cache, or taken from `KUBEBUILDER_ASSETS`.

No package registry ships them as binaries. `k8s.io/kubernetes` requires its staging modules at v0.0.0, which no proxy
serves, so the wrapper modules beside this file replace each by its released version; go.sum pins the contents.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

KUBERNETES = "1.34.4"
ETCD = "3.6.16"
HELM = "4.3.1"

CONTROL_PLANE = ("etcd", "kube-apiserver", "kubectl")
"""What `KUBEBUILDER_ASSETS` holds."""

_MODULES = Path(__file__).parent / "modules"
_VERSION = "k8s.io/component-base/version"


class RigError(Exception):
    """This machine cannot run the cluster, or the cluster failed; the message says why and what to do."""


@dataclass(frozen=True)
class _Module:
    folder: str
    packages: tuple[str, ...]
    flags: str = "-s -w"

    @property
    def programs(self) -> tuple[str, ...]:
        return tuple("etcd" if self.folder == "etcd" else package.rpartition("/")[2] for package in self.packages)


_KUBERNETES_PROGRAMS = (
    "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl",
)  # fmt: skip
_SOURCES = (
    _Module(
        "kubernetes",
        tuple(f"k8s.io/kubernetes/cmd/{program}" for program in _KUBERNETES_PROGRAMS),
        f"-s -w -X {_VERSION}.gitVersion=v{KUBERNETES} -X {_VERSION}.gitMajor=1 -X {_VERSION}.gitMinor=34"
        f" -X {_VERSION}.gitTreeState=clean",
    ),
    _Module("etcd", ("go.etcd.io/etcd/server/v3",)),
    _Module("helm", ("helm.sh/helm/v4/cmd/helm",)),
)


def cache_folder() -> Path:
    """Where builds are kept between checkouts: `DISAGG_CACHE`, or `~/.cache/disagg`."""
    return Path(os.environ.get("DISAGG_CACHE") or Path.home() / ".cache" / "disagg")


def binaries_folder() -> Path:
    """Folder of the built programs; its name changes with their versions."""
    return cache_folder() / f"kubernetes-{KUBERNETES}-etcd-{ETCD}-helm-{HELM}"


def find(*programs: str) -> dict[str, Path]:
    """Paths of programs that are there: built ones first, then `KUBEBUILDER_ASSETS`.

    Raises:
        RigError: one is missing, with what to do.
    """
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    folders = [binaries_folder(), *([Path(assets)] if assets else [])]
    found: dict[str, Path] = {}
    for program in programs:
        path = next((folder / program for folder in folders if os.access(folder / program, os.X_OK)), None)
        if path is None:
            raise RigError(
                f"{program} is in none of {', '.join(map(str, folders))}: run `make cluster-binaries` (Go, about 13"
                " minutes once), or set KUBEBUILDER_ASSETS for the control plane alone"
            )
        found[program] = path
    return found


def build(line: Callable[[str], None]) -> Path:
    """Build what is missing and return the folder.

    Raises:
        RigError: there is no Go, or a build failed.
    """
    folder = binaries_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for module in _SOURCES:
            if all((folder / program).exists() for program in module.programs):
                continue
            line(f"building {', '.join(module.programs)}")
            _build(module, folder)
    return folder


def _build(module: _Module, folder: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise RigError("there is no Go to build the cluster's programs with: install golang, or set KUBEBUILDER_ASSETS")
    scratch = folder / f".{module.folder}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly"}
    for package, program in zip(module.packages, module.programs, strict=True):
        command = [go, "build", "-trimpath", "-ldflags", module.flags, "-o", str(scratch / program), package]
        done = subprocess.run(
            command, cwd=_MODULES / module.folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RigError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    # Moved only when the whole module is built: a folder never holds a program that is half written.
    for program in module.programs:
        (scratch / program).replace(folder / program)
    scratch.rmdir()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Build and say where."""
    try:
        print(build(lambda text: print(text, flush=True)))
    except RigError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
