"""The operator with many deployments and many pods, against a real API server on this machine.

Figures are printed with the machine's load: API server, etcd, controllers and operator share its cores.
"""

from __future__ import annotations

import asyncio
import copy
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from kubernetes.aio import client, config
from rig.binaries import RigError, find
from rig.control_plane import ControlPlane
from rig.kubectl import Kubectl, eventually
from rig.programs import Program, free_ports

from disagg_operator.cluster.api import Api
from disagg_operator.constants import LABEL_DEPLOYMENT, LABEL_MANAGED_BY, MANAGED_BY

ROOT = Path(__file__).parents[2]
LONG = os.environ.get("DISAGG_PROFILE") == "long"
DEPLOYMENTS = 1000 if LONG else 100
PODS = 10_000 if LONG else 1000
RATE = 20.0
STEADY_SECONDS = 300.0 if LONG else 20.0
OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY},{LABEL_DEPLOYMENT}"

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    try:
        find("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
    except RigError as error:
        pytest.skip(f"NO KUBERNETES, so the operator's scale is not measured: {error}")
    # No controllers: their own work for a thousand Deployments would be what is measured.
    with ControlPlane(tmp_path / "plane", controllers=False) as started:
        kubectl = Kubectl(started.kubeconfig)
        kubectl.run("apply", "-f", str(ROOT / "crds"))
        eventually("the resource is served", lambda: kubectl.call("get", "dd").code == 0)
        yield started


class Measured:
    """One life of the operator, with its metrics and memory."""

    def __init__(self, plane: ControlPlane, log: Path) -> None:
        (self._port,) = free_ports(1)
        self.begin = time.monotonic()
        command = [sys.executable, "-m", "disagg_operator", "--http", f"127.0.0.1:{self._port}"]
        self.program = Program("operator", command, log, {"KUBECONFIG": str(plane.kubeconfig)})

    def ready_seconds(self) -> float:
        """Seconds from its start until it had listed everything and decided on all of it."""
        eventually("ready", lambda: self.value("disagg_operator_leading") == 1, 120.0)
        eventually("idle", lambda: self.value("disagg_operator_queue_depth") == 0 and self._get("/readyz"), 300.0)
        return time.monotonic() - self.begin

    def value(self, name: str) -> float:
        """Sum of a metric over its labels; -1 while it does not answer."""
        lines = [line for line in self._get("/metrics").splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else -1.0

    def mebibytes(self) -> float:
        """Resident memory."""
        return float(psutil.Process(self.program.process.pid).memory_info().rss) / (1 << 20)

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""


async def api_of(plane: ControlPlane) -> Api:
    configuration = client.Configuration()
    await config.load_kube_config(str(plane.kubeconfig), client_configuration=configuration)
    return Api(configuration, lambda _verb, _kind: None)


async def apply_and_wait(api: Api, count: int) -> list[float]:
    """Create deployments at a steady rate; seconds from each one's answer to the sight of its plan."""
    document = yaml.safe_load((ROOT / "examples" / "llama-3.1-8b.yaml").read_text())
    created: dict[str, float] = {}
    seen: dict[str, float] = {}
    start = await api.list_all("ConfigMap", "default", OURS)

    async def look() -> None:
        async for change, item in api.watch("ConfigMap", "default", OURS, start.version, 3600):
            if change == "ADDED":
                seen.setdefault(item["metadata"]["labels"][LABEL_DEPLOYMENT], time.monotonic())
                if len(seen) == count:
                    return

    async def create(index: int) -> None:
        await asyncio.sleep(index / RATE)
        item: dict[str, Any] = copy.deepcopy(document)
        item["metadata"] = {"name": f"llama-{index}", "namespace": "default"}
        await api.create(item)
        created[f"llama-{index}"] = time.monotonic()

    async with asyncio.timeout(count / RATE + 300), asyncio.TaskGroup() as group:
        group.create_task(look())
        for index in range(count):
            group.create_task(create(index))
    return sorted(seen[name] - created[name] for name in created)


async def make_pods(api: Api, kubectl: Kubectl, count: int) -> None:
    """Pods as objects; there is no scheduler and no node, so nothing happens to them."""
    limit = asyncio.Semaphore(20)
    # Nothing admits a pod without it, and no controller is there to make it.
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "default"}}
    await asyncio.to_thread(kubectl.apply, account)

    async def one(index: int) -> None:
        labels = {LABEL_DEPLOYMENT: f"llama-{index % DEPLOYMENTS}", "disagg.dev/role": "decode"}
        containers = [{"name": "engine", "image": "engine:1"}]
        async with limit:
            await api.create(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": {"name": f"pod-{index}", "namespace": "default", "labels": labels},
                    "spec": {"containers": containers, "automountServiceAccountToken": False},
                }
            )

    async with asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(one(index))


def test_many_deployments_and_pods(plane: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}  [load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores]", end="")

    async def with_api(work: Any) -> Any:
        api = await api_of(plane)
        try:
            return await work(api)
        finally:
            await api.close()

    kubectl = Kubectl(plane.kubeconfig)
    operator = Measured(plane, tmp_path / "operator.log")
    operator.ready_seconds()
    took = asyncio.run(with_api(lambda api: apply_and_wait(api, DEPLOYMENTS)))
    cuts = statistics.quantiles(took, n=100)
    show(f"{DEPLOYMENTS} deployments at {RATE:.0f}/s: to ConfigMap p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s")
    eventually("idle", lambda: operator.value("disagg_operator_queue_depth") == 0, 300.0)
    # What the last writes set off comes back by the watch: quiet is when nothing was written for a while.
    quiet = [operator.value("disagg_operator_writes_total"), time.monotonic()]

    def settled() -> bool:
        writes = operator.value("disagg_operator_writes_total")
        if writes != quiet[0]:
            quiet[:] = [writes, time.monotonic()]
        return time.monotonic() - quiet[1] > 3.0

    eventually("no writes for 3 s", settled, 120.0)
    before = operator.value("disagg_operator_writes_total")
    end = time.monotonic() + STEADY_SECONDS
    eventually("the steady time is over", lambda: time.monotonic() > end, STEADY_SECONDS + 5)
    written = operator.value("disagg_operator_writes_total") - before
    show(f"writes of {DEPLOYMENTS} deployments in steady state over {STEADY_SECONDS:.0f} s: {written:.0f}")
    assert written == 0

    asyncio.run(with_api(lambda api: make_pods(api, kubectl, PODS)))
    operator.program.kill()
    operator = Measured(plane, tmp_path / "operator-2.log")
    seconds = operator.ready_seconds()
    show(f"restart with {DEPLOYMENTS} deployments, {PODS} pods: {seconds:.1f} s, {operator.mebibytes():.0f} MiB")
    assert operator.value("disagg_operator_writes_total") <= 0, "a restart writes nothing"

    ready = '{"status":{"conditions":[{"type":"Ready","status":"True"}]}}'
    begin = time.monotonic()
    kubectl.run("patch", "pod", "pod-7", "--subresource=status", "--type=merge", "-p", ready)
    eventually(
        "the change is handled", lambda: operator.value("disagg_operator_writes_total") > 0 or _handled(operator), 30
    )
    show(f"one pod change handled in {time.monotonic() - begin:.2f} s, kubectl included")
    operator.program.stop()


def _handled(operator: Measured) -> bool:
    return operator.value("disagg_operator_reconciles_total") > DEPLOYMENTS
