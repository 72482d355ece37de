"""The chart: what it renders, and its whole life on a real API server, with the operator under its role alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from rig.binaries import RigError, find
from rig.control_plane import ControlPlane
from rig.gate import Gate
from rig.helm import Helm
from rig.kubectl import Kubectl, eventually

ROOT = Path(__file__).parents[2]
CHART = str(ROOT / "charts" / "disagg-operator")
NAMESPACE = "serving"
EVERYTHING = (
    "deployments,replicasets,configmaps,secrets,services,serviceaccounts,roles,rolebindings,clusterroles,"
    "clusterrolebindings,networkpolicies,leases,customresourcedefinitions,poddisruptionbudgets"
)

PROFILES = {
    "default": [],
    "cluster": ["scope=Cluster", "rbac.aggregate=true", "replicas=2"],
    "closed": ["networkPolicy.enabled=true", "serviceMonitor.enabled=true", "crds.install=false", "image.tag=v9"],
}


def flags(values: list[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    try:
        return Helm(tmp_path / "helm")
    except RigError as error:
        pytest.skip(f"NO HELM, so the chart is not tested: {error}")


@pytest.mark.parametrize("profile", PROFILES)
def test_rendered_objects(helm: Helm, profile: str) -> None:
    text = helm.run("template", "disagg", CHART, *flags(PROFILES[profile]))
    documents = [document for document in yaml.safe_load_all(text) if document["kind"] != "CustomResourceDefinition"]
    rendered = yaml.safe_dump_all(documents, sort_keys=False)
    path = ROOT / "tests" / "golden" / f"chart-{profile}.yaml"
    if os.environ.get("DISAGG_UPDATE_GOLDEN") == "1":
        path.write_text(rendered)
    assert rendered == path.read_text(), f"{path.name} differs; DISAGG_UPDATE_GOLDEN=1 rewrites it"


def test_lint(helm: Helm) -> None:
    assert "0 chart(s) failed" in helm.run("lint", "--strict", CHART)


@pytest.mark.parametrize(
    ("value", "told"),
    [("replicaz=2", "replicaz"), ("scope=Everywhere", "scope"), ("crds.keep=sure", "keep"), ("image.name=x", "name")],
)
def test_a_wrong_value_is_refused(helm: Helm, value: str, told: str) -> None:
    result = helm.call("template", "disagg", CHART, "--set", value)
    assert result.code != 0
    assert told in result.err


def test_the_definition_is_the_generated_one(helm: Helm) -> None:
    text = helm.run("template", "disagg", CHART, "--set", "crds.keep=false")
    (rendered,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "CustomResourceDefinition"]
    generated = yaml.safe_load((ROOT / "crds" / "disaggdeployments.disagg.dev.yaml").read_text())
    assert rendered["spec"] == generated["spec"]
    assert "annotations" not in rendered["metadata"]


@pytest.fixture(scope="module")
def bare_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane of its own: here helm installs the resource's definition."""
    try:
        find("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm")
    except RigError as error:
        pytest.skip(f"NO KUBERNETES, so the chart is not installed: {error}")
    with ControlPlane(tmp_path_factory.mktemp("bare-plane")) as plane:
        Kubectl(plane.kubeconfig).run("create", "namespace", NAMESPACE)
        yield plane


def names(kubectl: Kubectl) -> set[str]:
    """Everything in the namespace and of the cluster but what the control plane makes by itself."""
    found = kubectl.run("get", EVERYTHING, "-o", "name").split()
    return {name for name in found if not any(part in name for part in ("/system:", "kube-", "serviceaccount/default"))}


def test_install_upgrade_rollback_uninstall_leave_nothing(bare_plane: ControlPlane, tmp_path: Path) -> None:
    kubectl = Kubectl(bare_plane.kubeconfig, NAMESPACE)
    helm = Helm(tmp_path / "helm", bare_plane.kubeconfig, NAMESPACE)
    before = names(kubectl)

    def gone_or_left() -> set[str]:
        return names(kubectl) ^ before

    printed = helm.run("install", "disagg", CHART, "--set", "crds.keep=false")
    assert "rollout status deployment/disagg-disagg-operator" in printed
    kubectl.run("wait", "--for=condition=Established", "crd/disaggdeployments.disagg.dev", "--timeout=30s")
    helm.run("upgrade", "disagg", CHART, "--set", "crds.keep=false", "--set", "scope=Cluster")
    assert kubectl.get("clusterrole", f"{NAMESPACE}-disagg-disagg-operator")
    assert kubectl.get("role", "disagg-disagg-operator") is None
    helm.run("rollback", "disagg", "1")
    assert kubectl.get("clusterrole", f"{NAMESPACE}-disagg-disagg-operator") is None
    helm.run("uninstall", "disagg", "--wait")
    eventually("nothing is left", lambda: not gone_or_left())


def test_the_definition_is_kept_by_default(bare_plane: ControlPlane, tmp_path: Path) -> None:
    kubectl = Kubectl(bare_plane.kubeconfig, NAMESPACE)
    helm = Helm(tmp_path / "helm", bare_plane.kubeconfig, NAMESPACE)
    helm.run("install", "disagg", CHART)
    helm.run("uninstall", "disagg", "--wait")
    assert kubectl.get("crd", "disaggdeployments.disagg.dev")
    # A release of the same name takes it over again.
    helm.run("install", "disagg", CHART, "--set", "crds.keep=false")
    helm.run("uninstall", "disagg", "--wait")
    eventually("the definition is gone", lambda: kubectl.get("crd", "disaggdeployments.disagg.dev") is None)


@pytest.fixture
def installed(bare_plane: ControlPlane, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Installs the chart, with values; it goes with the test."""
    helm = Helm(tmp_path / "helm", bare_plane.kubeconfig, NAMESPACE)
    kubectl = Kubectl(bare_plane.kubeconfig, NAMESPACE)

    def install(*values: str) -> None:
        helm.run("install", "disagg", CHART, *flags(["crds.keep=false", *values]))
        eventually("the resource is served", lambda: kubectl.call("get", "dd").code == 0)

    yield install
    helm.call("uninstall", "disagg", "--wait")
    eventually("the definition is gone", lambda: kubectl.get("crd", "disaggdeployments.disagg.dev") is None)


@pytest.mark.parametrize("scope", ["Namespace", "Cluster"])
def test_the_operator_runs_under_the_charts_role_and_uses_all_of_it(
    bare_plane: ControlPlane,
    installed: Callable[..., None],
    tmp_path: Path,
    scope: str,
    start_operator: Callable[..., Any],
    example: Callable[..., dict[str, Any]],
) -> None:
    kubectl = Kubectl(bare_plane.kubeconfig, NAMESPACE)
    installed(f"scope={scope}", "replicas=0")
    token = kubectl.run("create", "token", "disagg-disagg-operator").strip()
    with Gate(bare_plane, tmp_path, token) as gate:
        narrow = ["--namespace", NAMESPACE] if scope == "Namespace" else []
        operator = start_operator(gate.kubeconfig, "--leader-election", NAMESPACE, *narrow)
        operator.start()
        live(kubectl, example)
        # A renewal of the lease, which is an update, comes every two seconds.
        eventually("the lease is renewed", lambda: ("update", "leases") in gate.used)
        kind = "role" if scope == "Namespace" else "clusterrole"
        name = "disagg-disagg-operator" if scope == "Namespace" else f"{NAMESPACE}-disagg-disagg-operator"
        rules = [*(kubectl.get(kind, name) or {})["rules"]]
        rules += (kubectl.get("role", "disagg-disagg-operator-election") or {})["rules"]
        granted = {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
        # The API server asks about finalizers by itself, when an owner is named; nobody requests them.
        granted.remove(("update", "disaggdeployments/finalizers"))
        # Applying what does not exist yet is a patch that takes the right to create.
        granted -= {("create", "configmaps"), ("create", "deployments")}
        used = {(verb, resource) for verb, resource in gate.used if resource}
        assert sorted(used) == sorted(granted)
        assert "forbidden" not in operator.log.read_text().lower()


def live(kubectl: Kubectl, example: Callable[..., dict[str, Any]]) -> None:
    """Create, change, scale what another operator rendered, refuse, clean up old plans and revisions, delete."""

    def status() -> dict[str, Any]:
        item = kubectl.get("dd", "llama") or {"metadata": {}}
        found = dict(item.get("status") or {})
        return found if found.get("observedGeneration") == item["metadata"].get("generation") else {}

    kubectl.apply(example())
    eventually("created", lambda: status().get("plan") and len(kubectl.list("pods")) == 2)
    for tensor in (8, 2, 1, 16):
        kubectl.apply(example(**{"spec.decode.parallelism.tensor": tensor}))
        eventually("the change is seen", lambda tensor=tensor: status().get("parallelism") == f"2->{tensor}")
    eventually("old plans go", lambda: len(kubectl.list("configmaps", "disagg.dev/plan")) == 3)
    (decode,) = kubectl.list("deployments", "disagg.dev/role=decode")
    name = decode["metadata"]["name"]
    kubectl.run("annotate", "deployment", name, "disagg.dev/rendered-digest=0000000000", "--overwrite")
    kubectl.apply(example(**{"spec.decode.parallelism.tensor": 16, "spec.decode.replicas": 2}))
    eventually("scaled", lambda: (kubectl.get("deployment", name) or {})["spec"]["replicas"] == 2)
    annotations = (kubectl.get("deployment", name) or {})["metadata"]["annotations"]
    assert annotations["disagg.dev/rendered-digest"] == "0000000000"
    kubectl.run("delete", "dd", "llama", "--timeout=20s")
    eventually("nothing is left", lambda: not kubectl.list("deployments,configmaps", "disagg.dev/deployment"))
