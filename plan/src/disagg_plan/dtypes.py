"""Sizes of the element types that caches are made of."""

from __future__ import annotations

from disagg_plan.errors import Refusal

_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def dtype_bytes(dtype: str, field: str = "kvCache.dtype") -> int:
    """Bytes of one element.

    Raises:
        Refusal: `UnknownDtype`; `field` is the path that the refusal names.
    """
    try:
        return _BYTES[dtype]
    except KeyError:
        raise Refusal(
            "UnknownDtype", field, f"dtype {dtype!r} is not known", f"Use one of {', '.join(sorted(_BYTES))}"
        ) from None
