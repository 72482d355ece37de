"""How much of a model fits: pure decisions about layers and pages, so that a run's memory is bounded and stated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disagg_operator.planning import deployment_geometry, geometry_spec
from disagg_operator.reconcile import Snapshot
from disagg_operator.types import DisaggDeployment
from disagg_plan import wire
from disagg_plan.errors import Refusal
from disagg_plan.pairing import blocks_for
from disagg_plan.ranges import format_ranges, parse_ranges

_REQUESTS_AT_ONCE = 2
"""Requests of the longest kind that each side must be able to hold."""

_DECODE_SHARE = 0.55
"""Pools of the two sides differ on purpose: nothing may depend on their being equal."""


@dataclass(frozen=True)
class Sizes:
    """What a run allocates.

    Attributes:
        layers: layers kept, of `all_layers`.
        pages: pages of every block table, by role.
        bytes: memory of all ranks of all replicas, by role.
    """

    layers: int
    all_layers: int
    pages: dict[str, int]
    bytes: dict[str, int]

    def sentence(self, limit: int) -> str:
        """What is stated before a run."""
        cut = "all" if self.layers == self.all_layers else f"first {self.layers} of"
        sides = ", ".join(
            f"{role} {self.pages[role]} pages ({self.bytes[role] / 2**20:.0f} MiB)" for role in ("prefill", "decode")
        )
        return f"memory: {cut} {self.all_layers} layers within {limit / 2**20:.0f} MiB; {sides}"


def keep_layers(snapshot: Snapshot, layers: int) -> Snapshot:
    """The same deployment with the model cut to its first layers, as explicit geometry.

    Stages that are listed explicitly are cut with it.
    """
    deployment = snapshot.deployment
    spec = deployment.spec
    whole = deployment_geometry(spec, snapshot.config_maps)
    cut = whole.first_layers(layers)
    changes: dict[str, Any] = {
        "model": spec.model.model_copy(update={"config": None, "config_from": None, "geometry": geometry_spec(cut)})
    }
    for name in ("prefill", "decode"):
        role = spec.role(name)
        listed = role.parallelism.pipeline_layers
        if listed is not None:
            kept = [sorted(set(parse_ranges(stage)) & set(cut.layers)) for stage in listed]
            if not all(kept):
                stage = kept.index([])
                raise Refusal(
                    "NoLayers",
                    "--layers",
                    f"the first {layers} layers leave stage {stage} of {name} ({listed[stage]}) without any",
                    f"Keep at least {max(parse_ranges(part)[0] for part in listed) + 1}, or list no pipelineLayers",
                )
            parallelism = role.parallelism.model_copy(
                update={"pipeline_layers": [format_ranges(stage) for stage in kept]}
            )
            changes[name] = role.model_copy(update={"parallelism": parallelism})
    changed = deployment.model_copy(update={"spec": spec.model_copy(update=changes)})
    return Snapshot(changed, snapshot.config_maps)


def size(deployment: DisaggDeployment, plan: wire.Plan, all_layers: int, longest: int, limit: int) -> Sizes | None:
    """Pages that fit, or None if the longest requests do not.

    Args:
        longest: tokens of the longest request.
        limit: bytes for all pools together.
    """
    pages: dict[str, int] = {}
    total: dict[str, int] = {}
    for side in (plan.source, plan.destination):
        replicas = max(1, deployment.spec.role(side.role).replicas)
        share = limit * (_DECODE_SHARE if side.role == "decode" else 1 - _DECODE_SHARE) / replicas
        per_page = page_bytes(side)
        block = max(page.block_tokens or 1 for page in side.pages)
        pages[side.role] = int(share // per_page)
        total[side.role] = pages[side.role] * per_page * replicas
        if pages[side.role] < _REQUESTS_AT_ONCE * blocks_for(longest, block):
            return None
    layers = len({layer for group in plan.groups for layer in parse_ranges(group.layers)})
    return Sizes(layers, all_layers, pages, total)


def page_bytes(side: wire.Side) -> int:
    """Bytes of one page id over all ranks and layers of a replica."""
    return sum(
        region.stride * len(parse_ranges(rank.layers[group]))
        for rank in side.ranks
        for group, index in rank.pages.items()
        for region in side.pages[index].regions
    )


def too_large(deployment: DisaggDeployment, plan: wire.Plan, layers: int, longest: int, limit: int) -> Refusal:
    """Why the longest requests do not fit, and what would."""
    needed = 0.0
    for side in (plan.source, plan.destination):
        block = max(page.block_tokens or 1 for page in side.pages)
        share = _DECODE_SHARE if side.role == "decode" else 1 - _DECODE_SHARE
        replicas = max(1, deployment.spec.role(side.role).replicas)
        pages = _REQUESTS_AT_ONCE * blocks_for(longest, block)
        needed = max(needed, pages * page_bytes(side) * replicas / share)
    return Refusal(
        "NotEnoughMemory",
        "--max-memory",
        f"{_REQUESTS_AT_ONCE} requests of {longest} tokens at {layers} {'layer' if layers == 1 else 'layers'} need "
        f"{math.ceil(needed / 2**20)} MiB, {limit / 2**20:.2f} MiB are allowed",
        f"Use --max-memory {math.ceil(needed / 2**20)}Mi, shorter requests (--max-tokens) or fewer --layers",
    )


def check_available(sizes: Sizes) -> None:
    """Refuse pools that the machine cannot hold, before anything is started for them.

    Raises:
        Refusal: `NotEnoughMemory`.
    """
    available = _available()
    wanted = sum(sizes.bytes.values())
    if available is not None and wanted > available:
        raise Refusal(
            "NotEnoughMemory",
            "--max-memory",
            f"the pools take {wanted / 2**20:.0f} MiB, the machine has {available / 2**20:.0f} MiB available",
            f"Use at most {available // 2**20 * 3 // 4}Mi",
        )


def _available() -> int | None:
    """Available memory in bytes, where Linux tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None
