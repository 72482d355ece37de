"""Hypothesis profiles, and small deployments to plan for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings

from disagg_plan import wire
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.planner import Replica, build_plan
from disagg_plan.profiles import Layout, find_profile
from disagg_plan.topology import default_stages

settings.register_profile("short", max_examples=50, deadline=None, derandomize=True, print_blob=True)
settings.register_profile(
    "long", max_examples=5000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("DISAGG_PROFILE", "short"))

_LONG_TIMEOUT = 3600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give property tests the time that the long profile needs."""
    if settings.get_current_profile_name() != "long":
        return
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.timeout(_LONG_TIMEOUT))


@dataclass(frozen=True)
class Deployment:
    """A geometry with both of its sides."""

    geometry: Geometry
    prefill: Replica
    decode: Replica

    def plan(self) -> wire.Plan:
        return build_plan(self.geometry, self.prefill, self.decode, {"model": "test"})


@dataclass(frozen=True)
class Build:
    """Makers of small deployments. Pages are `synthetic/JOINT` HND pages of 16 tokens unless told otherwise."""

    def heads(self, units: int, layers: int | Sequence[int] = 4, cell: int = 8) -> Geometry:
        """One group of `k` and `v` with `units` KV heads."""
        ids = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        parts = (Part("k", units, "split", cell), Part("v", units, "split", cell))
        return Geometry((Group("attention", ids, parts, "attention"),))

    def latent(self, layers: int | Sequence[int] = 4, cell: int = 8) -> Geometry:
        """One group with a latent on every rank."""
        ids = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        return Geometry((Group("mla", ids, (Part("latent", 1, "replicated", cell),), "mla"),))

    def replica(
        self,
        role: Literal["prefill", "decode"],
        geometry: Geometry,
        tensor: int,
        pipeline: int = 1,
        *,
        backend: str = "JOINT",
        layout: Layout = "HND",
        block: int = 16,
        stages: Sequence[Sequence[int]] | None = None,
    ) -> Replica:
        """One side; stages as vLLM cuts them unless given."""
        cut = default_stages(geometry.layers, pipeline) if stages is None else tuple(tuple(s) for s in stages)
        return Replica(
            role=role,
            parallelism=wire.Parallelism(tensor=tensor, pipeline=len(cut), decode_context=1, interleave=1),
            stages=cut,
            profile=find_profile("synthetic", "1", backend),
            layout=layout,
            block_tokens=block,
        )

    def deployment(
        self,
        geometry: Geometry,
        prefill: int | tuple[int, int],
        decode: int | tuple[int, int],
        prefill_options: dict[str, Any] | None = None,
        decode_options: dict[str, Any] | None = None,
        **both: Any,
    ) -> Deployment:
        """Both sides, each given as tensor size or (tensor, pipeline); options go to `replica`."""
        p, d = ((size, 1) if isinstance(size, int) else size for size in (prefill, decode))
        return Deployment(
            geometry,
            self.replica("prefill", geometry, *p, **both, **(prefill_options or {})),
            self.replica("decode", geometry, *d, **both, **(decode_options or {})),
        )


@pytest.fixture(scope="session")
def build() -> Build:
    """Makers of small deployments."""
    return Build()


@pytest.fixture(scope="session")
def deployment_type() -> type[Deployment]:
    """`Deployment`, for tests that make their own sides."""
    return Deployment


@pytest.fixture(scope="session")
def model_configs() -> dict[str, dict[str, Any]]:
    """The fields of public config.json files that bear on the cache, by model name."""
    text = (Path(__file__).parent / "data" / "model-configs.json").read_text()
    return {name: config for name, config in json.loads(text).items() if not name.startswith("_")}


@pytest.fixture(scope="session")
def reseal() -> Callable[[dict[str, Any]], bytes]:
    """Canonical bytes of a plan document that was changed, with its digest made anew."""

    def seal(document: dict[str, Any]) -> bytes:
        from disagg_plan import canonical

        body = {key: value for key, value in document.items() if key != "digest"}
        return canonical.dumps({**body, "digest": canonical.digest(body)})

    return seal
