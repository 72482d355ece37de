"""Whether an object on the API server is as it should be: pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def holds(observed: Any, desired: Any) -> bool:
    """Whether everything that is desired is there; the API server's defaults and other managers' fields may be more.

    Lists are compared item by item, as the API server keeps the order that was applied. Empty values count as absent:
    the server drops some of them.
    """
    if isinstance(desired, Mapping):
        if not isinstance(observed, Mapping):
            return not desired and observed is None
        return all(holds(observed.get(key), value) for key, value in desired.items())
    if isinstance(desired, list):
        if not isinstance(observed, list):
            return not desired and observed is None
        return len(observed) == len(desired) and all(map(holds, observed, desired))
    # Not `in ("", False)`: 0 equals False, and an absent replica count means one.
    absent = observed is None and (desired == "" or desired is False)
    return absent or bool(observed == desired)
