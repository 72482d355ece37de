"""What a cell holds: a function of request, layer, part, unit and token, cheap enough to check gigabytes.

A cell's 64-bit words are `base + W[i]`: `base` is a hash of all its coordinates, `W` a fixed pseudo-random
sequence. A cell from anywhere else differs in every word, a shift or swap inside a cell differs too.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def request_seed(request: str) -> int:
    """64-bit seed of a request id."""
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little")


def part_key(seed: int, group: str, layer: int, part: str) -> int:
    """Hash of everything that is constant for one part of one layer of a request."""
    text = f"{seed}/{group}/{layer}/{part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def cell_words(key: int, units: Words, tokens: Words, count: int) -> Words:
    """Words of cells.

    Args:
        key: from `part_key`.
        units: shape `(u,)`, unit numbers in the whole model.
        tokens: shape `(t,)`, token positions in the request.
        count: words of a cell.

    Returns:
        Shape `(t, u, count)`.
    """
    coordinates = (tokens[:, None] << np.uint64(20)) ^ units[None, :]
    base = _mix(coordinates * _GOLDEN + np.uint64(key))
    result: Words = base[:, :, None] + _mix(np.arange(1, count + 1, dtype=np.uint64))
    return result


def _mix(values: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), element by element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
