"""From the facts of a started engine's ranks to the geometry of its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from disagg_plan.errors import FormatError, Refusal
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.probe_facts import decode_facts, encode_facts
from disagg_plan.probed import Files, Merged, merge
from disagg_plan.probed_choice import choose

Make = Callable[..., dict[str, dict[str, Any]]]
Documents = dict[str, dict[str, Any]]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def read(documents: Documents) -> Files:
    return {file: decode_facts(json.dumps(document).encode(), file) for file, document in documents.items()}


def merged(documents: Documents) -> Merged:
    return merge(read(documents))


def heads(units: int, layers: tuple[int, ...] = (0, 1, 2, 3), cell: int = 128) -> Geometry:
    parts = (Part("k", units, "split", cell), Part("v", units, "split", cell))
    return Geometry((Group("attention", layers, parts, "attention"),))


# One row for each kind of engine: how it is made, its units, what is stated for it, and its order.
KINDS: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "CPU_ATTN": ({}, 4, "opaque", "HND"),
    "CPU_ATTN TP 2": ({"tensor": 2}, 4, "opaque", "HND"),
    "TP of all heads": ({"tensor": 4}, 4, "opaque", "HND"),
    "TP above heads": ({"tensor": 8}, 4, "opaque", "HND"),
    "one head, TP 2": ({"tensor": 2, "heads": 1}, 1, "opaque", "HND"),
    "PP 2": ({"stages": [(0, 1), (2, 3)]}, 4, "opaque", "HND"),
    "TP 2, PP 2": ({"stages": [(0, 1), (2, 3)], "tensor": 2}, 4, "opaque", "HND"),
    "FLASH_ATTN HND": ({"backend": "FLASH_ATTN"}, 4, "joint", "HND"),
    "FLASH_ATTN NHD": ({"backend": "FLASH_ATTN", "layout": "NHD"}, 4, "joint", "NHD"),
    "unknown HND": ({"backend": "FLEX_ATTENTION"}, 4, "opaque", "HND"),
    "unknown NHD": ({"backend": "FLEX_ATTENTION", "layout": "NHD"}, 4, "joint", "NHD"),
    "K|V axis HND": ({"backend": "OTHER", "order": "joint"}, 4, "joint", "HND"),
    "K|V axis NHD": ({"backend": "OTHER", "order": "joint", "layout": "NHD", "tensor": 2}, 4, "joint", "NHD"),
    "K and V outside HND": ({"backend": "OTHER", "order": "separate"}, 4, "separate", "HND"),
    "K and V outside NHD": ({"backend": "OTHER", "order": "separate", "layout": "NHD"}, 4, "separate", "NHD"),
    "two tensors": ({"backend": "OTHER", "order": "two", "layout": "NHD"}, 4, "separate", "NHD"),
    "heads as many as tokens": ({"heads": 32}, 32, "opaque", "HND"),
    "one token a block, NHD": ({"backend": "OTHER", "block": 1, "layout": "NHD"}, 4, "joint", "NHD"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_geometry_of_the_whole_model(probe_files: Make, kind: str) -> None:
    options, units, pages, layout = KINDS[kind]
    found = merged(probe_files(**options))
    assert found.geometry == heads(units)
    choice = choose(found)
    assert (choice.pages, choice.layout) == (pages, layout)


def test_heads_on_fewer_units_than_ranks_are_said_to_be_replicas(probe_files: Make) -> None:
    assert any("each is on 2 of 8" in note for note in merged(probe_files(tensor=8)).notes)
    assert any("4 KV heads, 2 on each of 2" in note for note in merged(probe_files(tensor=2)).notes)


def test_with_one_rank_its_tensors_decide_and_not_the_config(probe_files: Make) -> None:
    assert merged(probe_files(totalHeads=16)).geometry == heads(4)


def test_k_and_v_of_other_sizes(probe_files: Make) -> None:
    for order in ("run", "two"):
        (group,) = merged(probe_files(order=order, head_sizes=(48, 32), backend="OTHER")).geometry.groups
        assert group.parts == (Part("k", 4, "split", 192), Part("v", 4, "split", 128))


def test_scales_beside_k_and_v_make_one_part(probe_files: Make) -> None:
    documents = probe_files(dtype="int8")
    for layer in documents["rank-0.json"]["layers"]:
        layer["headSize"], layer["headSizeV"] = 28, 28
    (group,) = merged(documents).geometry.groups
    assert group.parts == (Part("kv", 4, "split", 64),)


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("backend", "pages"), [("FLASHMLA", "joint"), ("OTHER_MLA", "opaque")])
def test_latents_are_one_replicated_unit(probe_files: Make, tensor: int, backend: str, pages: str) -> None:
    found = merged(probe_files(tensor=tensor, heads=128, order="latent", head_sizes=(576, 0), backend=backend))
    assert found.geometry == Geometry((Group("mla", (0, 1, 2, 3), (Part("latent", 1, "replicated", 2304),), "mla"),))
    assert choose(found).pages == pages


def test_cache_groups_are_tables(probe_files: Make) -> None:
    found = merged(probe_files(stages=[(0, 1), (2, 3)], groups={1: 1, 3: 1}))
    assert [(group.name, group.layers, group.table) for group in found.geometry.groups] == [
        ("attention", (0, 2), "attention"),
        ("attention-2", (1, 3), "attention-2"),
    ]
    assert found.stages == ((0, 1), (2, 3))


def test_unlike_layers_of_one_cache_group_share_its_table(probe_files: Make) -> None:
    documents = probe_files()
    other = probe_files(head_sizes=(64, 64))["rank-0.json"]["layers"][3]
    documents["rank-0.json"]["layers"][3] = other
    assert [(group.name, group.layers, group.table) for group in merged(documents).geometry.groups] == [
        ("attention", (0, 1, 2), "attention"),
        ("attention-2", (3,), "attention"),
    ]


# What is said beside the geometry.


def test_a_known_profile_and_config_leave_nothing_to_declare(probe_files: Make) -> None:
    choice = choose(merged(probe_files(config=LLAMA)))
    assert choice.profile is not None
    assert choice.profile.name == "vllm/CPU_ATTN"
    assert choice.derived
    assert "no explicit geometry is needed" in choice.config_says


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "FLEX_ATTENTION"}, "'FLEX_ATTENTION' has no page layout"),
        ({"version": "0.29.0"}, "0.29.0"),
        ({"backend": "FLASH_ATTN", "order": "separate"}, "it has joint pages, the tensors are separate"),
        ({"layout": "NHD"}, "it has the order HND, the tensors NHD"),
        ({"order": "latent", "head_sizes": (576, 0)}, "it serves per-head caches only"),
        ({"backend": "FLASHMLA"}, "it serves latents only"),
    ],
)
def test_a_profile_that_does_not_fit_is_said_with_the_reason(
    probe_files: Make, options: dict[str, Any], said: str
) -> None:
    choice = choose(merged(probe_files(**options)))
    assert choice.profile is None
    assert said in choice.profile_says
    assert "state engine.pages" in choice.profile_says


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "model_type '' has no cache rule"),
        ({**LLAMA, "num_hidden_layers": 8}, "gives another geometry (8192 bytes per token, the engine keeps 4096)"),
    ],
)
def test_a_config_that_says_something_else(probe_files: Make, config: dict[str, Any], said: str) -> None:
    choice = choose(merged(probe_files(config=config)))
    assert not choice.derived
    assert said in choice.config_says


def test_uneven_stages_are_noted(probe_files: Make) -> None:
    assert any("pipelineLayers" in note for note in choose(merged(probe_files(stages=[(0,), (1, 2, 3)]))).notes)
    assert not any("pipelineLayers" in note for note in choose(merged(probe_files(stages=[(0, 1), (2, 3)]))).notes)


# Refusals.

BOTH = {"tensor": 2}


def layer(documents: Documents, rank: int = 0, number: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = documents[f"rank-{rank}.json"]["layers"][number]
    return found


def with_layer(**fields: Any) -> Callable[[Documents], None]:
    return lambda documents: layer(documents).update(fields)


def with_tensor(**fields: Any) -> Callable[[Documents], None]:
    return lambda documents: layer(documents)["tensors"][0].update(fields)


def with_rank(rank: int, /, **fields: Any) -> Callable[[Documents], None]:
    return lambda documents: documents[f"rank-{rank}.json"].update(fields)


REFUSED: dict[str, tuple[dict[str, Any], Callable[[Documents], Any], str, str, list[str]]] = {
    "no files": ({}, dict.clear, "MissingRank", "rank-0.json", []),
    "a rank is missing": (
        {"tensor": 4},
        lambda documents: documents.pop("rank-2.json"),
        "MissingRank",
        "rank-2.json",
        ["3 rank files", "has 4"],
    ),
    "very many ranks": (
        {},
        with_rank(0, tensor=1 << 20, pipeline=1 << 20),
        "MissingRank",
        "rank-1.json",
        ["1099511627776", "rank-8.json missing"],
    ),
    "model": (BOTH, with_rank(1, model="other"), "RanksDisagree", "rank-1.json: model", ["'other'", "'m'"]),
    "tensor": (BOTH, with_rank(1, tensor=4), "RanksDisagree", "rank-1.json: tensor", ["is 4", "is 2"]),
    "revision": (BOTH, with_rank(1, revision="r"), "RanksDisagree", "rank-1.json: revision", ["'r'", "None"]),
    "rank under another name": (BOTH, with_rank(1, rank=0), "RanksDisagree", "rank-1.json: rank", ["is 0", "rank 1"]),
    "context": ({}, with_rank(0, context=2), "UnsupportedTopology", "rank-0.json: context", ["2"]),
    "dtype": ({}, with_rank(0, dtype="nvfp4"), "UnknownDtype", "rank-0.json: dtype", ["'nvfp4'"]),
    "no cache": ({}, with_rank(0, layers=[]), "BadStages", "rank-0.json: layers", []),
    "layers of a stage": (
        BOTH,
        lambda documents: documents["rank-1.json"]["layers"].pop(),
        "RanksDisagree",
        "rank-1.json: layers",
        ["layers 0-2", "layers 0-3"],
    ),
    "heads of a layer": (
        BOTH,
        lambda documents: layer(documents, 1).update(headSize=16),
        "RanksDisagree",
        "rank-1.json: model.layers.1.self_attn.attn.headSize",
        ["16", "32"],
    ),
    "layer in two stages": (
        {"stages": [(0, 1), (1, 2)]},
        lambda documents: None,
        "RanksDisagree",
        "rank-1.json: model.layers.1.self_attn.attn.layer",
        ["rank-0.json"],
    ),
    "sliding window": (
        {},
        with_layer(spec="SlidingWindowSpec"),
        "UnsupportedCache",
        "rank-0.json: layers.spec",
        ["layers 1 keep SlidingWindowSpec", "sliding window"],
    ),
    "state": ({}, with_layer(spec="MambaSpec"), "UnsupportedCache", "rank-0.json: layers.spec", ["recurrent state"]),
    "unheard": ({}, with_layer(spec="NewSpec"), "UnsupportedCache", "rank-0.json: layers.spec", ["NewSpec"]),
    "indexer": (
        {},
        with_layer(spec="MLAAttentionSpec", role="indexer"),
        "UnsupportedCache",
        "rank-0.json: layers.spec",
        ["indexer cache beside"],
    ),
    "nameless layer": (
        {},
        with_layer(name="draft.attn", layer=None),
        "UnknownLayer",
        "rank-0.json: draft.attn.name",
        [],
    ),
    "no group": (
        {},
        with_layer(group=None),
        "UnsupportedCache",
        "rank-0.json: model.layers.1.self_attn.attn.group",
        ["shares another layer's cache"],
    ),
    "shared memory": (
        {},
        with_tensor(storage=0),
        "UnsupportedCache",
        "rank-0.json: model.layers.1.self_attn.attn.offset",
        ["model.layers.0"],
    ),
    "two caches of a layer": (
        {},
        with_layer(layer=0, name="model.layers.0.indexer"),
        "UnsupportedCache",
        "rank-0.json: model.layers.0.indexer.layer",
        ["two caches"],
    ),
    "axes not known": (
        {},
        with_layer(axes=[], axesProblem="it was asked and said no"),
        "UnknownAxes",
        "rank-0.json: model.layers.1.self_attn.attn.axes",
        ["asked and said no"],
    ),
    "axis of its own": (
        {},
        with_layer(axes=["blocks", "parts", "tokens", "heads*content"]),
        "UnknownAxes",
        "rank-0.json: model.layers.1.self_attn.attn.axes",
        ["'heads*content' of size 64"],
    ),
    "axes and shape": (
        {},
        with_layer(axes=["blocks", "tokens", "content"]),
        "UnknownAxes",
        "rank-0.json: model.layers.1.self_attn.attn.axes",
        ["[7, 4, 32, 64]"],
    ),
    "no tokens": (
        {},
        with_layer(axes=["blocks", "heads", "parts", "content"]),
        "UnknownAxes",
        "rank-0.json: model.layers.1.self_attn.attn.axes",
        ["no axis counts tokens"],
    ),
    "heads of the spec": (
        {},
        with_layer(heads=8),
        "UnknownAxes",
        "rank-0.json: model.layers.1.self_attn.attn.axes",
        ["4 entries", "8 KV heads"],
    ),
    "kernel blocks": (
        {},
        with_layer(blockTokens=64),
        "KernelBlocks",
        "rank-0.json: model.layers.1.self_attn.attn.shape",
        ["32 tokens", "64"],
    ),
    "padded pages": (
        {},
        with_tensor(strides=[8448, 2048, 64, 1]),
        "UnsupportedCache",
        "rank-0.json: model.layers.1.self_attn.attn.strides",
        ["8448 elements apart and hold 8192"],
    ),
    "heads outside blocks": (
        {},
        with_tensor(strides=[2048, 14336, 64, 1]),
        "UnsupportedCache",
        "rank-0.json: model.layers.1.self_attn.attn.strides",
        ["14336", "neither order"],
    ),
    "content not innermost": (
        {},
        with_tensor(strides=[8192, 2048, 1, 32]),
        "UnsupportedCache",
        "rank-0.json: model.layers.1.self_attn.attn.strides",
        ["32 apart"],
    ),
    "no tensors": (
        {},
        with_layer(tensors=[]),
        "UnsupportedCache",
        "rank-0.json: model.layers.1.self_attn.attn.tensors",
        ["0 tensors"],
    ),
    "mixed orders": (
        {},
        with_tensor(strides=[8192, 64, 256, 1]),
        "UnsupportedCache",
        "rank-0.json: model.layers.1.self_attn.attn.strides",
        ["run NHD", "run HND"],
    ),
    "unclear heads": (
        BOTH,
        lambda documents: [document.update(totalHeads=8) for document in documents.values()],
        "UnclearHeads",
        "rank-0.json: model.layers.0.self_attn.attn.heads",
        ["2 heads", "of 2 tensor-parallel ranks", "states 8"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_add_up_is_refused_by_file_field_and_values(probe_files: Make, case: str) -> None:
    options, change, code, field, said = REFUSED[case]
    documents = json.loads(json.dumps(probe_files(**options)))
    change(documents)
    with pytest.raises(Refusal) as refused:
        merged(documents)
    assert (refused.value.code, refused.value.field) == (code, field)
    for text in said:
        assert text in refused.value.message
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "document"),
        (b"{", "document"),
        (b"[]", "document"),
        (b"\xff\xfe", "document"),
        (b'{"schema": "disagg.dev/probe/v2"}', "schema"),
    ],
)
def test_a_file_that_is_no_rank_file_is_named(text: bytes, said: str) -> None:
    with pytest.raises(FormatError) as wrong:
        decode_facts(text, "rank-3.json")
    assert wrong.value.code == "BadFacts"
    assert wrong.value.message.startswith(f"rank-3.json: {said}")


@pytest.mark.parametrize(
    ("field", "value"), [("rank", -1), ("tensor", 0), ("tensor", True), ("dtype", 3), ("model", ""), ("unknown", 1)]
)
def test_a_wrong_field_is_named_with_its_value(probe_files: Make, field: str, value: Any) -> None:
    document = {**probe_files()["rank-0.json"], field: value}
    with pytest.raises(FormatError) as wrong:
        decode_facts(json.dumps(document).encode(), "rank-0.json")
    assert field in wrong.value.message
    assert repr(value) in wrong.value.message


def test_facts_round_trip(probe_files: Make) -> None:
    for file, facts in read(probe_files(tensor=2, config=LLAMA)).items():
        assert decode_facts(encode_facts(facts).encode(), file) == facts
