"""Ranges, canonical JSON and pairing: small things that everything else stands on."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disagg_plan import canonical
from disagg_plan.errors import FormatError, RequestError
from disagg_plan.pairing import blocks_for, check_blocks, page_pairs
from disagg_plan.ranges import MAX_LAYER, format_ranges, parse_ranges

LAYERS = st.lists(st.one_of(st.integers(0, 40), st.integers(0, MAX_LAYER)), min_size=1)


@given(layers=LAYERS)
def test_ranges_round_trip(layers):
    assert parse_ranges(format_ranges(layers)) == tuple(sorted(set(layers)))


@given(text=st.text(alphabet="0123456789,- ", max_size=12))
def test_a_range_has_one_spelling(text):
    try:
        layers = parse_ranges(text)
    except FormatError as error:
        code = error.code
    else:
        assert format_ranges(layers) == text
        assert layers == tuple(sorted(set(layers)))
        return
    assert code == "BadLayerRange"


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)),
    max_leaves=12,
)


@given(value=VALUES)
def test_canonical_form_is_one(value):
    data = canonical.dumps(value)
    assert canonical.loads(data) == value
    assert canonical.dumps(canonical.loads(data)) == data
    pretty = json.dumps(value, indent=3, ensure_ascii=True)
    assert canonical.dumps(canonical.loads(pretty)) == data
    assert canonical.digest(canonical.loads(pretty)) == canonical.digest(value)


@given(data=st.one_of(st.binary(max_size=40), st.text(max_size=40)))
def test_loads_raises_nothing_else(data):
    try:
        value = canonical.loads(data)
    except FormatError as error:
        code = error.code
    else:
        assert canonical.loads(canonical.dumps(value)) == value
        return
    assert code in ("NotJson", "NotCanonical")


@given(
    src_block=st.integers(1, 48),
    dst_block=st.integers(1, 48),
    start_blocks=st.integers(0, 4),
    tokens=st.integers(0, 200),
    seed=st.integers(0, 9),
)
def test_pairing_is_by_position(src_block, dst_block, start_blocks, tokens, seed):
    """Against a loop over tokens, for every common divisor of the block sizes."""
    random = np.random.default_rng(seed)
    start = start_blocks * dst_block
    end = start + tokens
    src = random.permutation(blocks_for(end, src_block) + 3)
    dst = random.permutation(blocks_for(tokens, dst_block) + 3)
    for sub in (size for size in range(1, 49) if src_block % size == 0 and dst_block % size == 0):
        expected = set()
        for token in range(start, end):
            behind = token - start
            expected.add(
                (
                    int(src[token // src_block]),
                    token % src_block // sub,
                    int(dst[behind // dst_block]),
                    behind % dst_block // sub,
                )
            )
        found = page_pairs(sub, src, src_block, dst, dst_block, start, end)
        rows = list(
            zip(
                *(column.tolist() for column in (found.src_page, found.src_sub, found.dst_page, found.dst_sub)),
                strict=True,
            )
        )
        assert rows == sorted(expected)


IDS = st.one_of(
    st.lists(st.integers(-2, 12), max_size=8),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3)),
        lambda inner: st.lists(inner, max_size=3),
        max_leaves=6,
    ),
)


@given(ids=IDS, tokens=st.integers(0, 40), block=st.integers(1, 16), pages=st.integers(0, 12), unique=st.booleans())
def test_ids_are_refused_or_inside_the_pool(ids, tokens, block, pages, unique):
    try:
        found = check_blocks(ids, tokens, block, pages, "list", unique=unique)
    except RequestError as error:
        code = error.code
    else:
        assert found.dtype == np.int64
        assert found.tolist() == list(ids)[: blocks_for(tokens, block)]
        assert all(0 <= one < pages for one in found.tolist())
        assert not unique or len(set(found.tolist())) == len(found)
        return
    assert code in ("BadPages", "TooFewPages", "PageOutOfRange", "RepeatedPage")
