"""Reading deployment files: YAML that may hold several documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from disagg_operator.constants import KIND
from disagg_operator.planning import ConfigMaps
from disagg_operator.reconcile import Snapshot
from disagg_operator.types import parse_deployment


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
        names = [str((document.get("metadata") or {}).get("name")) for document in self.deployments]
        if name is None:
            if len(names) != 1:
                raise UsageError(f"the file holds the deployments {', '.join(names)}: choose one with --name")
            return Snapshot(parse_deployment(self.deployments[0]), self.config_maps)
        if name not in names:
            raise UsageError(f"the file has no deployment {name!r}, it has {', '.join(names)}")
        return Snapshot(parse_deployment(self.deployments[names.index(name)]), self.config_maps)


def read_deployments(path: Path) -> DeploymentFile:
    """Read a file; documents of other kinds than deployments and ConfigMaps are passed over.

    Raises:
        UsageError: it cannot be read, is not YAML, or holds no deployment.
    """
    try:
        documents = list(yaml.safe_load_all(path.read_text()))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}") from error
    objects = [document for document in documents if isinstance(document, dict)]
    deployments = tuple(document for document in objects if document.get("kind") == KIND)
    if not deployments:
        kinds = ", ".join(str(document.get("kind")) for document in objects) or "nothing"
        raise UsageError(f"{path} holds no {KIND} ({kinds} found)")
    maps = {
        str((document.get("metadata") or {}).get("name")): dict(document.get("data") or {})
        for document in objects
        if document.get("kind") == "ConfigMap"
    }
    return DeploymentFile(deployments, maps)
