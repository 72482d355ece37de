"""Plan and proof of the largest replicas that are supported, and the size of what is published."""

from __future__ import annotations

import time

import pytest

from disagg_plan import wire
from disagg_plan.proof import prove

SECONDS = 1.0
BYTES = 128 * 1024

CASES = {
    "64 heads": lambda build: build.deployment(build.heads(64, layers=80, cell=256), 64, 64),
    "64 heads, HND to NHD": lambda build: build.deployment(
        build.heads(64, layers=80, cell=256), 64, 64, {"layout": "HND"}, {"layout": "NHD"}
    ),
    "64 heads, TP 1 to 64": lambda build: build.deployment(build.heads(64, layers=80, cell=256), 1, 64),
    "8 heads": lambda build: build.deployment(build.heads(8, layers=80, cell=256), 64, 64),
    "latent": lambda build: build.deployment(build.latent(layers=80, cell=1152), 64, 64),
    "latent, TP 48 to 64": lambda build: build.deployment(build.latent(layers=80, cell=1152), 48, 64),
    "latent, blocks of 16 and 48": lambda build: build.deployment(
        build.latent(layers=80, cell=1152), 63, 64, {"block": 16}, {"block": 48}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plan_and_proof(build, name):
    deployment = CASES[name](build)
    started = time.perf_counter()
    plan = deployment.plan()
    planned = time.perf_counter()
    prove(plan)
    proven = time.perf_counter()
    size = len(wire.encode(plan))
    print(
        f"\n{name}: plan {planned - started:.3f} s, proof {proven - planned:.3f} s, {len(plan.edges)} edges, "
        f"{len(plan.shapes)} shapes, {size / 1024:.1f} KiB"
    )
    assert proven - started < SECONDS
    assert size < BYTES
