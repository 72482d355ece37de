"""kill -9 of the operator after every single write: the next one converges, and nothing is left over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig.control_plane import ControlPlane
from rig.gate import Gate
from rig.kubectl import Kubectl, eventually

from disagg_operator.constants import LABEL_MANAGED_BY, LABEL_REVISION, MANAGED_BY

Example = Callable[..., dict[str, Any]]
Start = Callable[[Path], Any]

OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY}"
MOST_WRITES = 12
"""More than a create and an update need; a test that meets no further write ends before."""


@pytest.fixture
def gate(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Gate]:
    with Gate(control_plane, tmp_path) as opened:
        yield opened


@pytest.fixture
def gated(gate: Gate, tmp_path: Path, start_operator: Callable[[Path], Any]) -> Any:
    return start_operator(gate.kubeconfig)


def finished(kubectl: Kubectl, tensor: int) -> bool:
    """Whether everything is as the resource says, with nothing of another revision."""
    resource = kubectl.get("dd", "llama") or {}
    status = resource.get("status") or {}
    if status.get("observedGeneration") != resource["metadata"]["generation"] or "plan" not in status:
        return False
    deployments = kubectl.list("deployments", OURS)
    plans = {item["metadata"]["name"] for item in kubectl.list("configmaps", OURS)}
    return (
        len(deployments) == 2
        and len({item["metadata"]["labels"][LABEL_REVISION] for item in deployments}) == 1
        and all(f'"{tensor}"' in str(item).replace("'", '"') for item in deployments if "decode" in str(item))
        and status["plan"]["configMaps"][0] in plans
        and status["parallelism"] == f"2->{tensor}"
        and set(status["plan"]["configMaps"]) == plans
    )


def test_killed_after_every_write(kubectl: Kubectl, gate: Gate, gated: Any, example: Example) -> None:
    killed = threading.Event()

    def kill_at(count: int) -> Callable[[int], None]:
        def after(writes: int) -> None:
            if writes == count:
                os.kill(gated.process.pid, signal.SIGKILL)
                killed.set()

        return after

    survived = 0
    for count in range(1, MOST_WRITES + 1):
        # Every round makes a change that needs writes of every kind: create at first, then from one plan to another.
        tensor = 4 if count % 2 else 8
        gate.writes.clear()
        killed.clear()
        gate.after_write = kill_at(count)
        gated.start()
        kubectl.apply(example(**{"spec.decode.parallelism.tensor": tensor}))
        eventually("killed, or done", lambda tensor=tensor: killed.is_set() or finished(kubectl, tensor))
        if killed.is_set():
            survived += 1
            gated.end()
            gate.after_write = lambda _count: None
            gated.start()
        eventually(f"converged after write {count}: {gate.writes}", lambda tensor=tensor: finished(kubectl, tensor))
        gated.end()
        if not killed.is_set():
            break
    assert survived >= 5, "creating and updating take more writes than were seen"


def test_killed_before_a_delete_is_seen(kubectl: Kubectl, gate: Gate, gated: Any, example: Example) -> None:
    gated.start()
    kubectl.apply(example())
    eventually("created", lambda: finished(kubectl, 4))
    kubectl.run("delete", "dd", "llama", "--wait=false")
    gated.end()
    gated.start()
    eventually("nothing is left", lambda: not kubectl.list("deployments,pods,replicasets,dd"))
    assert not kubectl.list("configmaps", OURS)
