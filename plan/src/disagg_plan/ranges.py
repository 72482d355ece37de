"""Layer ids as comma-separated ranges, `"0-39,41"`, the form that plans and specs use."""

from __future__ import annotations

import re
from collections.abc import Iterable

from disagg_plan.errors import FormatError

MAX_LAYER = 9999
"""Largest layer id accepted: bounds what a hostile range such as `0-999999999` can allocate."""

_RANGE = re.compile(r"(0|[1-9][0-9]{0,3})(?:-([1-9][0-9]{0,3}))?")


def format_ranges(layers: Iterable[int]) -> str:
    """Write layer ids as the one canonical range text; order and duplicates of the input do not matter."""
    ids = sorted(set(layers))
    runs: list[tuple[int, int]] = []
    for layer in ids:
        if runs and runs[-1][1] == layer - 1:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranges(text: str) -> tuple[int, ...]:
    """Read canonical range text into ascending layer ids.

    Raises:
        FormatError: `BadLayerRange` for anything but the text that `format_ranges` writes (out of order,
            overlapping, adjacent ranges not joined, ids above `MAX_LAYER`).
    """
    layers: list[int] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise FormatError("BadLayerRange", f"layer range {text!r}: {piece!r} is not an id or first-last")
        layers.extend(range(first, last + 1))
    if format_ranges(layers) != text:
        raise FormatError(
            "BadLayerRange", f"layer range {text!r} is not in canonical order; write {format_ranges(layers)!r}"
        )
    return tuple(layers)
