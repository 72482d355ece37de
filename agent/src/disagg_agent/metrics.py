"""Prometheus metrics of one agent. Labels are bounded: reasons are codes, never messages; peers are not labels."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """All metrics, in a registry of their own so that several agents can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.loads = Counter(
            "disagg_loads", "Loads of one rank that ended, by outcome code", ["code"], registry=self.registry
        )
        self.bytes = Counter("disagg_moved_bytes", "Bytes that loads brought in", registry=self.registry)
        self.seconds = Histogram(
            "disagg_load_seconds",
            "From the engine's request to the last byte",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.holds = Counter(
            "disagg_holds", "Holds of one rank that ended, by reason", ["reason"], registry=self.registry
        )
        self.refusals = Counter(
            "disagg_refusals",
            "Peers, engine ranks and requests that were refused, by code",
            ["code"],
            registry=self.registry,
        )
        self.active = Gauge("disagg_active_requests", "Holds or loads that have not ended", registry=self.registry)

    def text(self) -> bytes:
        """Exposition format."""
        return generate_latest(self.registry)
