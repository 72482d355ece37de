from __future__ import annotations

import pytest

from disagg_plan.architectures import FAMILIES, from_config
from disagg_plan.dtypes import dtype_bytes
from disagg_plan.errors import Refusal
from disagg_plan.geometry import Geometry, Group, Part

BF16 = dtype_bytes("bfloat16")

# name: (bytes per token in bfloat16, layers, KV heads, elements of a head)
ATTENTION = {
    "meta-llama/Meta-Llama-3.1-8B": (131_072, 32, 8, 128),
    "meta-llama/Meta-Llama-3.1-70B": (327_680, 80, 8, 128),
    "Qwen/Qwen3-8B": (147_456, 36, 8, 128),
    "Qwen/Qwen3-32B": (262_144, 64, 8, 128),
    "Qwen/Qwen3-0.6B": (114_688, 28, 8, 128),
    "Qwen/Qwen3-30B-A3B": (98_304, 48, 4, 128),
    "mistralai/Mixtral-8x7B-v0.1": (131_072, 32, 8, 128),
    "MiniMaxAI/MiniMax-M2.5": (253_952, 62, 8, 128),
    "Qwen/Qwen2.5-7B-Instruct": (57_344, 28, 4, 128),
    "mistralai/Mistral-7B-Instruct-v0.3": (131_072, 32, 8, 128),
    "microsoft/Phi-3.5-mini-instruct": (393_216, 32, 32, 96),
    "tiiuae/falcon-40b": (122_880, 60, 8, 64),
}

# name: (bytes per token in bfloat16, layers, elements of a latent)
LATENT = {
    "deepseek-ai/DeepSeek-V3": (70_272, 61, 512 + 64),
    "moonshotai/Kimi-K2-Instruct": (70_272, 61, 512 + 64),
}

# Hybrids, windows, chunks and indexers: no rule, and none that nearly fits is used.
UNKNOWN = {
    "Qwen/Qwen3.5-397B-A17B": "qwen3_5_moe_text",
    "google/gemma-4-26B-A4B": "gemma4_text",
    "openai/gpt-oss-20b": "gpt_oss",
    "deepseek-ai/DeepSeek-V3.2": "deepseek_v32",
    "zai-org/GLM-5": "glm_moe_dsa",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron_h",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4_text",
    "Qwen/Qwen3.5-27B": "qwen3_5",
    "google/gemma-2-2b": "gemma2",
    "google/gemma-2-9b": "gemma2",
    "ai21labs/Jamba-v0.1": "jamba",
    "tiiuae/falcon-mamba-7b": "falcon_mamba",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "qwen3_next",
}

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "max_position_embeddings": 4096,
}
DEEPSEEK = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 61}


def refusal_of(config):
    with pytest.raises(Refusal) as refused:
        from_config(config, BF16)
    return refused.value


def test_every_model_has_its_row(model_configs):
    assert {*ATTENTION, *LATENT, *UNKNOWN} == set(model_configs)


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, model_configs):
    size, layers, heads, elements = ATTENTION[name]
    geometry = from_config(model_configs[name], BF16)
    assert size == 2 * layers * heads * elements * 2
    assert geometry.bytes_per_token == size
    cell = 2 * elements
    assert geometry == Geometry(
        (
            Group(
                "attention",
                tuple(range(layers)),
                (Part("k", heads, "split", cell), Part("v", heads, "split", cell)),
                "attention",
            ),
        )
    )
    assert from_config(model_configs[name], dtype_bytes("fp8")).bytes_per_token == size // 2


@pytest.mark.parametrize("name", LATENT)
def test_latent(name, model_configs):
    size, layers, elements = LATENT[name]
    geometry = from_config(model_configs[name], BF16)
    assert size == layers * elements * 2
    assert geometry.bytes_per_token == size
    parts = (Part("latent", 1, "replicated", 2 * elements),)
    assert geometry == Geometry((Group("mla", tuple(range(layers)), parts, "mla"),))


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name, model_configs):
    refusal = refusal_of(model_configs[name])
    assert (refusal.code, refusal.field) == ("UnknownArchitecture", "model.config.model_type")
    assert refusal.message == f"model_type {UNKNOWN[name]!r} has no cache rule here"
    assert "State model.geometry yourself" in refusal.remedy
    assert refusal.remedy.split("Known: ")[1].split(", ") == sorted(FAMILIES)


@pytest.mark.parametrize("config", [{}, {"model_type": ""}, {"model_type": None}, {"text_config": {}}])
def test_no_model_type(config):
    assert refusal_of(config).code == "UnknownArchitecture"


def test_nested_text_config_wins():
    text = {**LLAMA, "num_hidden_layers": 2}
    assert from_config({"model_type": "llava", "num_hidden_layers": 9, "text_config": text}, 2).layers == (0, 1)


def test_heads_without_groups_are_all_kv_heads():
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert from_config(config, BF16).groups[0].parts[0].units == 32


def test_falcon_of_the_first_kind_has_one_kv_head():
    # falcon-7b: later copies of its config.json say num_kv_heads 71, which the model does not use.
    config = {
        "model_type": "falcon",
        "hidden_size": 4544,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
    }
    for more in ({}, {"num_kv_heads": 71}):
        geometry = from_config({**config, **more}, BF16)
        assert {part.units for part in geometry.groups[0].parts} == {1}
        assert geometry.bytes_per_token == 2 * 32 * 1 * 64 * 2
    # falcon-rw: an attention head for every query head.
    assert from_config({**config, "multi_query": False}, BF16).groups[0].parts[0].units == 71
    # falcon-40b: multi_query is not read.
    new = {
        **config,
        "new_decoder_architecture": True,
        "num_kv_heads": 8,
        "num_attention_heads": 128,
        "hidden_size": 8192,
    }
    assert from_config(new, BF16).groups[0].parts[0].units == 8
    undecided = {key: value for key, value in config.items() if key != "multi_query"}
    refusal = refusal_of(undecided)
    assert (refusal.code, refusal.field) == ("MissingConfigField", "model.config.multi_query")
    assert from_config({**undecided, "multi_query": True}, BF16).bytes_per_token == 8192


@pytest.mark.parametrize("missing", ["num_attention_heads", "num_hidden_layers", "hidden_size"])
def test_missing_field(missing):
    refusal = refusal_of({key: value for key, value in LLAMA.items() if key != missing})
    assert (refusal.code, refusal.field) == ("MissingConfigField", f"model.config.{missing}")
    assert "'llama' needs" in refusal.message
    assert missing in refusal.message
    assert "config.json" in refusal.remedy
    assert from_config(LLAMA, BF16).bytes_per_token == 4 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        *(
            (family, "num_key_value_heads")
            for family in ("mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "minimax_m2")
        ),
        *((family, "head_dim") for family in ("qwen3", "qwen3_moe", "minimax_m2")),
    ],
)
def test_what_a_family_has_its_own_default_for_is_not_guessed(family, missing):
    whole = {**LLAMA, "model_type": family, "head_dim": 64}
    assert from_config(whole, BF16).bytes_per_token == 4 * 2 * 8 * 64 * 2
    refusal = refusal_of({key: value for key, value in whole.items() if key != missing})
    assert (refusal.code, refusal.field) == ("MissingConfigField", f"model.config.{missing}")


@pytest.mark.parametrize("missing", ["kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers"])
def test_missing_field_of_a_latent(missing):
    refusal = refusal_of({key: value for key, value in DEEPSEEK.items() if key != missing})
    assert (refusal.code, refusal.field) == ("MissingConfigField", f"model.config.{missing}")


@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8"])
def test_field_of_another_kind(value):
    refusal = refusal_of({**LLAMA, "num_key_value_heads": value})
    assert (refusal.code, refusal.field) == ("MissingConfigField", "model.config.num_key_value_heads")
    assert refusal.message == f"num_key_value_heads is {value!r}"
    assert refusal.remedy == "A whole number from 1 to 1048576 is needed"


def test_head_dim_that_does_not_follow():
    refusal = refusal_of({**LLAMA, "hidden_size": 4100})
    assert (refusal.code, refusal.field) == ("MissingConfigField", "model.config.head_dim")
    assert refusal.message == "hidden_size 4100 is not a multiple of num_attention_heads 32"
    assert refusal.remedy == "State head_dim"
    assert from_config({**LLAMA, "hidden_size": 4100, "head_dim": 128}, BF16) == from_config(LLAMA, BF16)


@pytest.mark.parametrize("window", [1, 1024, 4095])
def test_window(window):
    config = {**LLAMA, "model_type": "mistral", "sliding_window": window}
    refusal = refusal_of(config)
    assert (refusal.code, refusal.field) == ("UnsupportedCache", "model.config.sliding_window")
    assert refusal.message.startswith(f"sliding_window {window} with max_position_embeddings 4096:")
    assert "window disabled" in refusal.remedy
    for way_out in ({"sliding_window": None}, {"use_sliding_window": False}):
        assert from_config({**config, **way_out}, BF16) == from_config(LLAMA, BF16)


@pytest.mark.parametrize("window", [4096, 262_144])
def test_window_over_every_position_is_none(window):
    assert from_config({**LLAMA, "sliding_window": window}, BF16) == from_config(LLAMA, BF16)


def test_window_without_a_known_length_is_refused():
    config = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    assert refusal_of({**config, "sliding_window": 4096}).code == "UnsupportedCache"


def test_indexer():
    refusal = refusal_of({**DEEPSEEK, "index_topk": 2048})
    assert (refusal.code, refusal.field) == ("UnsupportedCache", "model.config.index_topk")
    assert "indexer cache" in refusal.message
    assert "State model.geometry yourself" in refusal.remedy
