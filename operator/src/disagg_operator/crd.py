"""The CustomResourceDefinition of `DisaggDeployment`, made from the pydantic types: pure."""

from __future__ import annotations

from typing import Any

from disagg_operator.constants import API_VERSION, GROUP, KIND
from disagg_operator.crd_schema import Schema, structural_schema
from disagg_operator.status_types import Status
from disagg_operator.types import DeploymentSpec, Metadata
from disagg_operator.yaml_text import dump

VERSION = API_VERSION.removeprefix(f"{GROUP}/")
PLURAL = "disaggdeployments"
SINGULAR = "disaggdeployment"
SHORT_NAME = "dd"
NAME = f"{PLURAL}.{GROUP}"

_READY = '.status.conditions[?(@.type=="Ready")]'
_COLUMNS = (
    ("Prefill", ".status.roles.prefill.summary", "Ready and desired replicas of prefill."),
    ("Decode", ".status.roles.decode.summary", "Ready and desired replicas of decode."),
    ("TP", ".status.parallelism", "Tensor-parallel sizes of prefill and decode."),
    ("Transport", ".status.transfer.protocolObserved", "How bytes move, as agents report it."),
    ("Plan", ".status.plan.shortDigest", "First digits of the plan's digest, as labels carry it."),
    ("Ready", f"{_READY}.status", "Whether requests can be served."),
    ("Reason", f"{_READY}.reason", "Why, or why not."),
)
_HEADER = "# Written by `disagg crds` from the operator's types: change those.\n"


def custom_resource_definition() -> dict[str, Any]:
    """The object as an API server takes it.

    Raises:
        SchemaError: a type says what no structural schema can.
    """
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": GROUP,
            # No category: `kubectl get all` is for what clusters have of their own.
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _root()},
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _columns(),
                }
            ],
        },
    }


def crd_yaml() -> str:
    """The same as the text of `crds/`."""
    return _HEADER + dump([custom_resource_definition()])


def _root() -> Schema:
    # Defaults stay in the schema: the API server then stores them with the object, so that `kubectl get -o yaml` shows
    # what holds, rules see whole objects, and an operator whose defaults are others changes nothing that is deployed.
    spec = structural_schema(DeploymentSpec.model_json_schema(by_alias=True), "spec")
    status = structural_schema(Status.model_json_schema(by_alias=True), "status")
    # Of metadata a schema may only judge the name; apiVersion and kind are the API server's.
    name = structural_schema(Metadata.model_json_schema()["properties"]["name"], "metadata.name")
    return {
        "type": "object",
        "description": "Disaggregated LLM serving: a prefill and a decode side, and how the KV cache moves between.",
        "required": ["spec"],
        "properties": {
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": spec,
            "status": status,
        },
    }


def _columns() -> list[dict[str, Any]]:
    columns = [
        {"name": name, "type": "string", "jsonPath": path, "description": description}
        for name, path, description in _COLUMNS
    ]
    return [*columns, {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}]
