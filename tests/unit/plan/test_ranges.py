from __future__ import annotations

import pytest

from disagg_plan.errors import FormatError
from disagg_plan.ranges import MAX_LAYER, format_ranges, parse_ranges


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], ""),
        ([0], "0"),
        ([7], "7"),
        ([0, 1], "0-1"),
        (range(80), "0-79"),
        ([0, 2, 4], "0,2,4"),
        ([3, 1, 2, 9], "1-3,9"),
        ([5, 5, 5], "5"),
        ([9999, 9998, 10], "10,9998-9999"),
    ],
)
def test_format(layers, text):
    assert format_ranges(layers) == text


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0", (0,)),
        ("0-1", (0, 1)),
        ("0-2,5,7-8", (0, 1, 2, 5, 7, 8)),
        ("9990-9999", tuple(range(9990, 10000))),
    ],
)
def test_parse(text, layers):
    assert parse_ranges(text) == layers


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "0,",
        "a",
        "-1",
        "0-",
        "0-0",
        "3-1",
        "00",
        "01",
        "1-01",
        "0 - 1",
        " 0",
        "0\n",
        "1.5",
        "+1",
        "٣",
        "10000",
        "0-10000",
        "0-999999999",
    ],
)
def test_parse_refuses_other_text(text):
    with pytest.raises(FormatError) as refused:
        parse_ranges(text)
    assert refused.value.code == "BadLayerRange"
    assert repr(text) in refused.value.message


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1,0", "0-1"),
        ("0,1", "0-1"),
        ("0-3,4", "0-4"),
        ("0-3,2-5", "0-5"),
        ("5,5", "5"),
        ("4-6,1", "1,4-6"),
    ],
)
def test_parse_refuses_a_second_spelling_and_names_the_first(text, canonical):
    with pytest.raises(FormatError) as refused:
        parse_ranges(text)
    assert refused.value.code == "BadLayerRange"
    assert f"write {canonical!r}" in refused.value.message
    assert format_ranges(parse_ranges(canonical)) == canonical


def test_largest_layer():
    assert MAX_LAYER == 9999
    assert parse_ranges(str(MAX_LAYER)) == (MAX_LAYER,)
