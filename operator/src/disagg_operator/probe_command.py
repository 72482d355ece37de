"""`disagg probe`: the explicit geometry that a started engine really has."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from disagg_operator.console import emit, progress
from disagg_operator.documents import UsageError
from disagg_operator.invocation import Name, finish, read, refused, usage
from disagg_operator.local.probe import Probe, declared_engine, plain_engine, probe_engine
from disagg_operator.probe_report import make_report, read_rank_files
from disagg_plan.errors import PlanError
from disagg_plan.probe_facts import RankFacts


class ProbeEngine(StrEnum):
    """Engines that can be started to be probed."""

    vllm = "vllm"


class RoleChoice(StrEnum):
    """Which side's engine."""

    prefill = "prefill"
    decode = "decode"


class ProbeOutput(StrEnum):
    """What `disagg probe` prints."""

    yaml = "yaml"
    json = "json"


def probe(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FOLDER | -- ARGUMENTS",
            help="Folder of the rank files that an engine wrote; with --engine, arguments of the engine, after --.",
        ),
    ] = None,
    engine: Annotated[ProbeEngine | None, typer.Option(help="Start this engine here, and probe it.")] = None,
    file: Annotated[
        Path | None, typer.Option("-f", "--file", help="Start it as this deployment declares, - for standard input.")
    ] = None,
    role: Annotated[RoleChoice, typer.Option(help="Which side of the deployment.")] = RoleChoice.prefill,
    name: Name = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until every rank must have written.")] = 600.0,
    state: Annotated[Path | None, typer.Option(help="Where log and rank files go; default .disagg/probe.")] = None,
    output: Annotated[ProbeOutput, typer.Option("-o", "--output", help="Form of the output.")] = ProbeOutput.yaml,
    output_file: Annotated[Path | None, typer.Option(help="Write there instead of to standard output.")] = None,
) -> None:
    """Find the geometry that a started engine really has, for a model or backend that is not known here.

    Prints what to declare under spec (model.geometry, engine, kvCache), why, and whether a known page layout fits, in
    which case nothing of it need be declared. Sees the engine's cache as it is: nothing is guessed, and what a plan
    cannot hold yet is refused by name.

    On a cluster, start the engine with --kv-transfer-config '{"kv_connector": "DisaggProbe",
    "kv_connector_module_path": "disagg_agent.engines.vllm.probe", "kv_role": "kv_both", "kv_connector_extra_config":
    {"output": "FOLDER"}}', gather the files of all its workers, and run: disagg probe FOLDER

    Here: disagg probe --engine vllm -f deployment.yaml --role decode, or disagg probe --engine vllm -- --model MODEL
    --tensor-parallel-size 2. A volume named model holds the tiny model of random weights, as in disagg up.
    """
    if engine is None:
        files = _read_folder(words, file)
    else:
        files = finish(probe_engine(_engine(words, file, name, role.value, timeout, state), progress))
    try:
        report = make_report(files)
    except PlanError as failure:
        refused(failure)
    text = json.dumps(report.document()) if output is ProbeOutput.json else report.text().rstrip("\n")
    if output_file is None:
        emit(text)
        return
    try:
        output_file.write_text(text + "\n")
    except OSError as failure:
        usage(f"cannot write {output_file}: {failure.strerror}")
    progress(f"written to {output_file}")


def _read_folder(words: list[str] | None, file: Path | None) -> dict[str, RankFacts]:
    if file is not None or not words or len(words) > 1:
        usage("give one FOLDER of rank files, or --engine vllm with -f FILE or with arguments after --")
    try:
        return read_rank_files(Path(words[0]))
    except UsageError as failure:
        usage(str(failure))
    except PlanError as failure:
        refused(failure)


def _engine(
    words: list[str] | None,
    file: Path | None,
    name: str | None,
    role: Literal["prefill", "decode"],
    timeout: float,
    state: Path | None,
) -> Probe:
    where = (state or Path(".disagg") / "probe").absolute()
    if file is None:
        if not words:
            usage("--engine needs -f FILE, or the engine's arguments after --")
        return plain_engine(words, timeout, where)
    deployment = read(file, name).deployment
    if deployment.spec.engine.name != ProbeEngine.vllm:
        usage(f"the deployment declares engine {deployment.spec.engine.name!r}, not vllm")
    try:
        return declared_engine(deployment, role, words or [], timeout, where)
    except PlanError as failure:
        refused(failure)
