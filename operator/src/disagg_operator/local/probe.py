"""Starts one real engine with the probe in place of the connector, and waits for the files of its ranks."""

from __future__ import annotations

import asyncio
import copy
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg_operator.children import Object, RoleName
from disagg_operator.constants import ENGINE_CONTAINER, LABEL_ROLE
from disagg_operator.engine_flags import check_user_args, probe_args, shape_args
from disagg_operator.local.processes import Container, LocalError, Pod
from disagg_operator.local.up import local_cluster
from disagg_operator.local.vllm_env import ENGINE_ENV
from disagg_operator.local.vllm_pods import find_python, free_port, make_model
from disagg_operator.probe_report import read_rank_files
from disagg_operator.types import DisaggDeployment
from disagg_plan.probe_facts import RankFacts

_POLL_SECONDS = 0.1
_SAY_SECONDS = 20.0
_TAIL_LINES = 20
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Probe:
    """One engine to start.

    Attributes:
        pod: the Deployment that makes its pod.
        container: its engine container; arguments are complete but for the probe's.
        timeout: seconds until every rank must have written.
        state: where the log and the ranks' files go.
    """

    pod: Object
    container: Object
    timeout: float
    state: Path


def declared_engine(
    deployment: DisaggDeployment, role: RoleName, further: Sequence[str], timeout: float, state: Path
) -> Probe:
    """The engine of one role, as its pods would start it.

    Raises:
        Refusal: `FlagConflict`, an argument of the container sets what the spec decides.
    """
    spec = deployment.spec
    check_user_args(spec)
    template = copy.deepcopy(spec.role(role).template)
    engine = next(item for item in template["spec"]["containers"] if item["name"] == ENGINE_CONTAINER)
    own = [str(word) for word in engine.get("args") or []]
    engine["args"] = [*own, *shape_args(spec, role), *further]
    return Probe(_deployment(f"{deployment.metadata.name}-{role}", role, template), engine, timeout, state)


def plain_engine(arguments: Sequence[str], timeout: float, state: Path) -> Probe:
    """An engine of nothing but these arguments."""
    return Probe(
        _deployment("engine", "prefill", {"spec": {}}),
        {"name": ENGINE_CONTAINER, "args": list(arguments)},
        timeout,
        state,
    )


def _deployment(name: str, role: str, template: Object) -> Object:
    template.setdefault("metadata", {}).setdefault("labels", {})[LABEL_ROLE] = role
    return {"kind": "Deployment", "metadata": {"name": name}, "spec": {"replicas": 1, "template": template}}


async def probe_engine(probe: Probe, line: Callable[[str], None]) -> dict[str, RankFacts]:
    """Start an engine, wait until every rank has written, and end all its processes.

    Args:
        line: shows what goes on.

    Returns:
        Facts of all ranks by file.

    Raises:
        LocalError: vLLM is not installed, or the engine ended or took too long; with the end of its log.
        FormatError: a rank wrote what cannot be read.
    """
    python = find_python()
    async with local_cluster(probe.state, grace=_GRACE_SECONDS) as cluster:
        (pod,) = cluster.create_pods(probe.pod)
        await _place_model(python, pod, cluster.scratch)
        output = probe.state / "ranks"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        port = str(free_port())
        arguments = [*probe.container["args"], *probe_args(str(output))]
        described = {
            **probe.container,
            "command": [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", port],
            "args": arguments,
        }
        container = await cluster.start(pod, described, ENGINE_ENV)
        line(f"starting the engine; its log is {container.log}")
        files = await _wait(output, container, probe.timeout, line)
        line("every rank has written; ending the engine")
    return files


async def _place_model(python: Path, pod: Pod, scratch: Path) -> None:
    """As in local mode, a volume `model` holds the tiny model of random weights."""
    if "model" in pod.volumes:
        model = await make_model(python, scratch)
        (pod.volumes["model"] / model.name).symlink_to(model)


async def _wait(
    output: Path, container: Container, timeout: float, line: Callable[[str], None]
) -> dict[str, RankFacts]:
    started = said = time.monotonic()
    while True:
        files = read_rank_files(output)
        expected = {facts.tensor * facts.pipeline for facts in files.values()}
        if expected and len(files) >= max(expected):
            return files
        now = time.monotonic()
        missing = f"{len(files)} of {max(expected)} ranks have written" if expected else "no rank has written"
        if container.process.returncode is not None:
            raise LocalError(
                f"the engine ended with {container.process.returncode} while starting, {missing}\n"
                f"{container.tail(_TAIL_LINES)}"
            )
        if now - started > timeout:
            raise LocalError(f"{missing} within {timeout:.0f} s\n{container.tail(_TAIL_LINES)}")
        if now - said > _SAY_SECONDS:
            said = now
            line(f"{missing} after {now - started:.0f} s")
        await asyncio.sleep(_POLL_SECONDS)
