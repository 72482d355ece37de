"""Axes of a cache tensor, from what its engine's rule for shapes says of other sizes."""

from __future__ import annotations

import pytest

from disagg_agent.engines.vllm.axes import AxesUnknownError, ShapeOf, Sizes, name_axes, plain_fields

RULES: dict[str, tuple[ShapeOf, list[str]]] = {
    "one order for all, in bytes": (
        lambda s: (s.blocks, s.heads, s.tokens, 2 * s.head_size * 4),
        ["blocks", "heads", "tokens", "content"],
    ),
    "scales beside K and V": (
        lambda s: (s.blocks, s.heads, s.tokens, 2 * s.head_size + 8),
        ["blocks", "heads", "tokens", "content"],
    ),
    "K before V": (
        lambda s: (2, s.blocks, s.tokens, s.heads, s.head_size),
        ["parts", "blocks", "tokens", "heads", "content"],
    ),
    "K and V in a block": (
        lambda s: (s.blocks, 2, s.tokens, s.heads, s.head_size),
        ["blocks", "parts", "tokens", "heads", "content"],
    ),
    "latent": (lambda s: (s.blocks, s.tokens, s.head_size), ["blocks", "tokens", "content"]),
    "planes of K and V": (
        lambda s: (s.blocks, 2, s.tokens, s.heads * s.head_size * 4),
        ["blocks", "parts", "tokens", "heads*content"],
    ),
    "a slot for each K and each V": (
        lambda s: (s.blocks, 2 * s.heads, s.tokens, s.head_size),
        ["blocks", "heads times 10/5", "tokens", "content"],
    ),
    "packed by sixteen": (
        lambda s: (s.blocks, s.heads, s.head_size // 16, s.tokens, 16),
        ["blocks", "heads", "content", "tokens", "constant 16"],
    ),
    "several tokens in a state": (
        lambda s: (s.blocks, s.heads, s.tokens // 4, s.head_size),
        ["blocks", "heads", "tokens times 48/192", "content"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_axes_are_named_by_what_they_follow(rule: str) -> None:
    shape_of, axes = RULES[rule]
    assert name_axes(shape_of) == axes


def test_a_rule_whose_rank_depends_on_sizes_is_refused() -> None:
    def rule(sizes: Sizes) -> tuple[int, ...]:
        return (sizes.blocks, sizes.tokens) if sizes.heads > 16 else (sizes.blocks, sizes.heads, sizes.tokens)

    with pytest.raises(AxesUnknownError, match="another number of heads"):
        name_axes(rule)


def test_only_plain_fields_of_a_config_are_kept() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "rope_theta": 1e4,
        "use_sliding_window": False,
        "sliding_window": None,
        "architectures": ["A"],
        "quantization_config": {"bits": 4},
        "text_config": {"head_dim": 32, "layer_types": ["full"]},
    }
    assert plain_fields(config) == {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "rope_theta": 1e4,
        "use_sliding_window": False,
        "text_config": {"head_dim": 32},
    }
