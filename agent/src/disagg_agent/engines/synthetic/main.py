"""`disagg-synthetic-engine`: the synthetic engine of one pod, with the HTTP interface of a real one.

`POST /v1/completions` takes an OpenAI completion request with vLLM's `kv_transfer_params`, so a router for
prefill/decode drives it as it drives vLLM. Only the length of the prompt matters.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer
from aiohttp import web

from disagg_agent.cards import HOST
from disagg_agent.engines.synthetic.engine import EngineConfig, EngineError, SyntheticEngine
from disagg_agent.errors import AgentError
from disagg_agent.messages import SourceRef
from disagg_agent.placement import choose_placement
from disagg_agent.runtime import end_on_thread_crash, serve_http, set_up_logging, stop_on_signals

app = typer.Typer(add_completion=False, help=__doc__)

ENGINE: web.AppKey[SyntheticEngine] = web.AppKey("engine", SyntheticEngine)


@app.command()
def serve(
    socket: Annotated[Path, typer.Option(envvar="DISAGG_SOCKET", help="Unix socket of the agent.")],
    http: Annotated[str, typer.Option(envvar="DISAGG_ENGINE_HTTP", help="HOST:PORT or unix:PATH to serve at.")],
    factors: Annotated[
        str, typer.Option(envvar="DISAGG_ENGINE_FACTORS", help="Compatibility factors to report, as JSON.")
    ],
    pages: Annotated[int, typer.Option(envvar="DISAGG_ENGINE_PAGES", help="Pages of every block table.")] = 1024,
    placement: Annotated[
        str, typer.Option(envvar="DISAGG_MOVER_PLACEMENT", help="Where movers live: auto, agent or engine.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Order in which pages are handed out.")] = 0,
    log_level: Annotated[str, typer.Option(envvar="DISAGG_LOG_LEVEL", help="debug, info, warning or error.")] = "info",
) -> None:
    """Register every rank with the agent and serve requests until told to stop."""
    try:
        chosen = choose_placement(placement, HOST)
    except AgentError as error:
        raise typer.BadParameter(error.message, param_hint="--placement") from error
    set_up_logging(log_level)
    end_on_thread_crash()
    try:
        reported = json.loads(factors)
    except ValueError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--factors") from error
    config = EngineConfig(socket, reported, pages, chosen, seed)
    try:
        asyncio.run(_serve(config, http))
    except (AgentError, OSError) as error:
        typer.echo(f"disagg-synthetic-engine: {error}", err=True)
        raise typer.Exit(1) from error


async def _serve(config: EngineConfig, http: str) -> None:
    stop = stop_on_signals()
    engine = SyntheticEngine(config)
    runner: web.AppRunner | None = None
    try:
        await engine.start()
        runner = await serve_http(build_app(engine), http)
        await stop.wait()
    finally:
        engine.close()
        if runner is not None:
            await runner.cleanup()


def build_app(engine: SyntheticEngine) -> web.Application:
    """The engine's HTTP application."""
    application = web.Application(client_max_size=64 << 20)
    application[ENGINE] = engine
    application.add_routes(
        [
            web.get("/health", _health),
            web.get("/stats", _stats),
            web.post("/v1/completions", _completions),
        ]
    )
    return application


async def _health(request: web.Request) -> web.Response:
    lost = request.app[ENGINE].lost
    return web.Response(text=f"{lost or 'ok'}\n", status=503 if lost else 200)


async def _stats(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    return _json(
        {
            "pages": engine.blocks.pages,
            "freePages": engine.blocks.free_pages,
            "strayBytes": await engine.stray_bytes(),
        }
    )


async def _completions(request: web.Request) -> web.Response:
    engine = request.app[ENGINE]
    try:
        body = await request.json()
        name = str(body.get("request_id") or f"cmpl-{uuid4().hex}")
        tokens = len(body["prompt"])
        params = dict(body.get("kv_transfer_params") or {})
        if tokens < 1:
            raise ValueError("the prompt is empty")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return _error("BadRequest", f"not a completion request: {error}", 400)
    try:
        if params.get("do_remote_decode"):
            return _completion(name, tokens, kv_transfer_params=await engine.prefill(name, tokens))
        if params.get("do_remote_prefill"):
            return await _decode(engine, name, tokens, params)
    except EngineError as error:
        return _error(error.code, error.message, 503 if error.code == "AgentGone" else 500)
    return _error("BadRequest", "kv_transfer_params asks for neither remote prefill nor remote decode", 400)


async def _decode(engine: SyntheticEngine, name: str, tokens: int, params: dict[str, Any]) -> web.Response:
    own = params.get("disagg") or {}
    try:
        remote_tokens = int(params["remote_num_tokens"])
        source = SourceRef(
            str(params["remote_engine_id"]),
            str(params["remote_request_id"]),
            str(own["generation"]),
            str(params["remote_host"]),
            int(params["remote_port"]),
        )
        cached = int(own.get("cached_tokens", 0))
    except (KeyError, TypeError, ValueError) as error:
        return _error("BadTransferParams", f"kv_transfer_params of another prefill engine, {error} is missing", 400)
    if remote_tokens != tokens:
        return _error("UnequalSpan", f"the prompt has {tokens} tokens, prefill held {remote_tokens}", 500)
    decoded = await engine.decode(name, tokens, cached, source)
    return _completion(
        name,
        tokens,
        disagg={
            "movedBytes": decoded.moved_bytes,
            "verifiedBytes": decoded.verified_bytes,
            "wrongBytes": decoded.wrong_bytes,
            "transferSeconds": decoded.transfer_seconds,
        },
    )


def _completion(name: str, tokens: int, **extra: Any) -> web.Response:
    return _json(
        {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": "synthetic",
            "choices": [{"index": 0, "text": "", "finish_reason": "length"}],
            "usage": {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1},
            **extra,
        }
    )


def _error(code: str, message: str, status: int) -> web.Response:
    return _json({"error": {"code": code, "message": message, "type": "disagg"}}, status)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(value) + "\n", status=status, content_type="application/json")


def main() -> None:
    """Entry point."""
    app()
