"""Deployments to decide about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg_operator.types import DisaggDeployment, parse_deployment

ROOT = Path(__file__).parents[3]


def set_path(document: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        document = document.setdefault(key, {})
    if value is None:
        document.pop(last, None)
    else:
        document[last] = value


@pytest.fixture
def example() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "examples" / "llama-3.1-8b.yaml").read_text()))


@pytest.fixture
def changed(example: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The example with some fields set (or removed, with None), by dotted path."""

    def change(fields: dict[str, Any]) -> dict[str, Any]:
        for path, value in fields.items():
            set_path(example, path, value)
        return example

    return change


@pytest.fixture
def deployment(example: dict[str, Any]) -> DisaggDeployment:
    return parse_deployment(example)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare text with a golden file; DISAGG_UPDATE_GOLDEN=1 rewrites it."""
    import os

    def compare(name: str, text: str) -> None:
        path = ROOT / "tests" / "golden" / name
        if os.environ.get("DISAGG_UPDATE_GOLDEN") == "1":
            path.write_text(text)
        assert text == path.read_text(), f"{path.name} differs; DISAGG_UPDATE_GOLDEN=1 rewrites it"

    return compare
