from __future__ import annotations

from dataclasses import replace

import pytest

from disagg_plan.errors import Refusal
from disagg_plan.geometry import Geometry, Group, Part, check_geometry

K = Part("k", 8, "split", 256)
V = Part("v", 8, "split", 256)
ATTENTION = Group("attention", (0, 1, 2), (K, V), "attention")
LATENT = Group("mla", (3, 5), (Part("latent", 1, "replicated", 1152),), "mla")


def test_groups_are_sorted_by_name():
    assert Geometry((LATENT, ATTENTION)) == Geometry((ATTENTION, LATENT))
    assert [group.name for group in Geometry((LATENT, ATTENTION)).groups] == ["attention", "mla"]


def test_layers_and_bytes():
    geometry = Geometry((LATENT, ATTENTION))
    assert geometry.layers == (0, 1, 2, 3, 5)
    assert geometry.bytes_per_token == 3 * 8 * (256 + 256) + 2 * 1152


def test_layers_of_two_groups_count_once():
    index = Group("index", (3, 5), (Part("index_k", 1, "replicated", 128),), "mla")
    geometry = Geometry((LATENT, index))
    check_geometry(geometry)
    assert geometry.layers == (3, 5)
    assert geometry.bytes_per_token == 2 * 1152 + 2 * 128


@pytest.mark.parametrize(
    ("count", "layers", "groups"),
    [
        (1, (0,), ["attention"]),
        (3, (0, 1, 2), ["attention"]),
        (4, (0, 1, 2, 3), ["attention", "mla"]),
        (9, (0, 1, 2, 3, 5), ["attention", "mla"]),
    ],
)
def test_first_layers(count, layers, groups):
    cut = Geometry((ATTENTION, LATENT)).first_layers(count)
    assert cut.layers == layers
    assert [group.name for group in cut.groups] == groups
    check_geometry(cut)


def test_no_layers_left():
    geometry = Geometry((ATTENTION,))
    with pytest.raises(Refusal) as refused:
        geometry.first_layers(0)
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("NoLayers", "layers")
    assert refusal.message == "0 layers leave no cache to move"
    assert refusal.remedy == "Keep at least one layer"
    assert geometry.first_layers(1).layers == (0,)


@pytest.mark.parametrize(
    ("groups", "message", "remedy"),
    [
        ((), "no groups: there would be nothing to move", "State at least one group"),
        (
            (ATTENTION, replace(LATENT, name="attention")),
            "group 'attention' stands twice",
            "Give every group its own name",
        ),
        ((replace(ATTENTION, layers=()),), "group 'attention' has no layers", "State both"),
        ((replace(ATTENTION, parts=()),), "group 'attention' has no parts", "State both"),
        ((replace(ATTENTION, parts=(K, K)),), "group 'attention' has part 'k' twice", "Give every part its own name"),
        (
            (ATTENTION, Group("draft", (2, 3), (K,), "draft")),
            "part 'k' of layer 2 is in groups 'attention' and 'draft'",
            "Take layer 2 out of one (group 'draft' has 2-3)",
        ),
        (
            (replace(ATTENTION, layers=(0, 1, 1)),),
            "group 'attention' has layer 1 twice",
            "State every layer once",
        ),
        (
            (replace(ATTENTION, layers=(0, 10000)),),
            "layer 10000 of group 'attention' is not between 0 and 9999",
            "Number layers from 0",
        ),
        (
            (replace(ATTENTION, layers=(-1, 0)),),
            "layer -1 of group 'attention' is not between 0 and 9999",
            "Number layers from 0",
        ),
        (
            (replace(ATTENTION, parts=(replace(K, units=0), V)),),
            "part 'k' of group 'attention' has 0 units of 256 bytes",
            "Both are whole numbers above 0",
        ),
        (
            (replace(ATTENTION, parts=(K, replace(V, cell_bytes=-4))),),
            "part 'v' of group 'attention' has 8 units of -4 bytes",
            "Both are whole numbers above 0",
        ),
        (
            (replace(ATTENTION, name="Attention"),),
            "'Attention' is no name for a group, table or part",
            "Use up to 63 of a-z, 0-9, '_', '.' and '-', beginning and ending with a letter or digit",
        ),
        (
            (replace(ATTENTION, table="block table"),),
            "'block table' is no name for a group, table or part",
            "Use up to 63 of a-z, 0-9, '_', '.' and '-', beginning and ending with a letter or digit",
        ),
        (
            (replace(ATTENTION, parts=(replace(K, name="k" * 64), V)),),
            f"'{'k' * 64}' is no name for a group, table or part",
            "Use up to 63 of a-z, 0-9, '_', '.' and '-', beginning and ending with a letter or digit",
        ),
    ],
)
def test_bad_geometry(groups, message, remedy):
    with pytest.raises(Refusal) as refused:
        check_geometry(Geometry(groups), "spec.model.geometry")
    refusal = refused.value
    assert (refusal.code, refusal.field) == ("BadGeometry", "spec.model.geometry")
    assert refusal.message == message
    assert refusal.remedy == remedy


@pytest.mark.parametrize(
    "groups",
    [
        (ATTENTION,),
        (ATTENTION, LATENT),
        (ATTENTION, Group("draft", (3,), (K,), "draft")),
        (replace(ATTENTION, layers=(0, 9999)),),
        (replace(ATTENTION, layers=(2, 0, 1)),),
        (replace(ATTENTION, name="a" * 63, table="full_attn.v1-0", parts=(replace(K, name="k" * 63), V)),),
        (replace(ATTENTION, parts=(replace(K, units=1, cell_bytes=1), V)),),
    ],
)
def test_good_geometry(groups):
    check_geometry(Geometry(groups))
