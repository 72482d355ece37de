"""A way to the API server that counts writes, and does something after one of them: where faults are put in."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
import yaml
from aiohttp import web

from rig.control_plane import ControlPlane

_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}
_READS = ("GET", "HEAD", "OPTIONS")


class Gate:
    """A plain HTTP server on loopback that passes requests on as the administrator, or with a token.

    Attributes:
        used: `(verb, resource)` of all requests, as RBAC names them, e.g. `("patch", "deployments/scale")`.
        writes: `METHOD path` of the writes that the API server took, in order; events are not counted.
        after_write: called in the gate's thread after each, with how many there were.
    """

    def __init__(self, plane: ControlPlane, folder: Path, token: str = "") -> None:
        self.used: set[tuple[str, str]] = set()
        self._token = token
        self.writes: list[str] = []
        self.after_write: Callable[[int], None] = lambda _count: None
        self.kubeconfig = folder / "gate.conf"
        self._plane = plane
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        cluster = {"name": "gate", "cluster": {"server": f"http://127.0.0.1:{port}"}}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "users": [{"name": "user", "user": {"token": self._token} if self._token else {}}],
            "contexts": [{"name": "gate", "context": {"cluster": "gate", "user": "user"}}],
            "current-context": "gate",
        }
        self.kubeconfig.write_text(yaml.safe_dump(document))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> int:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._plane.client_context(anonymous=bool(self._token))),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()
        # Watches of an operator that was killed are still open.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP}
        body = await request.read()
        self.used.add(_rbac(request))
        url = f"{self._plane.server}{request.path_qs}"
        async with self._session.request(request.method, url, headers=headers, data=body or None) as answer:
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP}
            if request.method not in _READS and not request.path.endswith("/events") and answer.status < 400:
                # Read whole before anything is done about it: the write has happened, its answer may never arrive.
                content = await answer.read()
                self.writes.append(f"{request.method} {request.path}")
                self.after_write(len(self.writes))
                return web.Response(status=answer.status, headers=kept, body=content)
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            # Whoever was killed while it watched reads no more.
            with contextlib.suppress(ConnectionError):
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
            return response


def _rbac(request: web.Request) -> tuple[str, str]:
    pieces = request.path.strip("/").split("/")
    rest = pieces[2:] if pieces[0] == "api" else pieces[3:]
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    resource, name, subresource = [*rest, "", "", ""][:3]
    verbs = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
    read = "get" if name else "watch" if request.query.get("watch") == "true" else "list"
    return verbs.get(request.method, read), "/".join(filter(None, (resource, subresource)))
