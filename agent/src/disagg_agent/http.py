"""What an agent shows over HTTP: health, readiness, its plan, its peers, its requests, metrics; and introductions."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from disagg_agent.agent import Agent
from disagg_agent.errors import AgentError
from disagg_agent.handshake import Address

AGENT: web.AppKey[Agent] = web.AppKey("agent", Agent)


class PeerIntroduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One agent of the revision."""

    role: Literal["prefill", "decode"]
    replica: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Introductions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All agents of the revision; those left out are dropped."""

    peers: list[PeerIntroduction]


def build_app(agent: Agent) -> web.Application:
    """The agent's HTTP application."""
    app = web.Application(client_max_size=4 << 20)
    app[AGENT] = agent
    app.add_routes(
        [
            web.get("/healthz", _health),
            web.get("/readyz", _ready),
            web.get("/identity", _identity),
            web.get("/plan", _plan),
            web.get("/peers", _peers),
            web.post("/peers", _introduce),
            web.get("/transfers", _transfers),
            web.get("/metrics", _metrics),
        ]
    )
    return app


async def _health(_request: web.Request) -> web.Response:
    return web.Response(text="ok\n")


async def _ready(request: web.Request) -> web.Response:
    reason = request.app[AGENT].not_ready()
    return web.Response(text=f"{reason or 'ready'}\n", status=503 if reason else 200)


async def _identity(request: web.Request) -> web.Response:
    agent = request.app[AGENT]
    config = agent.config
    refusal: AgentError | None = agent.last_refusal
    return _json(
        {
            "role": config.role,
            "replica": config.replica,
            "pod": config.pod,
            "incarnation": agent.incarnation,
            "host": config.host,
            "port": agent.port,
            "plan": agent.loaded.plan.digest,
            "compat": agent.loaded.plan.compat.digest,
            "ranks": sorted(agent.engine.sessions),
            "lastRefusal": {"code": refusal.code, "message": refusal.message} if refusal else None,
        }
    )


async def _plan(request: web.Request) -> web.Response:
    return web.Response(body=request.app[AGENT].loaded.text, content_type="application/json")


async def _peers(request: web.Request) -> web.Response:
    return _json({"peers": request.app[AGENT].peers()})


async def _introduce(request: web.Request) -> web.Response:
    try:
        message = msgspec.json.decode(await request.read(), type=Introductions)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return _json({"error": str(error)}, status=400)
    request.app[AGENT].introduce((peer.role, peer.replica, Address(peer.host, peer.port)) for peer in message.peers)
    return _json({"introduced": len(message.peers)})


async def _transfers(request: web.Request) -> web.Response:
    return _json(request.app[AGENT].transfers())


async def _metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[AGENT].metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4"})


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(text=json.dumps(value) + "\n", status=status, content_type="application/json")
