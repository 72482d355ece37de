"""The operator's process: election, health, signals."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rig.control_plane import ControlPlane
from rig.kubectl import Kubectl, eventually
from rig.programs import free_ports

Start = Callable[..., Any]


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_health_and_metrics(
    control_plane: ControlPlane, kubectl: Kubectl, start_operator: Start, example: Callable[..., dict[str, Any]]
) -> None:
    (port,) = free_ports(1)
    operator = start_operator(control_plane.kubeconfig, "--http", f"127.0.0.1:{port}")
    operator.start()
    eventually("ready", lambda: fetch(port, "/readyz")[0] == 200)
    assert fetch(port, "/healthz") == (200, "ok\n")
    kubectl.apply(example())
    eventually(
        "a reconcile is counted", lambda: 'disagg_operator_writes_total{kind="Deployment"' in fetch(port, "/metrics")[1]
    )
    counted = 'disagg_operator_reconciles_total{result="ok"}'
    text = eventually(
        "a good reconcile", lambda: next((text for text in [fetch(port, "/metrics")[1]] if counted in text), None)
    )
    assert "disagg_operator_leading 1.0" in text
    assert operator.end(signal.SIGTERM) == 0


def test_an_address_that_is_taken_ends_it_with_a_sentence(control_plane: ControlPlane, start_operator: Start) -> None:
    (port,) = free_ports(1)
    first = start_operator(control_plane.kubeconfig, "--http", f"127.0.0.1:{port}")
    first.start()
    eventually("the first serves", lambda: fetch(port, "/healthz")[0] == 200)
    second = start_operator(control_plane.kubeconfig, "--http", f"127.0.0.1:{port}")
    second.start()
    assert second.process.wait(30) == 1
    assert "address already in use" in second.log.read_text()
    assert "Traceback" not in second.log.read_text()


def test_no_api_server_is_said(start_operator: Start, tmp_path: Path) -> None:
    operator = start_operator(tmp_path / "no-such-file")
    operator.start()
    assert operator.process.wait(30) == 1
    assert "KUBECONFIG" in operator.log.read_text()
    assert "Traceback" not in operator.log.read_text()


def test_one_leads_and_the_other_takes_over(
    control_plane: ControlPlane, kubectl: Kubectl, start_operator: Start, example: Callable[..., dict[str, Any]]
) -> None:
    def leads(operator: Any) -> bool:
        return '"leading"' in operator.log.read_text()

    elect = ("--leader-election", kubectl.namespace)
    first, second = (start_operator(control_plane.kubeconfig, *elect) for _ in range(2))
    first.start()
    eventually("the first leads", lambda: leads(first))
    second.start()
    kubectl.apply(example("one"))
    eventually("reconciled", lambda: (kubectl.get("dd", "one") or {}).get("status"))
    assert not leads(second)
    # One that is told to stop gives the lease back; one that is killed cannot, and its lease has to run out.
    assert first.end(signal.SIGTERM) == 0
    eventually("the second leads at once", lambda: leads(second), seconds=10.0)
    third = start_operator(control_plane.kubeconfig, *elect)
    third.start()
    second.end(signal.SIGKILL)
    eventually("the third leads when the lease has run out", lambda: leads(third), seconds=40.0)
    kubectl.apply(example("two"))
    eventually("reconciled", lambda: (kubectl.get("dd", "two") or {}).get("status"))


def test_a_standby_stops_when_told(control_plane: ControlPlane, kubectl: Kubectl, start_operator: Start) -> None:
    elect = ("--leader-election", kubectl.namespace)
    first, second = (start_operator(control_plane.kubeconfig, *elect) for _ in range(2))
    first.start()
    eventually("the first leads", lambda: '"leading"' in first.log.read_text())
    second.start()
    eventually("the second has started", lambda: second.process.poll() is None and second.log.exists())
    assert second.end(signal.SIGTERM) in (0, -signal.SIGTERM)
