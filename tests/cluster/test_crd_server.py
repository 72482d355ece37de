"""What a real API server makes of the CustomResourceDefinition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rig.kubectl import Kubectl

ROOT = Path(__file__).parents[2]
Example = Callable[..., dict[str, Any]]

PODS = {"spec": {"containers": [{"name": "engine", "image": "engine:1"}]}}


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_accepted_as_they_are(kubectl: Kubectl, file: Path) -> None:
    assert "created (server dry run)" in kubectl.run("apply", "--dry-run=server", "--validate=strict", "-f", str(file))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"spec.decode.kvCache": {"dtype": "float32"}}, "prefill stores bfloat16, decode float32"),
        ({"spec.model.configFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}, "exclude each other"),
        ({"spec.model.config": None}, "one of config, configFrom and geometry is needed"),
        ({"spec.prefill.parallelism.decodeContext": 2}, "decode context parallelism is not planned yet: use 1"),
        ({"spec.prefill.parallelism.pipelineLayers": ["0-15", "16-31"]}, "one layer range per stage"),
        ({"spec.prefill.parallelism.tensor": 0}, "should be greater than or equal to 1"),
        ({"spec.prefill.template": {"spec": {"containers": [{"name": "main"}]}}}, "container named 'engine'"),
        (
            {"spec.prefill.template.spec.initContainers": [{"name": "disagg-agent"}]},
            "the container name 'disagg-agent' is ours",
        ),
        ({"spec.decode.template.spec.volumes": [{"name": "disagg-run"}]}, "are ours, choose another"),
        ({"spec.engine.loadFailurePolicy": "retry"}, 'Unsupported value: "retry"'),
        ({"spec.transport.protocols": "TCP"}, 'unknown field "spec.transport.protocols"'),
        ({"spec.decode.replicas": -1}, "should be greater than or equal to 0"),
        ({"metadata.name": "x" * 64}, "metadata.name"),
    ],
)
def test_what_one_object_can_tell_is_refused_at_apply(
    kubectl: Kubectl, example: Example, changes: dict[str, Any], told: str
) -> None:
    document = yaml.safe_dump(example(**changes))
    result = kubectl.call("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=document)
    assert result.code == 1
    assert told in result.err


@pytest.mark.parametrize(
    "changes",
    [
        {"spec.prefill.parallelism": {"tensor": 2, "pipeline": 2, "pipelineLayers": ["0-14", "15-31"]}},
        {"spec.prefill.kvCache": {"dtype": "bfloat16"}},
        {"spec.decode.replicas": 0},
        {"metadata.name": "x" * 63},
        {"spec.prefill.template": {**PODS, "metadata": {"labels": {"team": "serving"}}}},
    ],
)
def test_what_can_work_is_accepted(kubectl: Kubectl, example: Example, changes: dict[str, Any]) -> None:
    document = yaml.safe_dump(example(**changes))
    kubectl.run("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=document)
