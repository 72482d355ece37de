"""A real control plane for the whole run, and the operator as a process against it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from rig.binaries import RigError, find
from rig.control_plane import ControlPlane
from rig.kubectl import Kubectl, eventually

from disagg_operator.crd import NAME

ROOT = Path(__file__).parents[2]


class Operator:
    """`python -m disagg_operator` against one API server, all namespaces."""

    def __init__(self, kubeconfig: Path, log: Path, arguments: Sequence[str] = ()) -> None:
        self.log = log
        self._arguments = arguments
        self._env = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            command = [sys.executable, "-m", "disagg_operator", *self._arguments]
            self.process = subprocess.Popen(command, env=self._env, stderr=output, start_new_session=True)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Send a signal and wait for the end."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self.process = None
        return code


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    try:
        find("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
    except RigError as error:
        pytest.skip(f"NO KUBERNETES, so no cluster is tested: {error}")
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as plane:
        admin = Kubectl(plane.kubeconfig)
        admin.run("apply", "-f", str(ROOT / "crds"))
        admin.run("wait", "--for=condition=Established", f"crd/{NAME}", "--timeout=30s")
        # Until then the API server answers requests for the new resource with 429.
        eventually("the resource is served", lambda: admin.call("get", "dd").code == 0)
        yield plane


@pytest.fixture
def kubectl(control_plane: ControlPlane) -> Iterator[Kubectl]:
    """kubectl as administrator, in a namespace of the test's own."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    Kubectl(control_plane.kubeconfig).run("create", "namespace", namespace)
    yield Kubectl(control_plane.kubeconfig, namespace)
    Kubectl(control_plane.kubeconfig).call("delete", "namespace", namespace, "--wait=false")


@pytest.fixture
def start_operator(tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    """Makes operators, not started yet, against the API server of a kubeconfig; they end with the test."""
    made: list[Operator] = []

    def make(kubeconfig: Path, *arguments: str) -> Operator:
        made.append(Operator(kubeconfig, tmp_path / f"operator-{len(made)}.log", arguments))
        return made[-1]

    yield make
    for operator in made:
        operator.end()
        print(operator.log.read_text() if operator.log.exists() else "the operator was never started")


@pytest.fixture
def stopped_operator(control_plane: ControlPlane, start_operator: Callable[..., Operator]) -> Operator:
    return start_operator(control_plane.kubeconfig)


@pytest.fixture
def operator(stopped_operator: Operator) -> Operator:
    stopped_operator.start()
    return stopped_operator


@pytest.fixture
def example() -> Callable[..., dict[str, Any]]:
    """The Llama example, with some fields changed: `example(**{"spec.decode.replicas": 2})`."""

    def make(name: str = "llama", **changes: Any) -> dict[str, Any]:
        document: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "llama-3.1-8b.yaml").read_text())
        document["metadata"] = {"name": name}
        for where, value in changes.items():
            *parents, last = where.split(".")
            item = document
            for parent in parents:
                item = item.setdefault(parent, {})
            if value is None:
                item.pop(last, None)
            else:
                item[last] = value
        return document

    return make
