"""Plans carried out byte by byte, over a broad sample of ways to cut and lay out a cache."""

from __future__ import annotations

import copy
import itertools

import pytest

from disagg_plan import wire
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.proof import prove

JOINT = [{"backend": "JOINT", "layout": layout} for layout in ("HND", "NHD")]
SEPARATE = [{"backend": "SEPARATE", "layout": layout} for layout in ("HND", "NHD")]
OPAQUE = {"backend": "OPAQUE"}

LAYOUTS = [*itertools.product([*JOINT, *SEPARATE], repeat=2), (OPAQUE, OPAQUE)]


def name_of(value):
    if isinstance(value, tuple) and value and isinstance(value[0], dict):
        return ">".join("/".join(str(text) for text in options.values()) for options in value)
    return None


def check(execution, deployment, *requests):
    """Prove and carry out a deployment's plan for requests, each (blocks of prefix hit, tokens behind it)."""
    plan = deployment.plan()
    prove(plan)
    for start_blocks, tokens in requests:
        executed = execution(wire.document(plan), deployment, start_blocks, tokens)
        executed.by_copies()
        executed.by_runs()


@pytest.mark.parametrize("layouts", LAYOUTS, ids=name_of)
@pytest.mark.parametrize(
    ("units", "prefill", "decode"),
    [
        (8, 1, 1),
        (8, 2, 4),
        (8, 4, 2),
        (6, 3, 2),
        (6, 2, 3),
        (2, 4, 8),
        (2, 8, 4),
        (4, 8, 2),
        (4, 2, 8),
        (1, 3, 2),
        (3, 6, 1),
        (8, (2, 2), (4, 1)),
        (2, (1, 3), (4, 2)),
    ],
)
def test_heads(build, execution, units, prefill, decode, layouts):
    deployment = build.deployment(build.heads(units, layers=4, cell=3), prefill, decode, *layouts, block=4)
    check(execution, deployment, (0, 10), (2, 5))


@pytest.mark.parametrize("layouts", LAYOUTS, ids=name_of)
@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 1), (2, 3), (3, 2), (16, 4), ((2, 2), (3, 3))])
def test_latent(build, execution, prefill, decode, layouts):
    check(execution, build.deployment(build.latent(layers=5, cell=6), prefill, decode, *layouts, block=4), (1, 6))


@pytest.mark.parametrize("layouts", LAYOUTS[:-1:3], ids=name_of)
@pytest.mark.parametrize("blocks", list(itertools.product([8, 16, 32, 48], repeat=2)), ids=str)
def test_blocks(build, execution, layouts, blocks):
    """Whole blocks, a ragged tail, a prefix hit, both, one token, and nothing."""
    source, destination = ({**options, "block": block} for options, block in zip(layouts, blocks, strict=True))
    deployment = build.deployment(build.heads(2, layers=1, cell=2), 1, 2, source, destination)
    check(execution, deployment, (0, 96), (0, 41), (1, 48), (2, 23), (1, 1), (1, 0))


@pytest.mark.parametrize("block", [8, 16, 32, 48])
def test_opaque_blocks(build, execution, block):
    deployment = build.deployment(build.heads(6, layers=2, cell=2), 3, 2, OPAQUE, OPAQUE, block=block)
    check(execution, deployment, (0, 96), (0, 41), (1, 23), (1, 0))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ([(0, 1, 2, 3, 4, 5, 6)], [(0, 1, 2), (3, 4, 5, 6)]),
        ([(0, 1), (2, 3, 4, 5, 6)], [(0, 1, 2, 3, 4), (5, 6)]),
        ([(0,), (1, 2, 3), (4, 5, 6)], [(0, 1, 2, 3), (4, 5), (6,)]),
        ([(6, 0, 3), (1, 2, 4, 5)], [(5, 6), (0, 2, 4), (1, 3)]),
    ],
)
def test_unequal_pipelines(build, execution, prefill, decode):
    for geometry, tensor in ((build.heads(4, layers=7, cell=3), 4), (build.latent(layers=7, cell=5), 3)):
        sides = {"stages": prefill}, {"stages": decode, "layout": "NHD"}
        check(execution, build.deployment(geometry, 2, tensor, *sides, block=4), (1, 7))


def test_groups_that_share_a_table(build, execution):
    """Heads, and an index beside them that every rank holds whole, in one list of block ids."""
    geometry = Geometry(
        (
            Group("attention", (0, 1, 2, 5), (Part("k", 4, "split", 4), Part("v", 4, "split", 3)), "blocks"),
            Group("index", (1, 2, 5), (Part("index_k", 1, "replicated", 5),), "blocks"),
        )
    )
    for backend in ("JOINT", "SEPARATE"):
        check(
            execution, build.deployment(geometry, (2, 2), (4, 1), {"block": 8}, {"block": 12}, backend=backend), (1, 21)
        )


def test_parts_that_are_cut_unlike(build, execution):
    """A page whose parts follow different rules: heads, an index on all ranks, another number of heads."""
    parts = (Part("k", 6, "split", 2), Part("index", 1, "replicated", 3), Part("v", 2, "split", 4))
    geometry = Geometry((Group("mixed", (0, 1, 3), parts, "mixed"),))
    for prefill, decode in ((2, 6), (6, 2), (1, 2), (2, 1)):
        check(execution, build.deployment(geometry, prefill, decode, backend="SEPARATE", block=4), (0, 9))


def test_padding_is_never_touched(build, execution):
    """Strides beyond the bytes of a page, as where one tensor holds the pages of many layers."""
    deployment = build.deployment(build.heads(4, cell=3), 2, 4, {"block": 8}, {"block": 4, "layout": "NHD"})
    document = wire.document(deployment.plan())
    for side, more in (("source", 13), ("destination", 200)):
        for page in document[side]["pages"]:
            page["regions"][0]["stride"] += more
    prove(wire.seal(document))
    executed = execution(document, deployment, 1, 11)
    executed.by_copies()
    executed.by_runs()


# The second proof can fail: each of these is one byte, rank, layer or token off.


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("shapes", 0, 0, "src"), 4),
        (("shapes", 0, 0, "dst"), 6),
        (("shapes", 0, 0, "bytes"), 2),
        (("shapes", 0, 0, "layers"), "0-2"),
        (("shapes", 0, 0, "srcSub"), 6),
        (("shapes", 0, 0, "dstSub"), 23),
        (("shapes", 0, 0, "repeat", 0, "count"), 1),
        (("shapes", 0, 0, "repeat", 0, "src"), 7),
        (("shapes", 0, 0, "repeat", 0, "dst"), 5),
        (("edges", 0, "from"), 1),
        (("edges", 0, "to"), 3),
        (("edges", 0, "shape"), 1),
        (("source", "ranks", 0, "pages", "attention"), 9),
        (("groups", 0, "subTokens"), 1),
        (("completions", "0"), [0]),
        (("destination", "pages", 0, "regions", 0, "stride"), 1),
        (("destination", "pages", 0, "regions", 0, "bytes"), 1),
    ],
)
def test_a_wrong_document_is_seen(build, execution, path, value):
    deployment = build.deployment(build.heads(4, cell=3), 2, 4, {"block": 8}, {"block": 12})
    document = copy.deepcopy(wire.document(deployment.plan()))
    assert execution(document, deployment, 0, 24).is_right()
    found = document
    for key in path[:-1]:
        found = found[key]
    assert found[path[-1]] != value
    found[path[-1]] = value
    assert not execution(document, deployment, 0, 24).is_right()
