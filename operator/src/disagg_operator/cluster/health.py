"""What the operator tells about itself over HTTP: liveness, readiness, metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SILENCE_SECONDS = 720.0
"""More than two watches' time without a word from the API server. Peers' or agents' state never counts here."""


class Health:
    """State and metrics of one operator.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.working = False
        """Whether this operator leads and reconciles; one that stands by has no watches."""
        self.synced = False
        """Whether everything has been listed once."""
        self.registry = CollectorRegistry()
        self._reconciles = Counter(
            "disagg_operator_reconciles", "Reconciles of deployments.", ["result"], registry=self.registry
        )
        self._seconds = Histogram(
            "disagg_operator_reconcile_seconds", "Duration of a reconcile.", registry=self.registry
        )
        self.writes = Counter(
            "disagg_operator_writes", "Writes to the API server.", ["verb", "kind"], registry=self.registry
        )
        Gauge(
            "disagg_operator_watch_age_seconds", "Since the API server last said anything.", registry=self.registry
        ).set_function(self.age)
        Gauge(
            "disagg_operator_leading", "1 if this operator works, 0 if it stands by.", registry=self.registry
        ).set_function(lambda: float(self.working))
        self.depth = Gauge("disagg_operator_queue_depth", "Deployments to reconcile.", registry=self.registry)

    def beat(self) -> None:
        """The API server said something."""
        self._last = self._clock()

    def age(self) -> float:
        """Seconds since it last did."""
        return self._clock() - self._last

    def not_live(self) -> str:
        """Why the process should be restarted; empty if it should not."""
        if self.working and self.age() > SILENCE_SECONDS:
            return f"the API server has said nothing for {self.age():.0f} s"
        return ""

    def not_ready(self) -> str:
        """Why it is not ready; empty if it is."""
        return "" if self.synced or not self.working else "not everything has been listed yet"

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Count and time one reconcile."""
        begin = self._clock()
        result = "error"
        try:
            yield
            result = "ok"
        finally:
            self._reconciles.labels(result).inc()
            self._seconds.observe(self._clock() - begin)


@asynccontextmanager
async def serving(health: Health, host: str, port: int) -> AsyncIterator[None]:
    """Serve `/healthz`, `/readyz` and `/metrics` while the block runs.

    Args:
        host: empty for all addresses.

    Raises:
        OSError: the address cannot be had.
    """
    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", _verdict(health.not_live)),
            web.get("/readyz", _verdict(health.not_ready)),
            web.get("/metrics", _metrics(health)),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
        yield
    finally:
        await runner.cleanup()


def _verdict(reason: Callable[[], str]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        text = reason()
        return web.Response(text=f"{text or 'ok'}\n", status=503 if text else 200)

    return answer


def _metrics(health: Health) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=generate_latest(health.registry), headers=headers)

    return answer
