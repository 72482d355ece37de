"""Reading deployment files: YAML that may hold several documents."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg_operator.constants import KIND
from disagg_operator.planning import ConfigMaps
from disagg_operator.reconcile import Snapshot
from disagg_operator.types import parse_deployment
from disagg_operator.yaml_loader import YamlError, load_all


class UsageError(Exception):
    """The command was called with something that it cannot use; exit code 2."""


@dataclass(frozen=True)
class DeploymentFile:
    """The deployments of a file and the ConfigMaps beside them."""

    deployments: tuple[dict[str, Any], ...]
    config_maps: ConfigMaps

    def snapshot(self, name: str | None) -> Snapshot:
        """The deployment of that name, or the only one.

        Raises:
            UsageError: there is none, or a choice is needed.
            Refusal: the document is no valid deployment.
        """
        names = [_name(document) for document in self.deployments]
        if name is None:
            if len(names) != 1:
                raise UsageError(f"the file holds the deployments {', '.join(names)}: choose one with --name")
            return Snapshot(parse_deployment(self.deployments[0]), self.config_maps)
        if name not in names:
            raise UsageError(f"the file has no deployment {name!r}, it has {', '.join(names)}")
        return Snapshot(parse_deployment(self.deployments[names.index(name)]), self.config_maps)


def read_deployments(path: Path) -> DeploymentFile:
    """Read a file, `-` for standard input; documents of other kinds than deployments and ConfigMaps are passed over.

    Raises:
        UsageError: it cannot be read, is not YAML, or holds no deployment.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        documents = load_all(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except YamlError as error:
        raise UsageError(f"{path}: {error}") from error
    objects = [document for document in documents if isinstance(document, dict)]
    deployments = tuple(document for document in objects if document.get("kind") == KIND)
    if not deployments:
        kinds = ", ".join(str(document.get("kind")) for document in objects) or "nothing"
        raise UsageError(f"{path} holds no {KIND} ({kinds} found)")
    names = [_name(document) for document in deployments]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{path} holds two deployments named {name!r}")
    maps = {}
    for document in objects:
        if document.get("kind") == "ConfigMap":
            data = document.get("data") or {}
            if not isinstance(data, dict):
                raise UsageError(f"{path}: data of ConfigMap {_name(document)!r} is not an object")
            maps[_name(document)] = data
    return DeploymentFile(deployments, maps)


def _name(document: dict[str, Any]) -> str:
    metadata = document.get("metadata")
    return str(metadata.get("name")) if isinstance(metadata, dict) else "None"
