"""Child objects of a deployment: pure functions from spec and plan to Kubernetes objects.

A `Site` says what differs between a cluster and one machine: addresses and commands. Everything else is the same
object, applied by the API server or by local processes.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from disagg_operator.constants import (
    AGENT_CONTAINER,
    ANNOTATION_COMPAT_DIGEST,
    ANNOTATION_INPUTS_DIGEST,
    ANNOTATION_PLAN_DIGEST,
    ANNOTATION_RENDERED_DIGEST,
    API_VERSION,
    ENGINE_CONTAINER,
    KIND,
    LABEL_DEPLOYMENT,
    LABEL_MANAGED_BY,
    LABEL_PLAN,
    LABEL_REVISION,
    LABEL_ROLE,
    MANAGED_BY,
)
from disagg_operator.describe import text_summary
from disagg_operator.engine_flags import engine_args
from disagg_operator.types import DisaggDeployment
from disagg_plan import canonical, wire

Object = dict[str, Any]
RoleName = Literal["prefill", "decode"]
ROLES: tuple[RoleName, ...] = ("prefill", "decode")

RUN_DIR = "/run/disagg"
PLAN_DIR = "/etc/disagg/plan"
_SHORT_DIGEST = 10
_LONGEST_NAME = 63


@dataclass(frozen=True)
class Site:
    """Where pods run.

    Attributes:
        host: env entry with the pod's address.
        agent_http: where the agent serves HTTP.
        engine_http: where the engine serves HTTP.
        side_port: port of the side channel; 0 lets the system choose.
    """

    host: Object
    agent_http: str
    engine_http: str
    side_port: int


CLUSTER = Site(
    host={"name": "DISAGG_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    agent_http="0.0.0.0:9410",
    engine_http="0.0.0.0:8000",
    side_port=9411,
)

LOCAL = Site(
    host={"name": "DISAGG_HOST", "value": "127.0.0.1"},
    agent_http=f"unix:{RUN_DIR}/agent-http.sock",
    engine_http=f"unix:{RUN_DIR}/engine-http.sock",
    side_port=0,
)


def short(digest: str) -> str:
    """First hex digits of a digest, as labels and names carry it."""
    return digest.removeprefix("sha256:")[:_SHORT_DIGEST]


def child_name(deployment: DisaggDeployment, suffix: str) -> str:
    """Name of a child: at most 63 characters, so that it fits a label; long names are cut and hashed."""
    name = f"{deployment.metadata.name}-{suffix}"
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(deployment.metadata.name.encode()).hexdigest()[:8]
    kept = deployment.metadata.name[: _LONGEST_NAME - len(suffix) - len(digest) - 2]
    return f"{kept.rstrip('-')}-{digest}-{suffix}"


def plan_name(deployment: DisaggDeployment, plan: wire.Plan) -> str:
    """Name of the ConfigMap that publishes a plan."""
    return child_name(deployment, f"plan-{short(plan.digest)}")


def plan_config_map(deployment: DisaggDeployment, plan: wire.Plan, inputs: str) -> Object:
    """The immutable, content-addressed ConfigMap that publishes a plan.

    Args:
        inputs: digest of what the plan was made from; a planner of another version finds the plan by it.
    """
    metadata = _metadata(deployment, plan_name(deployment, plan), plan)
    metadata["annotations"] = {
        ANNOTATION_PLAN_DIGEST: plan.digest,
        ANNOTATION_COMPAT_DIGEST: plan.compat.digest,
        ANNOTATION_INPUTS_DIGEST: inputs,
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": {"plan.json": wire.encode(plan).decode(), "summary.txt": text_summary(plan)},
    }


def role_deployment(deployment: DisaggDeployment, plan: wire.Plan, role: RoleName, revision: str, site: Site) -> Object:
    """The Deployment of one role and revision: one pod per replica."""
    declared = deployment.spec.role(role)
    template = pod_template(deployment, plan, role, site)
    labels = {LABEL_DEPLOYMENT: deployment.metadata.name, LABEL_ROLE: role, LABEL_REVISION: revision}
    template["metadata"]["labels"] |= labels
    metadata = _metadata(deployment, child_name(deployment, f"{role}-{revision}"), plan)
    metadata["labels"] |= labels
    metadata["annotations"] = {
        ANNOTATION_PLAN_DIGEST: plan.digest,
        ANNOTATION_RENDERED_DIGEST: _digest(template)[:_SHORT_DIGEST],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {"replicas": declared.replicas, "selector": {"matchLabels": labels}, "template": template},
    }


def revision_digest(deployment: DisaggDeployment, plan: wire.Plan) -> str:
    """Name of a revision: the plan and what the user says of its pods, replica counts left out.

    It is made from what is declared and not from what is rendered: an operator that renders the same declaration
    otherwise than the one before it must find the pods that run, and restart none.
    """
    spec = deployment.spec
    declared = {
        "plan": plan.digest,
        "engine": spec.engine.model_dump(mode="json", exclude_defaults=True),
        "agent": spec.agent.model_dump(mode="json", exclude_defaults=True),
        "transport": spec.transport.model_dump(mode="json", exclude_defaults=True),
        "templates": {role: spec.role(role).template for role in ROLES},
    }
    return _digest(declared)[:_SHORT_DIGEST]


def _digest(value: Any) -> str:
    # Templates are the user's objects and may hold what canonical plans may not, such as null.
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def pod_template(deployment: DisaggDeployment, plan: wire.Plan, role: RoleName, site: Site) -> Object:
    """The user's pod template with agent, plan and engine settings added."""
    spec = deployment.spec
    template = copy.deepcopy(spec.role(role).template)
    metadata = template.setdefault("metadata", {})
    metadata.setdefault("labels", {})[LABEL_PLAN] = short(plan.digest)
    metadata.setdefault("annotations", {})[ANNOTATION_PLAN_DIGEST] = plan.digest
    pod = template["spec"]
    pod["automountServiceAccountToken"] = False
    fabric = _fabric_env(spec.transport.protocol)
    mount = {"name": "disagg-run", "mountPath": RUN_DIR}
    pod.setdefault("initContainers", []).append(
        {
            "name": AGENT_CONTAINER,
            "image": spec.agent.image,
            "restartPolicy": "Always",
            "command": ["disagg-agent"],
            "env": [*_agent_env(deployment, plan, role, site), *fabric],
            "volumeMounts": [mount, {"name": "disagg-plan", "mountPath": PLAN_DIR, "readOnly": True}],
        }
    )
    for container in pod["containers"]:
        if container["name"] == ENGINE_CONTAINER:
            arguments = engine_args(spec, role)
            if arguments:
                container["args"] = [*(container.get("args") or []), *arguments]
            container.setdefault("env", []).extend([*_engine_env(deployment, plan, role, site), *fabric])
            container.setdefault("volumeMounts", []).append(mount)
    pod.setdefault("volumes", []).extend(
        [
            {"name": "disagg-run", "emptyDir": {}},
            {
                "name": "disagg-plan",
                "configMap": {"name": plan_name(deployment, plan)},
            },
        ]
    )
    return template


def mover_placement(deployment: DisaggDeployment) -> Literal["auto", "agent", "engine"]:
    """Where movers live. `Auto` is decided by each engine rank, which alone knows the kind of its memory."""
    placements: dict[str, Literal["auto", "agent", "engine"]] = {
        "Auto": "auto",
        "Sidecar": "agent",
        "InEngine": "engine",
    }
    return placements[deployment.spec.agent.placement]


def expected_factors(plan: wire.Plan, role: RoleName) -> dict[str, Any]:
    """Compatibility factors that an engine of a role is to report, as declared."""
    factors = {key: value for key, value in plan.compat.factors.items() if isinstance(value, str) and key != "groups"}
    return {**factors, **plan.compat.factors[role]}


def _agent_env(deployment: DisaggDeployment, plan: wire.Plan, role: RoleName, site: Site) -> list[Object]:
    transport = deployment.spec.transport
    return [
        {"name": "DISAGG_PLAN", "value": f"{PLAN_DIR}/plan.json"},
        {"name": "DISAGG_PLAN_DIGEST", "value": plan.digest},
        {"name": "DISAGG_ROLE", "value": role},
        {"name": "DISAGG_REPLICA", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "DISAGG_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        site.host,
        {"name": "DISAGG_PORT", "value": str(site.side_port)},
        {"name": "DISAGG_SOCKET", "value": f"{RUN_DIR}/agent.sock"},
        {"name": "DISAGG_HTTP", "value": site.agent_http},
        {"name": "DISAGG_LEASE_SECONDS", "value": str(transport.lease_seconds)},
        {"name": "DISAGG_DEADLINE_SECONDS", "value": str(transport.deadline_seconds)},
    ]


def _engine_env(deployment: DisaggDeployment, plan: wire.Plan, role: RoleName, site: Site) -> list[Object]:
    return [
        {"name": "DISAGG_SOCKET", "value": f"{RUN_DIR}/agent.sock"},
        {"name": "DISAGG_ENGINE_HTTP", "value": site.engine_http},
        {"name": "DISAGG_ENGINE_FACTORS", "value": canonical.dumps(expected_factors(plan, role)).decode()},
        {"name": "DISAGG_MOVER_PLACEMENT", "value": mover_placement(deployment)},
    ]


def _fabric_env(protocol: str) -> list[Object]:
    """UCX settings of a transport; they must be the same wherever the mover lives."""
    if protocol == "TCP":
        return [{"name": "UCX_TLS", "value": "tcp"}]
    if protocol == "SharedMemory":
        # tcp stays in: without an active-message transport that reports peer failure, UCX makes no endpoint.
        return [{"name": "UCX_TLS", "value": "cma,sysv,posix,self,tcp"}]
    return []


def _metadata(deployment: DisaggDeployment, name: str, plan: wire.Plan) -> Object:
    metadata: Object = {
        "name": name,
        "namespace": deployment.metadata.namespace,
        "labels": {
            LABEL_MANAGED_BY: MANAGED_BY,
            LABEL_DEPLOYMENT: deployment.metadata.name,
            LABEL_PLAN: short(plan.digest),
        },
    }
    if deployment.metadata.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": deployment.metadata.name,
                "uid": deployment.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return metadata
