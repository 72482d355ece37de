"""Canonical JSON and digests.

One document has one byte sequence: keys sorted, no spaces, UTF-8, and only objects, arrays, strings,
integers and booleans. Everything that is compared by digest goes through here.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from disagg_plan.errors import FormatError

Json = Any
"""A value made of dict, list, str, int and bool only."""


def dumps(value: Json) -> bytes:
    """Serialise canonically.

    Raises:
        FormatError: `NotCanonical` for a float, a null or a non-string key.
    """
    _check(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def loads(data: bytes | str) -> Json:
    """Parse JSON that may be pretty-printed, but holds only what the canonical form can hold.

    Raises:
        FormatError: `NotJson` for invalid JSON or a repeated key, `NotCanonical` for a float or a null.
    """
    try:
        value = json.loads(data, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise FormatError("NotJson", f"not a JSON document: {error}") from error
    _check(value, "$")
    return value


def digest(value: Json) -> str:
    """`sha256:<hex>` over the canonical bytes."""
    return "sha256:" + hashlib.sha256(dumps(value)).hexdigest()


def _no_duplicates(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        twice = sorted({key for key in names if names.count(key) > 1})
        raise FormatError("NotJson", f"key {twice[0]!r} stands twice in one object")
    return result


def _check(value: Json, path: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise FormatError("NotCanonical", f"{path}: key {key!r} is not a string")
            _check(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
    elif not isinstance(value, str | int):
        raise FormatError("NotCanonical", f"{path}: {type(value).__name__} has no canonical form here")
