"""Every pair of tensor-parallel sizes up to 8, over numbers of KV heads that divide them or do not."""

from __future__ import annotations

import pytest

from disagg_plan.errors import Refusal
from disagg_plan.proof import prove

SIZES = range(1, 9)


def places(units, tensor):
    """Heads over ranks as engines do it: equal shares of heads, or equal numbers of ranks for each head."""
    shares = [units // tensor] * tensor if units >= tensor else [tensor // units] * units
    return sum(shares) == max(units, tensor)


@pytest.mark.parametrize("units", [1, 2, 3, 4, 6, 8, 16])
def test_every_pair(build, units):
    geometry = build.heads(units, layers=2, cell=4)
    held = sum(places(units, size) for size in SIZES)
    proven = 0
    for prefill in SIZES:
        for decode in SIZES:
            deployment = build.deployment(geometry, prefill, decode, block=2)
            if places(units, prefill) and places(units, decode):
                plan = deployment.plan()
                proof = prove(plan)
                # What decode holds: every head once, and again for every further rank that holds it.
                assert proof.bytes_per_token == 2 * 2 * 4 * max(units, decode)
                assert len(plan.edges) == proof.edges
                proven += 1
                continue
            with pytest.raises(Refusal) as refused:
                deployment.plan()
            role, size = ("decode", decode) if places(units, prefill) else ("prefill", prefill)
            assert refused.value.code == "IndivisibleUnits"
            assert refused.value.field == f"{role}.parallelism.tensor"
            assert f"{units} units of part 'k' cannot be placed on {size}" in refused.value.message
    assert proven == held * held
