"""The operator against a real API server with its real controllers; there is no node, so pods stay pending."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rig.control_plane import ControlPlane
from rig.kubectl import Kubectl, eventually

from disagg_operator.constants import LABEL_MANAGED_BY, LABEL_REVISION, MANAGED_BY
from disagg_operator.crd import NAME as CRD

Example = Callable[..., dict[str, Any]]

ROOT = Path(__file__).parents[2]
OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY}"


def condition(kubectl: Kubectl, kind: str, name: str = "llama") -> dict[str, Any]:
    item = kubectl.get("dd", name) or {}
    conditions = (item.get("status") or {}).get("conditions") or []
    if not conditions or item["status"]["observedGeneration"] != item["metadata"]["generation"]:
        return {}
    return next((dict(one) for one in conditions if one["type"] == kind), {})


def reason(kubectl: Kubectl, kind: str, expected: str, name: str = "llama") -> dict[str, Any]:
    """Wait for a condition's reason on the current generation."""

    def look() -> dict[str, Any] | None:
        found = condition(kubectl, kind, name)
        return found if found.get("reason") == expected else None

    return eventually(f"{kind} of {name} is {expected}", look)


def printed_plan(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(document))
    command = [str(Path(sys.executable).with_name("disagg")), "plan", "-f", str(file), "-o", "configmap"]
    return dict(yaml.safe_load(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def versions(kubectl: Kubectl) -> dict[str, str]:
    items = [*kubectl.list("deployments,configmaps", OURS), *kubectl.list("dd")]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in items}


def revisions(kubectl: Kubectl) -> set[str]:
    return {item["metadata"]["labels"][LABEL_REVISION] for item in kubectl.list("deployments", OURS)}


def settled(kubectl: Kubectl, name: str = "llama") -> None:
    """Children are there, their controllers have answered, and the status says so."""
    reason(kubectl, "Ready", "ReplicasStarting", name)
    eventually("both pods of the current revision", lambda: len(kubectl.list("pods")) >= 2)
    eventually(
        "controllers have seen every Deployment",
        lambda: all(
            item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"]
            for item in kubectl.list("deployments", OURS)
        ),
    )


def test_the_published_plan_is_what_disagg_plan_prints(
    kubectl: Kubectl, operator: Any, example: Example, tmp_path: Path
) -> None:
    document = example()
    kubectl.apply(document)
    plan = reason(kubectl, "PlanReady", "Proven")
    assert plan["status"] == "True"
    (published,) = kubectl.list("configmaps", OURS)
    printed = printed_plan(document, tmp_path)
    assert published["data"] == printed["data"]
    assert published["immutable"] is True
    for key in ("labels", "annotations", "name"):
        assert published["metadata"][key] == printed["metadata"][key]
    (owner,) = published["metadata"]["ownerReferences"]
    resource = kubectl.get("dd", "llama")
    assert resource is not None
    assert owner["uid"] == resource["metadata"]["uid"]
    assert "finalizers" not in resource["metadata"]
    assert resource["status"]["plan"]["configMaps"] == [published["metadata"]["name"]]


def test_a_refused_spec_is_said_in_status_and_events_and_ends_no_pod(
    kubectl: Kubectl, operator: Any, example: Example
) -> None:
    kubectl.apply(example())
    settled(kubectl)
    before = {item["metadata"]["uid"] for item in kubectl.list("deployments,pods")}
    kubectl.apply(example(**{"spec.decode.parallelism.tensor": 3}))
    refused = reason(kubectl, "SpecValid", "IndivisibleUnits")
    assert refused["status"] == "False"
    assert "spec.decode.parallelism.tensor" in refused["message"]
    assert reason(kubectl, "Ready", "IndivisibleUnits")["status"] == "False"
    eventually(
        "a warning event",
        lambda: [
            event
            for event in kubectl.list("events")
            if event["reason"] == "IndivisibleUnits"
            and event["type"] == "Warning"
            and event["involvedObject"]["name"] == "llama"
        ],
    )
    assert {item["metadata"]["uid"] for item in kubectl.list("deployments,pods")} == before


def test_steady_state_and_a_restart_write_nothing(kubectl: Kubectl, operator: Any, example: Example) -> None:
    kubectl.apply(example())
    settled(kubectl)
    before = versions(kubectl)
    operator.end(signal.SIGTERM)
    operator.start()
    # A second resource that is handled shows that the first one, listed before it, was looked at too.
    kubectl.apply(example("zebra"))
    settled(kubectl, "zebra")
    after = versions(kubectl)
    assert {name: after[name] for name in before} == before
    events = [event for event in kubectl.list("events") if event["involvedObject"]["name"] == "llama"]
    assert sorted(event["reason"] for event in events if event["involvedObject"]["kind"] == "DisaggDeployment") == [
        "Accepted",
        "Proven",
    ]


def test_scaling_restarts_nothing(kubectl: Kubectl, operator: Any, example: Example) -> None:
    kubectl.apply(example())
    settled(kubectl)
    pods = {item["metadata"]["uid"] for item in kubectl.list("pods")}
    kubectl.apply(example(**{"spec.decode.replicas": 2}))
    eventually("a third pod", lambda: len(kubectl.list("pods")) == 3)
    assert {item["metadata"]["uid"] for item in kubectl.list("pods")} > pods
    assert len(revisions(kubectl)) == 1


def test_there_and_back_again_leaves_one_revision_and_its_plan(
    kubectl: Kubectl, operator: Any, example: Example
) -> None:
    kubectl.apply(example())
    settled(kubectl)
    (first,) = revisions(kubectl)
    kubectl.apply(example(**{"spec.decode.parallelism.tensor": 8}))
    # Nothing of the first revision ever served, so it goes as soon as there is another.
    eventually("the second revision alone", lambda: len(revisions(kubectl)) == 1 and revisions(kubectl) != {first})
    kubectl.apply(example())
    eventually("the first revision alone", lambda: revisions(kubectl) == {first})
    settled(kubectl)
    assert len(kubectl.list("configmaps", OURS)) == 2


def test_plans_do_not_pile_up(kubectl: Kubectl, operator: Any, example: Example) -> None:
    for tensor in (1, 2, 4, 8, 16):
        kubectl.apply(example(**{"spec.decode.parallelism.tensor": tensor}))
        reason(kubectl, "PlanReady", "Proven")
    eventually("three plans", lambda: len(kubectl.list("configmaps", OURS)) == 3)
    status = (kubectl.get("dd", "llama") or {})["status"]
    names = {item["metadata"]["name"] for item in kubectl.list("configmaps", OURS)}
    assert status["plan"]["configMaps"][0] in names


def test_what_others_change_is_mended(kubectl: Kubectl, operator: Any, example: Example) -> None:
    kubectl.apply(example())
    settled(kubectl)
    name = next(item["metadata"]["name"] for item in kubectl.list("deployments", OURS) if "decode" in str(item))
    kubectl.run("scale", "deployment", name, "--replicas=5")
    kubectl.run("set", "env", f"deployment/{name}", "-c", "disagg-agent", "DISAGG_ROLE=prefill")

    def mended() -> bool:
        item = kubectl.get("deployment", name) or {}
        agent = item["spec"]["template"]["spec"]["initContainers"][0]
        role = next(entry for entry in agent["env"] if entry["name"] == "DISAGG_ROLE")
        return bool(item["spec"]["replicas"] == 1 and role["value"] == "decode")

    eventually("replicas and environment are as declared", mended)
    kubectl.run("delete", "deployment", name, "--wait=false")
    eventually("the Deployment is back", lambda: kubectl.get("deployment", name))
    (plan,) = kubectl.list("configmaps", OURS)
    kubectl.run("delete", "configmap", plan["metadata"]["name"])
    eventually("the plan is back", lambda: kubectl.get("configmap", plan["metadata"]["name"]))


def test_an_object_of_somebody_else_is_left_alone(
    kubectl: Kubectl, stopped_operator: Any, example: Example, tmp_path: Path
) -> None:
    name = printed_plan(example(), tmp_path)["metadata"]["name"]
    kubectl.run("create", "configmap", name, "--from-literal=mine=1")
    stopped_operator.start()
    kubectl.apply(example())
    refused = reason(kubectl, "Ready", "NameConflict")
    assert name in refused["message"]
    assert (kubectl.get("configmap", name) or {})["data"] == {"mine": "1"}
    assert kubectl.list("deployments") == []
    kubectl.run("delete", "configmap", name)
    settled(kubectl)


def test_config_from_a_config_map_that_comes_later(kubectl: Kubectl, operator: Any, example: Example) -> None:
    document = example()
    config = document["spec"]["model"].pop("config")
    document["spec"]["model"]["configFrom"] = {"configMapKeyRef": {"name": "model", "key": "config.json"}}
    kubectl.apply(document)
    assert "ConfigMap 'model' does not exist" in reason(kubectl, "SpecValid", "ConfigNotFound")["message"]
    kubectl.run("create", "configmap", "model", f"--from-literal=config.json={json.dumps(config)}")
    settled(kubectl)


def test_deleting_a_resource_takes_its_children(kubectl: Kubectl, operator: Any, example: Example) -> None:
    kubectl.apply(example())
    settled(kubectl)
    operator.end(signal.SIGKILL)
    kubectl.run("delete", "dd", "llama", "--timeout=20s")
    eventually("no child is left", lambda: not kubectl.list("deployments,configmaps,pods,replicasets", OURS))


def test_a_namespace_goes_while_the_operator_is_down(kubectl: Kubectl, operator: Any, example: Example) -> None:
    kubectl.apply(example())
    settled(kubectl)
    operator.end(signal.SIGKILL)
    kubectl.run("delete", "namespace", kubectl.namespace, "--timeout=60s")


def test_the_api_server_restarts_under_load(
    kubectl: Kubectl, operator: Any, example: Example, control_plane: ControlPlane
) -> None:
    kubectl.apply(*(example(f"llama-{index}") for index in range(5)))
    control_plane.kill("kube-apiserver")
    control_plane.start("kube-apiserver")
    control_plane.wait_ready()
    kubectl.apply(*(example(f"llama-{index}") for index in range(5, 10)))
    for index in range(10):
        reason(kubectl, "Ready", "ReplicasStarting", f"llama-{index}")
    assert operator.process.poll() is None
    kubectl.apply(example("llama-0", **{"spec.decode.replicas": 3}))
    eventually(
        "the operator still follows changes",
        lambda: ((kubectl.get("dd", "llama-0") or {}).get("status") or {})["roles"]["decode"]["desired"] == 3,
    )


def test_a_cluster_without_the_resource_is_waited_for(
    control_plane: ControlPlane, stopped_operator: Any, kubectl: Kubectl, example: Example
) -> None:
    kubectl.run("delete", "crd", CRD, "--timeout=60s")
    stopped_operator.start()
    eventually("the operator says what is missing", lambda: "disagg crds" in stopped_operator.log.read_text())
    assert stopped_operator.process.poll() is None
    kubectl.run("apply", "-f", str(ROOT / "crds"))
    kubectl.run("wait", "--for=condition=Established", f"crd/{CRD}", "--timeout=30s")
    eventually("the resource is served", lambda: kubectl.call("get", "dd").code == 0)
    kubectl.apply(example())
    settled(kubectl)


def test_what_keeps_pods_from_coming_up_is_the_reason(kubectl: Kubectl, operator: Any, example: Example) -> None:
    kubectl.run("create", "quota", "none", "--hard=pods=0")
    eventually("the quota counts", lambda: (kubectl.get("resourcequota", "none") or {})["status"].get("used"))
    kubectl.apply(example())
    found = reason(kubectl, "Ready", "FailedCreate")
    assert "0 of 1 replicas are ready" in found["message"]
    assert "exceeded quota" in found["message"]
    line = kubectl.run("get", "dd", "llama").splitlines()[1]
    assert "FailedCreate" in line
    eventually(
        "a warning event", lambda: [event for event in kubectl.list("events") if event["reason"] == "FailedCreate"
                                    and event["involvedObject"]["kind"] == "DisaggDeployment"]
    )  # fmt: skip
    kubectl.run("delete", "quota", "none")
    settled(kubectl)


@pytest.mark.parametrize(
    ("container", "told"),
    [
        ({"ports": [{"containerPort": 99999}]}, "containerPort"),
        ({"imagePullPolcy": "Always"}, "imagePullPolcy"),
        ({"resources": {"limits": {"cpu": "much"}}}, "cpu"),
    ],
)
def test_a_pod_template_that_the_api_server_refuses_is_said_with_its_words(
    kubectl: Kubectl, operator: Any, example: Example, container: dict[str, Any], told: str
) -> None:
    template = {"spec": {"containers": [{"name": "engine", "image": "engine:1", **container}]}}
    kubectl.apply(example(**{"spec.prefill.template": template}))
    found = reason(kubectl, "Ready", "ApplyFailed")
    assert told in found["message"] or "quantities must match" in found["message"]
    assert "llama-prefill" in found["message"]
    kubectl.apply(example())
    settled(kubectl)
