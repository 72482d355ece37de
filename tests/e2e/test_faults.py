"""Processes killed in the middle of a run: nothing wrong is reported as right, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.nixl

ENDLESS = ("--requests", "100000", "--max-tokens", "400", "--max-memory", "64Mi", "-o", "json")


def every_pid(pods: list[dict[str, Any]]) -> list[int]:
    return [pid for pod in pods for pid in pod["pids"].values()]


@pytest.fixture
def running(disagg: Any, write_deployment: Callable[..., Path], wait_for: Any, request: Any) -> Any:
    """A run under load: the process and its pods."""
    extra = getattr(request, "param", ())
    file = write_deployment(prefill=2, decode=4, heads=8, layers=8)
    process = disagg.start("up", "-f", str(file), *ENDLESS, *extra)
    pods = disagg.pods("small")
    prefill = next(pod for pod in pods if pod["role"] == "prefill")
    wait_for(lambda: holds_anything(prefill), 30.0, "no request was ever held")
    return process, pods


def holds_anything(pod: dict[str, Any]) -> bool:
    """Ask the agent over its Unix socket whether a request is in flight."""
    import http.client
    import socket

    connection = http.client.HTTPConnection("pod")
    connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.sock.connect(pod["agentHttp"])
    try:
        connection.request("GET", "/transfers")
        return int(json.loads(connection.getresponse().read())["holds"]) > 0
    finally:
        connection.close()


@pytest.mark.parametrize("running", [("--placement", "Sidecar"), ("--placement", "InEngine")], indirect=True)
@pytest.mark.parametrize("victim", ["disagg-agent", "engine"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_killing_a_process_fails_its_requests_within_two_seconds(
    running: Any, disagg: Any, alive: Any, role: str, victim: str
) -> None:
    process, pods = running
    pod = next(pod for pod in pods if pod["role"] == role)
    killed = time.monotonic()
    os.kill(pod["pids"][victim], signal.SIGKILL)
    out, err = process.communicate(timeout=30.0)
    assert process.returncode == 1, err
    document = json.loads(out)
    assert document["failedRequests"] > 0
    assert document["wrongBytes"] == 0
    # The other side fails requests, and lives.
    assert len(document["problems"]) == 1
    assert f"container {victim} of pod {pod['name']}" in document["problems"][0]
    requests = disagg.requests("small")
    assert len(requests) == 100000
    in_flight = [one for one in requests if one["started"] <= killed <= one["finished"]]
    assert in_flight
    assert max(one["finished"] for one in in_flight) - killed < 2.0
    for one in requests:
        # Served and wholly verified, or failed with a name: nothing in between.
        if one["error"]:
            assert one["verifiedBytes"] == 0
            assert one["error"].split(":")[0].isalnum()
        else:
            assert one["verifiedBytes"] == one["tokens"] * 8 * 2 * 32 * 2 * 8
    assert not [pid for pid in every_pid(pods) if alive(pid)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process(running: Any, alive: Any, number: signal.Signals) -> None:
    process, pods = running
    process.send_signal(number)
    out, err = process.communicate(timeout=20.0)
    assert process.returncode == 130, err
    assert out == ""
    assert "interrupted" in err
    assert not [pid for pid in every_pid(pods) if alive(pid)]
    assert not Path(pods[0]["agentHttp"]).exists()


def test_a_second_interrupt_does_not_stop_the_cleaning_up(running: Any, alive: Any) -> None:
    process, pods = running
    folder = Path(pods[0]["agentHttp"]).parents[2]
    process.send_signal(signal.SIGINT)
    # Again as soon as the first one shows: the first container is gone, the cleaning up goes on.
    while all(alive(pid) for pid in every_pid(pods)):
        pass
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20.0)
    assert process.returncode == 130
    assert not [pid for pid in every_pid(pods) if alive(pid)]
    assert not folder.exists()


def test_a_kept_run_shows_its_account_first(disagg: Any, write_deployment: Callable[..., Path], wait_for: Any) -> None:
    file = write_deployment()
    arguments = ("up", "-f", str(file), "--requests", "4", "--max-tokens", "64", "--max-memory", "24Mi", "--keep")
    process = disagg.start(*arguments, "-o", "json")
    document = json.loads(process.stdout.readline())
    assert (document["requests"], document["failedRequests"]) == (4, 0)
    second = disagg.run(*arguments)
    assert second.code == 1
    assert "another run uses" in second.err
    assert "--state" in second.err
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20.0)
    assert process.returncode == 0


def test_a_killed_runner_leaves_no_process(running: Any, alive: Any, wait_for: Any) -> None:
    process, pods = running
    folder = Path(pods[0]["agentHttp"]).parents[2]
    process.kill()
    process.communicate(timeout=20.0)
    wait_for(lambda: not any(alive(pid) for pid in every_pid(pods)), 5.0, "processes outlive their runner")
    wait_for(lambda: not folder.exists(), 5.0, "the folder of sockets outlives its runner")


def test_an_idle_pair_of_agents_costs_nothing(
    disagg: Any, write_deployment: Callable[..., Path], wait_for: Any
) -> None:
    file = write_deployment(prefill=2, decode=4, heads=8)
    disagg.start("up", "-f", str(file), "--requests", "4", "--max-tokens", "64", "--max-memory", "24Mi", "--keep")
    pods = disagg.pods("small")
    requests = disagg.cwd / ".disagg" / "small" / "requests.jsonl"
    wait_for(requests.exists, 30.0, "the requests did not end")
    agents = [pod["pids"]["disagg-agent"] for pod in pods]
    before, started = sum(map(cpu_seconds, agents)), time.monotonic()
    # Idleness can only be measured over time.
    time.sleep(10.0)
    share = (sum(map(cpu_seconds, agents)) - before) / (time.monotonic() - started)
    assert share < 0.01, f"two idle agents use {share:.2%} of a core"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
