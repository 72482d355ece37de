"""What is seen of children, and what the status and events say of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from disagg_operator import constants
from disagg_operator.children import CLUSTER
from disagg_operator.cluster.drift import holds
from disagg_operator.observed import Children, PodView, Problem, Workload, controlled_by, pod_view, workload, worst
from disagg_operator.reconcile import Snapshot, reconcile
from disagg_operator.status import Notice, cluster_status, notices
from disagg_operator.status_types import Status
from disagg_operator.types import DisaggDeployment

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
LABELS = {"disagg.dev/role": "decode", "disagg.dev/revision": "r", "disagg.dev/plan": "p"}


def pod(status: dict[str, Any], **metadata: Any) -> PodView:
    return pod_view({"metadata": {"name": "pod", "labels": LABELS, **metadata}, "status": status})


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": reason, "message": message}}}]}


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        ({}, None),
        (
            {
                "conditions": [
                    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
                ]
            },
            Problem("Unschedulable", "0/3 nodes"),
        ),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}, None),
        (waiting("ContainerCreating"), None),
        (waiting("ImagePullBackOff", "no such image"), Problem("ImagePullFailed", "container engine: no such image")),
        (waiting("CrashLoopBackOff"), Problem("CrashLoop", "container engine: CrashLoopBackOff")),
        (waiting("CreateContainerConfigError", "no key"), Problem("FailedCreate", "container engine: no key")),
    ],
)
def test_what_keeps_a_pod_from_coming_up(status: dict[str, Any], problem: Problem | None) -> None:
    assert pod(status).problem == problem
    # What is on its way out keeps nothing from coming up.
    assert pod(status, deletionTimestamp="2026-01-01T00:00:00Z").problem is None


def test_a_leaving_pod_is_not_ready() -> None:
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.1"}
    assert pod(ready) == PodView("pod", "decode", "r", "p", True, "10.0.0.1", None)
    assert not pod(ready, deletionTimestamp="2026-01-01T00:00:00Z").ready


def test_a_deployment_is_reduced() -> None:
    item = {
        "metadata": {
            "name": "d",
            "labels": LABELS,
            "generation": 3,
            "annotations": {"disagg.dev/rendered-digest": "x"},
        },
        "spec": {"replicas": 4},
        "status": {
            "observedGeneration": 2,
            "readyReplicas": 1,
            "conditions": [{"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}],
        },
    }
    found = workload(item)
    assert (found.desired, found.ready, found.current, found.rendered) == (4, 1, False, "x")
    assert found.problem == Problem("FailedCreate", "exceeded quota")
    assert workload({"metadata": {"name": "d", "generation": 1}, "spec": {}}).desired == 1


def test_the_worst_problem_is_shown() -> None:
    crash, quota, place = Problem("CrashLoop", "a"), Problem("FailedCreate", "b"), Problem("Unschedulable", "c")
    assert worst([crash, None, place, quota]) == quota
    assert worst([crash, place]) == place
    assert worst([None]) is None


def test_every_reason_has_a_remedy_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "operator.md").read_text()
    reasons = {value for name, value in vars(constants).items() if name.startswith("REASON_")}
    assert {reason for reason in reasons if f"`{reason}`" not in page} == set()


def test_only_the_controller_counts_as_owner() -> None:
    item = {"metadata": {"ownerReferences": [{"uid": "1", "controller": False}, {"uid": "2", "controller": True}]}}
    assert controlled_by(item, "2")
    assert not controlled_by(item, "1")
    assert not controlled_by({"metadata": {}}, "2")


def running(revision: str, prefill: int, decode: int, problem: Problem | None = None) -> Children:
    return Children(
        tuple(
            Workload(f"{role}-{revision}", role, revision, "", 1, ready, True, "", "1", problem)
            for role, ready in (("prefill", prefill), ("decode", decode))
        )
    )


def status_of(deployment: DisaggDeployment, observed: Children, *failures: Problem) -> dict[str, Any]:
    desired = reconcile(Snapshot(deployment), CLUSTER)
    status = cluster_status(desired.status, deployment, desired.revision, observed, failures, NOW)
    Status.model_validate(status)
    return status


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


def test_ready_when_both_roles_are(deployment: DisaggDeployment) -> None:
    revision = reconcile(Snapshot(deployment), CLUSTER).revision
    found = conditions(status_of(deployment, running(revision, 1, 1)))
    assert found["Ready"] == ("True", "Ready")
    assert found["PrefillReady"] == ("True", "AllReplicasReady")


def test_replicas_of_another_revision_do_not_make_it_ready(deployment: DisaggDeployment) -> None:
    status = status_of(deployment, running("older", 1, 1))
    assert conditions(status)["Ready"] == ("False", "ReplicasStarting")
    assert status["roles"]["decode"] == {
        "desired": 1, "ready": 1, "updated": 0, "onCurrentPlan": 0, "summary": "1/1",
    }  # fmt: skip


def test_what_stands_in_the_way_is_the_reason(deployment: DisaggDeployment) -> None:
    revision = reconcile(Snapshot(deployment), CLUSTER).revision
    quota = Problem("FailedCreate", "exceeded quota: pods=2")
    status = status_of(deployment, running(revision, 0, 0, quota))
    assert conditions(status)["Ready"] == ("False", "FailedCreate")
    assert "0 of 1 replicas are ready: exceeded quota: pods=2" in str(status["conditions"])


def test_a_failed_write_comes_before_everything(deployment: DisaggDeployment) -> None:
    revision = reconcile(Snapshot(deployment), CLUSTER).revision
    failed = status_of(deployment, running(revision, 1, 1), Problem("NameConflict", "taken"))
    assert conditions(failed)["Ready"] == ("False", "NameConflict")


def test_times_change_with_the_status_alone(deployment: DisaggDeployment) -> None:
    first = status_of(deployment, Children())
    assert {one["lastTransitionTime"] for one in first["conditions"]} == {"2026-01-02T03:04:05Z"}
    again = deployment.model_copy(update={"status": first})
    desired = reconcile(Snapshot(again), CLUSTER)
    later = NOW.replace(year=2027)
    same = cluster_status(desired.status, again, desired.revision, Children(), (), later)
    assert same == first
    ready = cluster_status(desired.status, again, desired.revision, running(desired.revision, 1, 1), (), later)
    times = {one["type"]: one["lastTransitionTime"][:4] for one in ready["conditions"]}
    assert times == {
        "SpecValid": "2026",
        "PlanReady": "2026",
        "PrefillReady": "2027",
        "DecodeReady": "2027",
        "Ready": "2027",
    }


def test_events_are_of_changes() -> None:
    def one(kind: str, status: str, reason: str, message: str = "m") -> dict[str, str]:
        return {"type": kind, "status": status, "reason": reason, "message": message}

    refused = [one("SpecValid", "False", "BadStages"), one("Ready", "False", "BadStages")]
    assert notices([], refused) == (Notice("Warning", "BadStages", "m"),)
    assert notices(refused, refused) == ()
    reworded = [one("SpecValid", "False", "BadStages", "n"), refused[1]]
    assert notices(refused, reworded) == (Notice("Warning", "BadStages", "n"),)
    waiting = [one("PrefillReady", "False", "Unschedulable", "0/3")]
    assert notices(waiting, [one("PrefillReady", "False", "Unschedulable", "0/4")]) == ()


@pytest.mark.parametrize(
    ("observed", "desired", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        ({"a": [{"x": 1, "y": 2}]}, {"a": [{"x": 1}]}, True),
        ({"a": [{"x": 1}, {"x": 2}]}, {"a": [{"x": 1}]}, False),
        ({"a": [{"x": 2}, {"x": 1}]}, {"a": [{"x": 1}, {"x": 2}]}, False),
        ({}, {"a": {}, "b": [], "c": ""}, True),
        ({"a": None}, {"a": 0}, False),
        ({"a": "1"}, {"a": {"b": 1}}, False),
    ],
)
def test_drift(observed: Any, desired: Any, expected: bool) -> None:
    assert holds(observed, desired) is expected
