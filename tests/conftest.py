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


def _strides(order: Sequence[str], sizes: dict[str, int]) -> dict[str, int]:
    """Strides, in elements, of a dense tensor whose axes lie in memory in this order."""
    strides = {}
    inner = 1
    for axis in reversed(order):
        strides[axis] = inner
        inner *= sizes[axis]
    return strides


_AXES = {
    "run": ["blocks", "heads", "tokens", "content"],
    "two": ["blocks", "heads", "tokens", "content"],
    "joint": ["blocks", "heads", "tokens", "parts", "content"],
    "separate": ["parts", "blocks", "heads", "tokens", "content"],
    "latent": ["blocks", "tokens", "content"],
}
_MEMORY = {
    ("run", "HND"): ["blocks", "heads", "tokens", "content"],
    ("run", "NHD"): ["blocks", "tokens", "heads", "content"],
    ("joint", "HND"): ["blocks", "heads", "tokens", "parts", "content"],
    ("joint", "NHD"): ["blocks", "tokens", "heads", "parts", "content"],
    ("separate", "HND"): ["parts", "blocks", "heads", "tokens", "content"],
    ("separate", "NHD"): ["parts", "blocks", "tokens", "heads", "content"],
}


def _probe_layer(
    layer: int, group: int, order: str, layout: str, heads: int, head_sizes: tuple[int, int], block: int, element: int
) -> dict[str, Any]:
    """One layer of a rank file: `heads` are those of the rank, `head_sizes` elements of K and V."""
    latent = order == "latent"
    name = f"model.layers.{layer}.self_attn.attn"
    blocks = 7
    tensors = []
    contents = {"run": [sum(head_sizes)], "two": list(head_sizes)}.get(order, [head_sizes[0]])
    for number, content in enumerate(contents):
        sizes = {"blocks": blocks, "heads": heads, "tokens": block, "parts": 2, "content": content}
        memory = _AXES["latent"] if latent else _MEMORY["run" if order == "two" else order, layout]
        strides = _strides(memory, sizes)
        tensors.append(
            {
                "shape": [sizes[axis] for axis in _AXES[order]],
                "strides": [strides[axis] for axis in _AXES[order]],
                "element": element,
                "dtype": "",
                "storage": layer * 2 + number,
                "offset": 0,
            }
        )
    return {
        "name": name,
        "layer": layer,
        "group": group,
        "spec": "MLAAttentionSpec" if latent else "FullAttentionSpec",
        "blockTokens": block,
        "backend": "X",
        "heads": 1 if latent else heads,
        "headSize": head_sizes[0],
        "headSizeV": 0 if latent else head_sizes[1],
        "axes": _AXES[order],
        "tensors": tensors,
    }


def _probe_files(
    tensor: int = 1,
    stages: Sequence[Sequence[int]] = ((0, 1, 2, 3),),
    heads: int = 4,
    order: str = "run",
    layout: str = "HND",
    head_sizes: tuple[int, int] = (32, 32),
    block: int = 32,
    dtype: str = "float32",
    backend: str = "CPU_ATTN",
    groups: dict[int, int] | None = None,
    **facts: Any,
) -> dict[str, dict[str, Any]]:
    element = {"float32": 4, "bfloat16": 2, "uint8": 1}.get(dtype, 1)
    held = heads // tensor if heads >= tensor else 1
    files = {}
    for stage, layers in enumerate(stages):
        for rank in range(tensor):
            number = stage * tensor + rank
            files[f"rank-{number}.json"] = {
                "schema": "disagg.dev/probe/v1",
                "rank": number,
                "tensor": tensor,
                "tensorRank": rank,
                "pipeline": len(stages),
                "pipelineRank": stage,
                "context": 1,
                "engine": "vllm",
                "version": "0.32.0",
                "backend": backend,
                "model": "m",
                "dtype": dtype,
                "blockTokens": block,
                "blocks": 7,
                "totalHeads": heads,
                "layers": [
                    _probe_layer(layer, (groups or {}).get(layer, 0), order, layout, held, head_sizes, block, element)
                    for layer in layers
                ],
                **facts,
            }
    return files


@pytest.fixture(scope="session")
def probe_files() -> Callable[..., dict[str, dict[str, Any]]]:
    """Makes the rank files of a started engine, as documents by name.

    `order`: `run` (K and V in one axis), `joint` (an axis of their own inside), `separate` (one outside), `two` (two
    tensors) or `latent`; `stages`: layers of each; `groups`: KV cache group of layers that are not in the first.
    """
    return _probe_files


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
