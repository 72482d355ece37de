"""`disagg-agent`: the agent of one pod. Every option can come from the environment, which is how pods set it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from disagg_agent.agent import GRACE_SHARE, Agent, AgentConfig, Role
from disagg_agent.errors import AgentError
from disagg_agent.http import build_app
from disagg_agent.plan_loader import LoadedPlan, load_plan
from disagg_agent.runtime import end_on_thread_crash, serve_http, set_up_logging, stop_on_signals

app = typer.Typer(add_completion=False, help=__doc__)


def _option(name: str, env: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, envvar=env, help=text)
    return option


@app.command()
def serve(
    plan: Annotated[Path, _option("--plan", "DISAGG_PLAN", "Plan file, as mounted from the plan ConfigMap.")],
    role: Annotated[str, _option("--role", "DISAGG_ROLE", "prefill or decode.")],
    replica: Annotated[str, _option("--replica", "DISAGG_REPLICA", "Engine instance that this pod belongs to.")],
    pod: Annotated[str, _option("--pod-uid", "DISAGG_POD_UID", "UID of the pod.")],
    host: Annotated[str, _option("--host", "DISAGG_HOST", "Address that peers reach this pod at.")],
    engine_socket: Annotated[Path, _option("--socket", "DISAGG_SOCKET", "Unix socket for engine ranks.")],
    http: Annotated[str, _option("--http", "DISAGG_HTTP", "HOST:PORT or unix:PATH for health and peers.")],
    digest: Annotated[
        str | None, _option("--plan-digest", "DISAGG_PLAN_DIGEST", "Digest that the plan must have.")
    ] = None,
    port: Annotated[int, _option("--port", "DISAGG_PORT", "Side channel port; 0 for any.")] = 0,
    lease: Annotated[float, _option("--lease", "DISAGG_LEASE_SECONDS", "Seconds that prefill holds pages.")] = 30.0,
    deadline: Annotated[float, _option("--deadline", "DISAGG_DEADLINE_SECONDS", "Seconds a load may take.")] = 30.0,
    log_level: Annotated[str, _option("--log-level", "DISAGG_LOG_LEVEL", "debug, info, warning or error.")] = "info",
) -> None:
    """Load the plan, wait for the engine's ranks, and move what they ask for."""
    if role not in ("prefill", "decode"):
        raise typer.BadParameter(f"{role!r} is neither prefill nor decode", param_hint="--role")
    set_up_logging(log_level)
    end_on_thread_crash()
    known: Role = "prefill" if role == "prefill" else "decode"
    config = AgentConfig(known, pod, replica, engine_socket, host, port, lease, deadline, GRACE_SHARE * deadline)
    try:
        loaded = load_plan(plan, digest)
    except AgentError as error:
        typer.echo(f"disagg-agent: {error}", err=True)
        raise typer.Exit(1) from error
    asyncio.run(_serve(config, loaded, http))


async def _serve(config: AgentConfig, loaded: LoadedPlan, http: str) -> None:
    stop = stop_on_signals()
    agent = Agent(config, loaded)
    runner = await serve_http(build_app(agent), http)
    try:
        await agent.run(stop)
    finally:
        await runner.cleanup()


def main() -> None:
    """Entry point."""
    app()
