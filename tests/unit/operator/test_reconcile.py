"""The decision: objects out of a snapshot, pure and the same every time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from disagg_operator.children import CLUSTER, LOCAL
from disagg_operator.reconcile import Snapshot, reconcile
from disagg_operator.types import DisaggDeployment, parse_deployment
from disagg_operator.yaml_text import dump
from disagg_plan import wire
from disagg_plan.errors import ProofError, Refusal
from disagg_plan.proof import prove

Changed = Callable[[dict[str, Any]], dict[str, Any]]


def names(objects: tuple[dict[str, Any], ...]) -> list[str]:
    return [item["metadata"]["name"] for item in objects]


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [one for one in status["conditions"] if one["type"] == kind]
    return dict(found)


@pytest.mark.parametrize(("site", "file"), [(CLUSTER, "children-cluster.yaml"), (LOCAL, "children-local.yaml")])
def test_rendered_objects(
    deployment: DisaggDeployment, golden: Callable[[str, str], None], site: Any, file: str
) -> None:
    desired = reconcile(Snapshot(deployment), site)
    golden(file, dump([*desired.objects, {"status": desired.status}]))


def test_deciding_twice_gives_the_same_and_changes_nothing(example: dict[str, Any]) -> None:
    before = copy.deepcopy(example)
    snapshot = Snapshot(parse_deployment(example))
    assert reconcile(snapshot, CLUSTER) == reconcile(snapshot, CLUSTER)
    assert example == before


def test_the_published_plan_is_proven_and_named_by_its_digest(deployment: DisaggDeployment) -> None:
    desired = reconcile(Snapshot(deployment), CLUSTER)
    config_map = desired.objects[0]
    plan = wire.decode(config_map["data"]["plan.json"])
    assert prove(plan).edges == 4
    assert config_map["metadata"]["name"] == f"llama-8b-plan-{plan.digest.removeprefix('sha256:')[:10]}"
    assert desired.status["plan"]["digest"] == plan.digest
    assert "d2      p1       attention  0-31    k,v 4-5" in config_map["data"]["summary.txt"]


def test_replica_counts_are_not_part_of_a_revision(changed: Changed, deployment: DisaggDeployment) -> None:
    before = reconcile(Snapshot(deployment), CLUSTER)
    after = reconcile(Snapshot(parse_deployment(changed({"spec.decode.replicas": 7}))), CLUSTER)
    assert names(before.objects) == names(after.objects)
    assert after.objects[2]["spec"]["replicas"] == 7


@pytest.mark.parametrize(
    "fields",
    [
        {"spec.decode.parallelism.tensor": 8},
        {"spec.transport.protocol": "TCP"},
        {"spec.agent.placement": "InEngine"},
        {"spec.prefill.template": {"spec": {"containers": [{"name": "engine", "image": "other:2"}]}}},
    ],
)
def test_whatever_pods_are_rendered_from_makes_a_new_revision(
    changed: Changed, deployment: DisaggDeployment, fields: dict[str, Any]
) -> None:
    before = reconcile(Snapshot(deployment), CLUSTER)
    after = reconcile(Snapshot(parse_deployment(changed(fields))), CLUSTER)
    assert not set(names(before.objects[1:])) & set(names(after.objects[1:]))


def test_a_refused_spec_yields_no_objects_and_says_why(changed: Changed) -> None:
    desired = reconcile(Snapshot(parse_deployment(changed({"spec.decode.parallelism.tensor": 3}))), CLUSTER)
    assert desired.objects == ()
    assert desired.plan is None
    assert isinstance(desired.refusal, Refusal)
    valid = condition(desired.status, "SpecValid")
    assert (valid["status"], valid["reason"]) == ("False", "IndivisibleUnits")
    assert "decode.parallelism.tensor" in valid["message"]
    assert "1, 2, 4, 8" in valid["message"]
    assert condition(desired.status, "PlanReady")["reason"] == "NoPlan"


def test_a_failed_proof_is_not_the_users_fault(deployment: DisaggDeployment, monkeypatch: pytest.MonkeyPatch) -> None:
    # A planner that errs cannot be had on demand; what is tested is that nothing of it would be published.
    def fail(_spec: Any, _config_maps: Any) -> Any:
        raise ProofError(["byte 0 is never written"])

    monkeypatch.setattr("disagg_operator.reconcile.plan_deployment", fail)
    desired = reconcile(Snapshot(deployment), CLUSTER)
    assert desired.objects == ()
    assert condition(desired.status, "SpecValid")["status"] == "True"
    assert condition(desired.status, "PlanReady") == {
        "type": "PlanReady",
        "status": "False",
        "reason": "ProofFailed",
        "message": "byte 0 is never written",
    }


def test_users_template_is_kept_and_not_touched(changed: Changed) -> None:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "n"}},
        "spec": {
            "nodeSelector": {"gpu": "yes"},
            "initContainers": [{"name": "first"}],
            "containers": [{"name": "engine", "image": "e", "env": [{"name": "X", "value": "1"}]}, {"name": "log"}],
            "volumes": [{"name": "mine", "emptyDir": {}}],
        },
    }
    before = copy.deepcopy(template)
    parsed = parse_deployment(changed({"spec.prefill.template": template}))
    pod = reconcile(Snapshot(parsed), CLUSTER).objects[1]["spec"]["template"]
    assert template == before
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"]["note"] == "n"
    assert pod["spec"]["nodeSelector"] == {"gpu": "yes"}
    assert [container["name"] for container in pod["spec"]["initContainers"]] == ["first", "disagg-agent"]
    assert [container["name"] for container in pod["spec"]["containers"]] == ["engine", "log"]
    assert pod["spec"]["containers"][0]["env"][0] == {"name": "X", "value": "1"}
    assert pod["spec"]["volumes"][0] == {"name": "mine", "emptyDir": {}}
