"""What we read of a user's pod template, judged before anything is rendered from it.

The full schema of a pod is the API server's to judge (a server-side dry run does that on a cluster). Here stands what
rendering and local mode rely on, so that a mistake ends in a sentence with its path and not in a failure of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic.config import JsonDict

from disagg_operator.constants import AGENT_CONTAINER, ENGINE_CONTAINER

RESERVED_VOLUMES = ("disagg-run", "disagg-plan")

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_DEPTH = 40
_MAX_NAMED = 256
"""Entries of one list; pods have a few. API servers want a bound where a rule looks through a list."""


def _named_schema() -> JsonDict:
    name: JsonDict = {"type": "string", "minLength": 1, "maxLength": 63, "pattern": f"^{_NAME.pattern}$"}
    item: JsonDict = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": name},
        "x-kubernetes-preserve-unknown-fields": True,
    }
    return {
        "type": "array",
        "maxItems": _MAX_NAMED,
        "items": item,
        # As in a pod: names are unique, and who applies one container owns that one.
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
    }


TEMPLATE_SCHEMA: JsonDict = {
    "type": "object",
    "description": "Pod template (`PodTemplateSpec`) with exactly one container named `engine`. Only names are judged "
    "here, the rest when the pod is made.",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "properties": {key: _named_schema() for key in ("containers", "initContainers", "volumes")},
            "x-kubernetes-preserve-unknown-fields": True,
        }
    },
    "x-kubernetes-preserve-unknown-fields": True,
    "x-kubernetes-validations": [
        {
            "rule": f"self.spec.containers.exists_one(c, c.name == '{ENGINE_CONTAINER}')",
            "messageExpression": f"\"exactly one container named '{ENGINE_CONTAINER}' is needed, has %s\""
            ".format([self.spec.containers.map(c, c.name)])",
            # Where the names together are longer than an API server lets a message be.
            "message": f"exactly one container named '{ENGINE_CONTAINER}' is needed",
            "fieldPath": ".spec.containers",
        },
        {
            "rule": f"!self.spec.containers.exists(c, c.name == '{AGENT_CONTAINER}') && "
            f"!(has(self.spec.initContainers) && self.spec.initContainers.exists(c, c.name == '{AGENT_CONTAINER}'))",
            "message": f"the container name '{AGENT_CONTAINER}' is ours, choose another",
            "fieldPath": ".spec",
        },
        {
            "rule": f"!(has(self.spec.volumes) && self.spec.volumes.exists(v, v.name in {list(RESERVED_VOLUMES)}))",
            "message": f"the names {' and '.join(map(repr, RESERVED_VOLUMES))} are ours, choose another",
            "fieldPath": ".spec.volumes",
        },
    ],
}
"""What an API server judges of a template: all that `check_template` judges by names."""


def check_template(template: Any) -> dict[str, Any]:
    """A template without its nulls (Kubernetes takes them as absent), if it can be rendered from.

    Raises:
        ValueError: the path of the first thing that is wrong, and what it should be.
    """
    cleaned = _clean(template, "template", 0)
    if not isinstance(cleaned, dict):
        raise ValueError(f"template is {_kind(template)}, not an object")
    metadata = _object(cleaned, "metadata", "template")
    for name in ("labels", "annotations"):
        for key, value in _object(metadata, name, "template.metadata").items():
            if not isinstance(value, str):
                raise ValueError(f"template.metadata.{name}.{key} is {_kind(value)}, not a string: put it in quotes")
    spec = _object(cleaned, "spec", "template")
    volumes = _named(spec, "volumes", "template.spec")
    containers = _named(spec, "containers", "template.spec")
    sidecars = _named(spec, "initContainers", "template.spec")
    for name in RESERVED_VOLUMES:
        if name in volumes:
            raise ValueError(f"template.spec.volumes: the name {name!r} is ours, choose another")
    if AGENT_CONTAINER in containers or AGENT_CONTAINER in sidecars:
        raise ValueError(f"template.spec: the container name {AGENT_CONTAINER!r} is ours, choose another")
    if ENGINE_CONTAINER not in containers:
        raise ValueError(
            f"template.spec.containers needs exactly one container named {ENGINE_CONTAINER!r}, has {sorted(containers)}"
        )
    for kind, found in (("containers", containers), ("initContainers", sidecars)):
        for name, container in found.items():
            _check_container(container, f"template.spec.{kind}[{name}]", volumes)
    return cleaned


def _check_container(container: Mapping[str, Any], path: str, volumes: Mapping[str, Any]) -> None:
    for key in ("command", "args"):
        words = container.get(key, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{path}.{key} is not a list of strings: numbers and booleans need quotes")
    for index, entry in enumerate(_list(container, "env", path)):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
            raise ValueError(f"{path}.env[{index}] has no name")
        value = entry.get("value", "")
        if not isinstance(value, str):
            raise ValueError(f"{path}.env[{entry['name']}].value is {_kind(value)}, not a string: put it in quotes")
        if "\0" in entry["name"] + value or "=" in entry["name"]:
            raise ValueError(f"{path}.env[{index}] has a character that no environment can hold")
        if not isinstance(entry.get("valueFrom", {}), dict):
            raise ValueError(f"{path}.env[{entry['name']}].valueFrom is not an object")
    for index, mount in enumerate(_list(container, "volumeMounts", path)):
        if not isinstance(mount, dict) or not isinstance(mount.get("mountPath"), str) or not mount["mountPath"]:
            raise ValueError(f"{path}.volumeMounts[{index}] has no mountPath")
        if mount.get("name") not in volumes:
            raise ValueError(f"{path}.volumeMounts[{index}] names volume {mount.get('name')!r}, which is not declared")


def _clean(value: Any, path: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{path} is nested too deeply")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{path} has the key {key!r}, which is not a string")
        return {key: _clean(item, f"{path}.{key}", depth + 1) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_clean(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"{path} is {_kind(value)}, which no Kubernetes object holds")


def _object(parent: Mapping[str, Any], key: str, path: str) -> dict[str, Any]:
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{path}.{key} is {_kind(value)}, not an object")
    return value


def _list(parent: Mapping[str, Any], key: str, path: str) -> list[Any]:
    value = parent.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{path}.{key} is {_kind(value)}, not a list")
    return value


def _named(parent: Mapping[str, Any], key: str, path: str) -> dict[str, dict[str, Any]]:
    """Items of a list by their names, which must be labels and unique."""
    found: dict[str, dict[str, Any]] = {}
    items = _list(parent, key, path)
    if len(items) > _MAX_NAMED:
        raise ValueError(f"{path}.{key} has {len(items)} entries, at most {_MAX_NAMED} are taken")
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(f"{path}.{key}[{index}] is {_kind(item)}, not an object")
        name = item.get("name")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(
                f"{path}.{key}[{index}] has the name {name!r}; lower-case letters, digits and dashes are needed"
            )
        if name in found:
            raise ValueError(f"{path}.{key} has {name!r} twice")
        found[name] = item
    return found


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
