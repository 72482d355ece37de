"""How much a prefill rank sends, where several hold the same."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.proof import prove
from disagg_plan.spread import Demand, spread

SIZES = st.integers(1, 16)


def loads_of(assignments, sources):
    loads = Counter(dict.fromkeys(range(sources), 0))
    for assignment in assignments:
        loads[assignment.source] += assignment.demand.bytes
    return loads


def bound_of(demands, sources):
    received = Counter()
    for demand in demands:
        received[demand.destination] += demand.layer_bytes * len(demand.layers)
    return max(sum(received.values()) / sources, max(received.values()))


@st.composite
def demand_lists(draw, most_sources=6):
    """Demands of several destinations over nested sets of sources, as sharding makes them."""
    sources = draw(st.integers(1, most_sources))
    widths = [width for width in range(1, sources + 1) if sources % width == 0]
    demands = []
    for destination in range(draw(st.integers(1, 8))):
        for group in range(draw(st.integers(1, 2))):
            width = draw(st.sampled_from(widths))
            first = width * draw(st.integers(0, sources // width - 1))
            layers = draw(st.sets(st.integers(0, 30), min_size=1, max_size=8))
            demands.append(
                Demand(
                    destination=destination,
                    group=f"g{group}",
                    parts=("k",),
                    units=(first, first + 1),
                    layers=tuple(sorted(layers)),
                    layer_bytes=draw(st.integers(1, 9)),
                    candidates=tuple(range(first, first + width)),
                )
            )
    return demands, sources


@given(case=demand_lists())
def test_every_layer_of_every_demand_has_one_source(case):
    demands, sources = case
    served = defaultdict(list)
    for assignment in spread(demands, sources):
        demand = assignment.demand
        assert demand.layers == tuple(sorted(demand.layers))
        key = (demand.destination, demand.group, demand.parts, demand.units, demand.layer_bytes, demand.candidates)
        assert assignment.source in demand.candidates
        served[key] += demand.layers
    for demand in demands:
        key = (demand.destination, demand.group, demand.parts, demand.units, demand.layer_bytes, demand.candidates)
        assert sorted(served.pop(key)) == list(demand.layers)
    assert not served


@given(case=demand_lists(), data=st.data())
def test_order_of_demands_does_not_matter(case, data):
    demands, sources = case
    assert spread(data.draw(st.permutations(demands)), sources) == spread(demands, sources)


@given(sources=SIZES, destinations=SIZES, layers=st.integers(40, 100), layer_bytes=st.integers(1, 2000))
def test_a_latent_is_spread_evenly(sources, destinations, layers, layer_bytes):
    demands = [
        Demand(to, "mla", ("latent",), (0, 1), tuple(range(layers)), layer_bytes, tuple(range(sources)))
        for to in range(destinations)
    ]
    assignments = spread(demands, sources)
    assert max(loads_of(assignments, sources).values()) <= 1.05 * bound_of(demands, sources)
    # Whole demands over sources leave ceil(D / P) of them on one; layers are cut only to be below that.
    if len(assignments) > len(demands):
        whole = -(-destinations // sources) * layers * layer_bytes
        assert max(loads_of(assignments, sources).values()) < whole


@given(
    units=st.sampled_from([1, 2, 3, 4]),
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    layers=st.integers(40, 80),
    latent=st.integers(1, 40),
)
def test_replicated_heads_and_a_latent_beside_them(build, deployment_type, units, prefill, decode, layers, latent):
    """Narrow and wide choices in one plan: every source within 5 % of the bound."""
    groups = (
        Group("heads", tuple(range(layers)), (Part("k", units, "split", 8), Part("v", units, "split", 8)), "t"),
        Group("latent", tuple(range(layers)), (Part("latent", 1, "replicated", latent),), "t"),
    )
    plan = build.deployment(Geometry(groups), prefill * units, decode * units, block=1).plan()
    prove(plan)
    summary = plan.summary
    mean = sum(held * layers for held in (16 * decode * units, latent * decode * units)) / (prefill * units)
    assert summary.max_source_bytes <= 1.05 * max(mean, summary.max_destination_bytes)


@given(
    sources=st.integers(1, 5),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    layer_bytes=st.integers(1, 5),
)
def test_layers_are_cut_only_where_that_lowers_the_maximum(sources, sizes, layer_bytes):
    """Below what demands given away whole come to, the largest first, each to the source with least."""
    demands = [
        Demand(to, "mla", ("latent",), (0, 1), tuple(range(size)), layer_bytes, tuple(range(sources)))
        for to, size in enumerate(sizes)
    ]
    whole = [0] * sources
    for size in sorted(sizes, reverse=True):
        whole[whole.index(min(whole))] += size * layer_bytes
    assignments = spread(demands, sources)
    most = max(loads_of(assignments, sources).values())
    assert most <= max(whole) if len(assignments) == len(demands) else most < max(whole)


@given(
    sources=st.integers(1, 8),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    layer_bytes=st.integers(1, 5),
)
def test_cuts_cost_little(sources, sizes, layer_bytes):
    """One layer above the bound at most, and no more cuts than there are borders between sources."""
    demands = [
        Demand(to, "mla", ("latent",), (0, 1), tuple(range(size)), layer_bytes, tuple(range(sources)))
        for to, size in enumerate(sizes)
    ]
    assignments = spread(demands, sources)
    assert max(loads_of(assignments, sources).values()) < bound_of(demands, sources) + layer_bytes
    assert len(assignments) <= len(demands) + sources - 1
