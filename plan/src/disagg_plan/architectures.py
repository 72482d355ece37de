"""Geometry from a Hugging Face `config.json`.

One entry of `FAMILIES` per `model_type`. A rule reads only fields that decide the cache of that family, refuses
what it cannot place, and never guesses: an unknown `model_type` is refused with the way to state its geometry.
To add a family, write or reuse a rule, add its entry, and add its row to the table test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from disagg_plan.errors import Refusal
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.ranges import MAX_LAYER

Config = Mapping[str, Any]
Rule = Callable[[Config, int], Geometry]

_FIELD = "model.config"
_MOST = 1 << 20
"""Largest number that a config.json field of a cache's geometry may hold."""

_EXPLICIT = (
    "State model.geometry yourself: groups, each with name, layers ('0-31') and parts "
    "(name, units, sharding split|replicated, elements)"
)


def from_config(config: Config, element_bytes: int) -> Geometry:
    """Derive the geometry of a model.

    Args:
        config: the parsed config.json; a nested `text_config` is used where there is one.
        element_bytes: bytes of one cache element (`kvCache.dtype`).

    Raises:
        Refusal: `UnknownArchitecture`, `MissingConfigField` or `UnsupportedCache`.
    """
    text = config.get("text_config")
    inner: Config = {**config, **text} if isinstance(text, Mapping) else config
    model_type = str(inner.get("model_type", ""))
    rule = FAMILIES.get(model_type)
    if rule is None:
        raise Refusal(
            "UnknownArchitecture",
            f"{_FIELD}.model_type",
            f"model_type {model_type!r} has no cache rule here",
            f"{_EXPLICIT}. Known: {', '.join(sorted(FAMILIES))}",
        )
    return rule(inner, element_bytes)


def _integer(config: Config, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
                raise Refusal(
                    "MissingConfigField",
                    f"{_FIELD}.{name}",
                    f"{name} is {repr(value)[:40]}",
                    f"A whole number from 1 to {_MOST} is needed",
                )
            return value
    raise Refusal(
        "MissingConfigField",
        f"{_FIELD}.{names[0]}",
        f"model_type {config.get('model_type')!r} needs {' or '.join(names)}, and it is not there",
        "Copy it from the model's config.json, or state model.geometry",
    )


def _layers(config: Config) -> tuple[int, ...]:
    count = _integer(config, "num_hidden_layers")
    if count > MAX_LAYER + 1:
        raise Refusal(
            "MissingConfigField",
            f"{_FIELD}.num_hidden_layers",
            f"{count} layers are more than the {MAX_LAYER + 1} that a plan can name",
            "Copy it from the model's config.json",
        )
    return tuple(range(count))


def _refuse_windows(config: Config) -> None:
    window = config.get("sliding_window")
    longest = config.get("max_position_embeddings")
    if window is None or config.get("use_sliding_window") is False:
        return
    if isinstance(longest, int) and isinstance(window, int) and window >= longest:
        # Phi-3.5 states a window of 262,144 over 131,072 positions: no token is ever outside it.
        return
    raise Refusal(
        "UnsupportedCache",
        f"{_FIELD}.sliding_window",
        f"sliding_window {window} with max_position_embeddings {longest}: which pages move depends on the window",
        "Sliding windows are not planned yet; serve with the window disabled, or state model.geometry with full "
        "attention",
    )


def _attention(config: Config, element_bytes: int) -> Geometry:
    """Dense decoder-only attention: MHA, GQA and MQA, one group of `k` and `v`."""
    _refuse_windows(config)
    heads = _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads", "num_kv_heads", "num_attention_heads")
    if config.get("head_dim") is not None:
        head_dim = _integer(config, "head_dim")
    else:
        hidden = _integer(config, "hidden_size")
        if hidden % heads:
            raise Refusal(
                "MissingConfigField",
                f"{_FIELD}.head_dim",
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}",
                "State head_dim",
            )
        head_dim = hidden // heads
    layers = _layers(config)
    cell = head_dim * element_bytes
    parts = (Part("k", kv_heads, "split", cell), Part("v", kv_heads, "split", cell))
    return Geometry((Group("attention", layers, parts, "attention"),))


def _attention_of(*stated: str) -> Rule:
    """`_attention` for a family that has its own default for the fields `stated`: left out, they are not guessed."""

    def rule(config: Config, element_bytes: int) -> Geometry:
        for name in stated:
            _integer(config, name)
        return _attention(config, element_bytes)

    return rule


def _falcon(config: Config, element_bytes: int) -> Geometry:
    """Falcon: the 7B has one KV head, and `num_kv_heads` is not read unless `new_decoder_architecture` is set."""
    if config.get("new_decoder_architecture") is not True:
        multi_query = config.get("multi_query")
        if not isinstance(multi_query, bool):
            raise Refusal(
                "MissingConfigField",
                f"{_FIELD}.multi_query",
                f"multi_query is {multi_query!r}, and it decides the number of KV heads",
                "Copy it from the model's config.json, or state model.geometry",
            )
        heads = 1 if multi_query else _integer(config, "num_attention_heads")
        config = {**config, "num_key_value_heads": heads}
    return _attention(config, element_bytes)


def _latent(config: Config, element_bytes: int) -> Geometry:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent per token, whole on every rank.

    `num_key_value_heads` of these configs counts query heads and says nothing about the cache: not read.
    """
    if config.get("index_topk") is not None:
        raise Refusal(
            "UnsupportedCache",
            f"{_FIELD}.index_topk",
            "the model keeps an indexer cache beside its latents, which is not planned yet",
            _EXPLICIT,
        )
    elements = _integer(config, "kv_lora_rank") + _integer(config, "qk_rope_head_dim")
    layers = _layers(config)
    parts = (Part("latent", 1, "replicated", elements * element_bytes),)
    return Geometry((Group("mla", layers, parts, "mla"),))


FAMILIES: dict[str, Rule] = {
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "falcon": _falcon,
    "kimi_k2": _latent,
    "llama": _attention,
    "minimax_m2": _attention_of("num_key_value_heads", "head_dim"),
    "mistral": _attention_of("num_key_value_heads"),
    "mixtral": _attention_of("num_key_value_heads"),
    "phi3": _attention,
    "qwen2": _attention_of("num_key_value_heads"),
    "qwen3": _attention_of("num_key_value_heads", "head_dim"),
    "qwen3_moe": _attention_of("num_key_value_heads", "head_dim"),
}
"""Cache rule of every `model_type` that is known."""
