"""The engine's own flags that we render, and the refusal of user arguments that set the same thing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from disagg_operator.constants import ENGINE_CONTAINER
from disagg_operator.types import DeploymentSpec
from disagg_plan.errors import Refusal

CONNECTOR = "DisaggConnector"
CONNECTOR_MODULE = "disagg_agent.engines.vllm.connector"
PROBE = "DisaggProbe"
PROBE_MODULE = "disagg_agent.engines.vllm.probe"

_ALIASES = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}


def engine_args(spec: DeploymentSpec, role: Literal["prefill", "decode"]) -> list[str]:
    """Arguments that the spec decides; empty for engines that take none."""
    if spec.engine.name != "vllm":
        return []
    transfer = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_load_failure_policy": spec.engine.load_failure_policy,
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
    }
    return [*shape_args(spec, role), "--kv-transfer-config", json.dumps(transfer, sort_keys=True)]


def probe_args(output: str) -> list[str]:
    """Arguments that make an engine write what its cache is like, instead of moving it.

    Args:
        output: folder for the ranks' files.
    """
    transfer = {
        "kv_connector": PROBE,
        "kv_connector_module_path": PROBE_MODULE,
        "kv_connector_extra_config": {"output": output},
        "kv_role": "kv_both",
    }
    return ["--kv-transfer-config", json.dumps(transfer, sort_keys=True)]


def shape_args(spec: DeploymentSpec, role: Literal["prefill", "decode"]) -> list[str]:
    """Arguments that decide what a vLLM engine's cache looks like."""
    declared = spec.role(role).parallelism
    return [
        "--served-model-name",
        spec.model.name,
        "--tensor-parallel-size",
        str(declared.tensor),
        "--pipeline-parallel-size",
        str(declared.pipeline),
        "--block-size",
        str(spec.kv_cache_of(role).block_size),
    ]


def check_user_args(spec: DeploymentSpec) -> None:
    """Refuse arguments of the engine container that the spec decides.

    Raises:
        Refusal: `FlagConflict`, with the argument and the field that decides it.
    """
    for role in ("prefill", "decode"):
        rendered = engine_args(spec, "prefill" if role == "prefill" else "decode")
        owned = {flag for flag in rendered if flag.startswith("--")}
        for container in spec.role(role).template["spec"]["containers"]:
            if container.get("name") == ENGINE_CONTAINER:
                where = f"spec.{role}.template.spec.containers[{ENGINE_CONTAINER}].args"
                _check(role, where, owned, [*(container.get("command") or []), *(container.get("args") or [])])


def check_extra_args(spec: DeploymentSpec, where: str, words: Sequence[str]) -> None:
    """Refuse further arguments, given elsewhere than in the spec, that the spec decides.

    Raises:
        Refusal: `FlagConflict`, as above.
    """
    owned = {flag for flag in engine_args(spec, "prefill") if flag.startswith("--")}
    _check("prefill", where, owned, words)


def _check(role: str, where: str, owned: set[str], words: Sequence[object]) -> None:
    fields = {
        "--served-model-name": "spec.model.name",
        "--tensor-parallel-size": f"spec.{role}.parallelism.tensor",
        "--pipeline-parallel-size": f"spec.{role}.parallelism.pipeline",
        "--block-size": "spec.kvCache.blockSize",
        "--kv-transfer-config": "spec.transport and spec.agent",
    }
    for word in words:
        flag = str(word).split("=")[0]
        name = _ALIASES.get(flag, flag.replace("_", "-"))
        if name in owned:
            raise Refusal(
                "FlagConflict",
                where,
                f"argument {word!r} sets what {fields[name]} decides",
                f"Remove {flag} and set {fields[name]}",
            )
