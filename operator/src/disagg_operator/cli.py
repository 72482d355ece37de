"""`disagg`: plan, verify, run and probe disaggregated deployments.

Exit codes: 0 fine, 1 refused or wrong, 2 usage, 130 interrupted. Results go to standard output, everything else to
standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from disagg_operator.children import LOCAL
from disagg_operator.console import TerminalReporter, emit, error, mapping_table, plain
from disagg_operator.crds_command import crds
from disagg_operator.describe import figures, topology
from disagg_operator.invocation import File, Name, Output, finish, read, refused, usage
from disagg_operator.local.up import UpOptions, up, with_placement
from disagg_operator.local.vllm import VllmOptions, up_vllm
from disagg_operator.probe_command import probe
from disagg_operator.quantities import parse_bytes
from disagg_operator.reconcile import reconcile
from disagg_operator.yaml_loader import YamlError, load_all
from disagg_operator.yaml_text import dump
from disagg_plan import wire
from disagg_plan.errors import PlanError, ProofError
from disagg_plan.proof import prove

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Plan, verify and run disaggregated prefill/decode deployments.\n\n"
    "Exit codes: 0 fine, 1 refused or wrong, 2 usage, 130 interrupted.",
)


class PlanOutput(StrEnum):
    """What `disagg plan` prints."""

    table = "table"
    json = "json"
    configmap = "configmap"


class EngineKind(StrEnum):
    """Which engines local mode runs."""

    synthetic = "synthetic"
    vllm = "vllm"


class Placement(StrEnum):
    """Where movers live."""

    sidecar = "Sidecar"
    in_engine = "InEngine"


class Protocol(StrEnum):
    """How bytes move."""

    auto = "Auto"
    tcp = "TCP"
    shared_memory = "SharedMemory"


MAX_PLAN_BYTES = 16 << 20
"""Largest plan that `verify` reads; a published one is below 128 KiB."""


@app.command()
def plan(
    file: File,
    name: Name = None,
    output: Annotated[PlanOutput, typer.Option("-o", "--output", help="Form of the output.")] = PlanOutput.table,
) -> None:
    """Compute and prove the transfer plan of a deployment, or say why there can be none.

    `-o json` prints exactly the plan document, `-o configmap` the object that the operator publishes.
    """
    snapshot = read(file, name)
    desired = reconcile(snapshot, LOCAL)
    if desired.plan is None:
        refused(desired.refusal)
    if output is PlanOutput.json:
        emit(wire.encode(desired.plan).decode())
    elif output is PlanOutput.configmap:
        emit(dump([desired.objects[0]]).rstrip("\n"))
    else:
        plain(topology(desired.plan))
        mapping_table(desired.plan)
        for line in figures(desired.plan):
            plain(line)
        plain("proof: every byte that decode needs is written exactly once, from a rank that holds it")


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json or its ConfigMap, - for standard input.")],
    output: Annotated[Output, typer.Option("-o", "--output", help="Form of the output.")] = Output.table,
) -> None:
    """Prove a plan file: form, digests, and that every byte moves right. Needs no deployment and trusts no planner."""
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as source:
            text = source.read(MAX_PLAN_BYTES + 1)
    except OSError as failure:
        usage(f"cannot read {file}: {failure.strerror}")
    if len(text) > MAX_PLAN_BYTES:
        usage(f"{file} is larger than {MAX_PLAN_BYTES >> 20} MiB: that is no plan")
    try:
        document = wire.decode(_plan_text(text))
        proof = prove(document)
    except PlanError as failure:
        findings = failure.findings if isinstance(failure, ProofError) else [failure.message]
        if output is Output.json:
            emit(json.dumps({"valid": False, "code": failure.code, "findings": findings}))
        else:
            for finding in findings:
                error(f"{failure.code}: {finding}")
        raise typer.Exit(1) from failure
    if output is Output.json:
        result = {
            "valid": True,
            "digest": document.digest,
            "edges": proof.edges,
            "bytesWrittenPerToken": proof.bytes_per_token,
        }
        emit(json.dumps(result))
    else:
        plain(f"{document.digest}")
        plain(
            f"proven: {topology(document)}; {proof.bytes_per_token} bytes per token, every one written exactly once, "
            "from a rank that holds it"
        )


def _plan_text(data: bytes) -> bytes | str:
    """The plan itself, taken out of a ConfigMap in YAML where that is what was given."""
    if data.lstrip()[:1] == b"{":
        return data
    try:
        documents = load_all(data.decode())
    except (YamlError, UnicodeDecodeError):
        return data
    for document in documents:
        if isinstance(document, dict) and document.get("kind") == "ConfigMap":
            text = (document.get("data") or {}).get("plan.json")
            if isinstance(text, str):
                return text
    return data


@app.command(name="up")
def run(
    file: File,
    name: Name = None,
    engine: Annotated[
        EngineKind,
        typer.Option(help="synthetic: no model, every byte checked. vllm: real engines, every token compared."),
    ] = EngineKind.synthetic,
    requests: Annotated[int, typer.Option(min=1, help="Requests to drive.")] = 64,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the longest prompt; default 1024, vllm 300.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    max_memory: Annotated[
        str,
        typer.Option(
            help="Memory of all KV pools together; the model is cut to the layers that fit, and that is said."
        ),
    ] = "1Gi",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="vllm: tokens that each answer has.")] = 16,
    engine_arg: Annotated[
        list[str] | None, typer.Option("--engine-arg", help="vllm: a further argument for every engine; repeatable.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep exactly this many layers of the model.")] = None,
    placement: Annotated[
        Placement | None, typer.Option(help="Where movers live; default: as the deployment says.")
    ] = None,
    protocol: Annotated[Protocol | None, typer.Option(help="How bytes move; default: as the deployment says.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 0,
    state: Annotated[Path | None, typer.Option(help="Where objects and logs go; default .disagg/NAME.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Stay up after the requests, until interrupted.")] = False,
    output: Annotated[Output, typer.Option("-o", "--output", help="Form of the output.")] = Output.table,
) -> None:
    """Run a deployment on this machine: real agents, real NIXL, synthetic engines, every byte checked.

    Plans and proves the deployment, starts its pods as processes, drives requests of mixed lengths from prefill to
    decode, and ends with an account. Exit code 1 if one byte is wrong or one request failed.
    """
    try:
        memory = parse_bytes(max_memory)
    except ValueError as failure:
        usage(f"--max-memory: {failure}")
    snapshot = with_placement(read(file, name), placement, protocol)
    where = (state or Path(".disagg") / snapshot.deployment.metadata.name).absolute()
    reporter = TerminalReporter(as_json=output is Output.json)
    if engine is EngineKind.vllm:
        vllm_options = VllmOptions(
            prompts=requests,
            longest=max_tokens or 300,
            generate=max_new_tokens,
            concurrency=concurrency,
            seed=seed,
            state=where,
            keep=keep,
            arguments=tuple(engine_arg or ()),
        )
        compared = finish(up_vllm(snapshot, vllm_options, reporter))
        raise typer.Exit(0 if compared.good else 1)
    options = UpOptions(
        requests=requests,
        longest=max_tokens or 1024,
        concurrency=concurrency,
        max_memory=memory,
        layers=layers,
        seed=seed,
        state=where,
        keep=keep,
    )
    account = finish(up(snapshot, options, reporter))
    raise typer.Exit(0 if account.good else 1)


app.command()(probe)
app.command()(crds)


def main() -> None:
    """Entry point."""
    try:
        app()
    except OSError as failure:
        # Standard output cannot be written: full disk or closed pipe.
        with contextlib.suppress(OSError):
            error(f"cannot write: {failure.strerror}")
        # Python would try to flush the same output again at exit, and complain.
        os._exit(1)
