"""Kubernetes quantities of bytes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_MOST = 2**60


def parse_bytes(text: str) -> int:
    """Bytes of a quantity such as `512Mi`, `2Gi`, `4G` or `1048576`.

    Raises:
        ValueError: it is none, or not above zero.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity of bytes; write e.g. 512Mi or 2Gi")
    amount = float(match[1]) * _UNITS[match[2]]
    if amount > _MOST:
        raise ValueError(f"{text[:40]!r} is more memory than any machine has")
    value = int(amount)
    if value < 1:
        raise ValueError(f"{text!r} is no memory at all")
    return value
