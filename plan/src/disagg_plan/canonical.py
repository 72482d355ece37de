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

MAX_DEPTH = 64
"""Deepest nesting accepted: the interpreter's own limit differs between versions, and ends in RecursionError."""


def dumps(value: Json) -> bytes:
    """Serialise canonically.

    Raises:
        FormatError: `NotCanonical` for a float, a null, a non-string key, half a surrogate pair, or nesting
            deeper than `MAX_DEPTH`.
    """
    _check(value, "$")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def loads(data: bytes | str) -> Json:
    """Parse JSON that may be pretty-printed, but holds only what the canonical form can hold.

    Raises:
        FormatError: `NotJson` for invalid JSON or UTF-8 or a repeated key, else `NotCanonical` as `dumps`.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(text, object_pairs_hook=_no_duplicates)
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


def _check(value: Json, path: str, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise FormatError("NotCanonical", f"{path[:80]}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise FormatError("NotCanonical", f"{path}: key {key!r} is not a string")
            _check(key, path, depth)
            _check(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth + 1)
    elif isinstance(value, str):
        if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
            raise FormatError("NotCanonical", f"{path!r}: {value!r} holds half a surrogate pair")
    elif not isinstance(value, int):
        raise FormatError("NotCanonical", f"{path}: {type(value).__name__} has no canonical form here")
