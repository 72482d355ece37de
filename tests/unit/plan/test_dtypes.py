from __future__ import annotations

import pytest

from disagg_plan.dtypes import dtype_bytes
from disagg_plan.errors import Refusal


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("float16", 2),
        ("bfloat16", 2),
        ("fp8", 1),
        ("fp8_e4m3", 1),
        ("fp8_e5m2", 1),
        ("float8_e4m3fn", 1),
        ("float8_e5m2", 1),
        ("int8", 1),
        ("uint8", 1),
    ],
)
def test_sizes(dtype, size):
    assert dtype_bytes(dtype) == size


@pytest.mark.parametrize("dtype", ["auto", "", "BFLOAT16", "float64", "fp8_ds_mla"])
def test_unknown_dtype(dtype):
    with pytest.raises(Refusal) as refused:
        dtype_bytes(dtype, "decode.kvCache.dtype")
    refusal = refused.value
    assert refusal.code == "UnknownDtype"
    assert refusal.field == "decode.kvCache.dtype"
    assert repr(dtype) in refusal.message
    named = refusal.remedy.removeprefix("Use one of ").split(", ")
    assert [dtype_bytes(name) for name in named]
    assert "bfloat16" in named
    assert str(refusal) == f"decode.kvCache.dtype: {refusal.message}. {refusal.remedy}"
