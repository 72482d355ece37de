from __future__ import annotations

from collections import Counter

import pytest

from disagg_plan.spread import Demand, load_bound, spread


def latent(destination, layers, candidates, layer_bytes=10, group="mla"):
    return Demand(destination, group, ("latent",), (0, 1), tuple(layers), layer_bytes, tuple(candidates))


def table(assignments):
    return [(a.source, a.demand.destination, a.demand.layers) for a in assignments]


def loads(assignments, sources):
    found = Counter(dict.fromkeys(range(sources), 0))
    for assignment in assignments:
        found[assignment.source] += assignment.demand.bytes
    return [found[source] for source in range(sources)]


def test_a_sole_holder_serves():
    demands = [latent(d, range(4), [d]) for d in range(3)]
    assert table(spread(demands, 3)) == [(d, d, (0, 1, 2, 3)) for d in range(3)]


def test_equal_sides_read_each_from_its_own():
    demands = [latent(d, range(4), range(4)) for d in range(4)]
    assert table(spread(demands, 4)) == [(d, d, (0, 1, 2, 3)) for d in range(4)]


@pytest.mark.parametrize(
    ("sources", "destinations", "chosen"),
    [
        (16, 4, [0, 4, 8, 12]),
        (8, 2, [0, 4]),
        (3, 2, [0, 1]),
        (2, 4, [0, 0, 1, 1]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_whole_demands_go_to_neighbours(sources, destinations, chosen):
    layers = tuple(range(6))
    demands = [latent(d, layers, range(sources)) for d in range(destinations)]
    assert table(spread(demands, sources)) == [(chosen[d], d, layers) for d in range(destinations)]


def test_groups_of_one_destination_come_from_one_source():
    demands = [latent(d, range(4), range(2), group=group) for group in ("index", "mla") for d in range(2)]
    assert [(a.source, a.demand.destination, a.demand.group) for a in spread(demands, 2)] == [
        (0, 0, "index"),
        (0, 0, "mla"),
        (1, 1, "index"),
        (1, 1, "mla"),
    ]


def test_three_destinations_of_two_sources_are_cut_between_layers():
    demands = [latent(d, range(4), range(2)) for d in range(3)]
    assignments = spread(demands, 2)
    assert table(assignments) == [
        (0, 0, (0, 1, 2, 3)),
        (0, 1, (0, 1)),
        (1, 1, (2, 3)),
        (1, 2, (0, 1, 2, 3)),
    ]
    assert loads(assignments, 2) == [60, 60]


def test_one_layer_cannot_be_cut():
    demands = [latent(d, [0], range(2)) for d in range(3)]
    assignments = spread(demands, 2)
    assert sorted(a.demand.destination for a in assignments) == [0, 1, 2]
    assert loads(assignments, 2) == [20, 10]


def test_layers_left_over_by_rounding_go_where_room_is():
    # 4 x 5 layers over 3 sources: 20 layers, 7 at most.
    demands = [latent(d, range(5), range(3)) for d in range(4)]
    assignments = spread(demands, 3)
    assert sorted(loads(assignments, 3)) == [60, 70, 70]


def test_a_source_that_took_a_layer_too_many_takes_no_more():
    """14 layers over 3 sources: 5 at most. What rounding leaves of one reader must not make room for the next."""
    demands = [latent(d, range(size), range(3)) for d, size in enumerate([1, 3, 3, 3, 3, 1])]
    assert sorted(loads(spread(demands, 3), 3)) == [40, 50, 50]


def test_a_wide_choice_fills_what_a_narrow_one_left():
    """Heads on (0, 1) and on (2, 3), a latent on all four: the narrow demands are placed first."""
    latents = [latent(d, range(40), range(4)) for d in range(2)]
    heads = [Demand(d, "heads", ("k",), (d, d + 1), tuple(range(40)), 10, (2 * d, 2 * d + 1)) for d in range(2)]
    assignments = spread(latents + heads, 4)
    bound = load_bound(latents + heads, 4)
    assert bound == 800
    assert max(loads(assignments, 4)) <= bound


def test_narrow_choices_come_first():
    """Eight destinations: the mean decides, so the latents must go around the heads, which have less choice."""
    latents = [latent(d, range(40), range(4), 6) for d in range(8)]
    heads = [Demand(d, "heads", ("k",), (0, 1), tuple(range(40)), 10, (2, 3)) for d in range(8)]
    demands = latents + heads
    assert load_bound(demands, 4) == (8 * 240 + 8 * 400) // 4
    found = loads(spread(demands, 4), 4)
    # 3200 bytes can only come from ranks 2 and 3, and 1280 is the mean: the heads fill those, the latents the others.
    assert found == [960, 960, 1600, 1600]


def test_bound():
    demands = [latent(d, range(4), range(2)) for d in range(3)]
    assert load_bound(demands, 2) == 60
    assert load_bound(demands, 3) == 40
    assert load_bound(demands, 16) == 40
    assert load_bound(demands[:2], 3) == 40
    assert load_bound([], 4) == 0


def test_no_demands():
    assert spread([], 4) == ()
