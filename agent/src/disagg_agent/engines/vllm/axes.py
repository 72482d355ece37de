"""What each axis of a cache tensor counts, found by asking for shapes of other sizes and seeing which axes follow.

Two axes of a real tensor may be equally long by chance (16 heads, 16 tokens), so a shape alone proves nothing. The
engine's own rule for shapes is asked once for each size that could matter, with that size alone changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Sizes that a cache tensor is made from; `head_size` is in elements."""

    blocks: int
    tokens: int
    heads: int
    head_size: int


ShapeOf = Callable[[Sizes], Sequence[int]]
"""The engine's rule: sizes in, shape of one layer's cache out."""

# Backends insist on blocks and heads of round sizes, so these are primes times what all of them accept.
_ASKED = Sizes(blocks=11, tokens=64 * 3, heads=5, head_size=64 * 2)
_CHANGED = Sizes(blocks=13, tokens=64 * 7, heads=17, head_size=64 * 4)
_NAMES = {"blocks": "blocks", "tokens": "tokens", "heads": "heads", "head_size": "content"}


class AxesUnknownError(Exception):
    """The engine's rule gives no shape, or one whose axes have no meaning of their own."""


def name_axes(shape_of: ShapeOf) -> list[str]:
    """Name every axis of the shapes that a rule gives.

    Returns:
        For each axis `blocks`, `tokens` or `heads` if it is as long as that size, `content` if its length follows the
        head size alone, `parts` for a constant 2 (K and V); else what it mixes, such as `heads*content`.

    Raises:
        AxesUnknownError: shapes of different ranks.
    """
    asked = shape_of(_ASKED)
    follows: list[list[str]] = [[] for _ in asked]
    for field in _NAMES:
        shape = shape_of(replace(_ASKED, **{field: getattr(_CHANGED, field)}))
        if len(shape) != len(asked):
            raise AxesUnknownError(f"shapes {list(asked)} and {list(shape)} for another number of {field}")
        for axis, (before, after) in enumerate(zip(asked, shape, strict=True)):
            if before != after:
                follows[axis].append(field)
    return [_name(fields, size) for fields, size in zip(follows, asked, strict=True)]


def _name(fields: list[str], size: int) -> str:
    if not fields:
        return "parts" if size == 2 else f"constant {size}"
    if len(fields) > 1:
        return "*".join(_NAMES[field] for field in fields)
    (field,) = fields
    if field != "head_size" and size != getattr(_ASKED, field):
        return f"{_NAMES[field]} times {size}/{getattr(_ASKED, field)}"
    return _NAMES[field]


def plain_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config.json is a number, text or truth value, `text_config` included: all that decides a cache."""
    kept: dict[str, Any] = {key: value for key, value in config.items() if isinstance(value, bool | int | float | str)}
    text = config.get("text_config")
    if isinstance(text, Mapping):
        kept["text_config"] = plain_fields(text)
    return kept
