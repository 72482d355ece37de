from __future__ import annotations

import hashlib

import pytest

from disagg_plan import canonical
from disagg_plan.errors import FormatError


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({}, b"{}"),
        ([], b"[]"),
        ({"b": 1, "a": [True, False, "x"]}, b'{"a":[true,false,"x"],"b":1}'),
        ({"B": 1, "a": 2, "_": 3}, b'{"B":1,"_":3,"a":2}'),
        ({"a": {"z": -1, "y": 0}}, b'{"a":{"y":0,"z":-1}}'),
        ("KV – ü 漢", '"KV – ü 漢"'.encode()),
        ('quote " back \\ line \n', b'"quote \\" back \\\\ line \\n"'),
        (2**70, b"1180591620717411303424"),
        ((1, 2), b"[1,2]"),
    ],
)
def test_bytes(value, data):
    assert canonical.dumps(value) == data
    assert canonical.digest(value) == "sha256:" + hashlib.sha256(data).hexdigest()
    assert canonical.dumps(canonical.loads(data)) == data


def test_known_digest():
    assert canonical.digest({"b": 1, "a": "x"}) == ("sha256:" + hashlib.sha256(b'{"a":"x","b":1}').hexdigest())
    assert canonical.digest({}) == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_order_of_keys_and_spaces_do_not_matter():
    pretty = '{\n  "b": [1, 2],\n  "a": {"d": 1, "c": 2}\n}'
    assert canonical.dumps(canonical.loads(pretty)) == b'{"a":{"c":2,"d":1},"b":[1,2]}'


@pytest.mark.parametrize(
    ("value", "where", "what"),
    [
        ({"a": 1.0}, "$.a", "float"),
        ({"a": [1, None]}, "$.a[1]", "NoneType"),
        (None, "$", "NoneType"),
        ({"a": {"b": [0, {"c": 0.5}]}}, "$.a.b[1].c", "float"),
        ({"a": b"x"}, "$.a", "bytes"),
        ({1: 2}, "$", "key 1"),
    ],
)
def test_what_has_no_canonical_form(value, where, what):
    with pytest.raises(FormatError) as refused:
        canonical.dumps(value)
    assert refused.value.code == "NotCanonical"
    assert refused.value.message.startswith(where + ":")
    assert what in refused.value.message


@pytest.mark.parametrize("text", ['{"a":1.5}', '{"a":1e3}', '{"a":null}', "NaN", "[Infinity]", "[-Infinity]"])
def test_loads_refuses_floats_and_nulls(text):
    with pytest.raises(FormatError) as refused:
        canonical.loads(text)
    assert refused.value.code == "NotCanonical"


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        "{'a':1}",
        '{"a":1,}',
        '{"a":1} x',
        "[01]",
        "1" * 5000,
        b"\xff\xfe\xfd",
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-8-sig"),
    ],
)
def test_loads_refuses_what_is_not_json_in_utf8(data):
    with pytest.raises(FormatError) as refused:
        canonical.loads(data)
    assert refused.value.code == "NotJson"


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', '{"x":{"a":1,"b":2,"a":3}}', '{"a":1,"\\u0061":2}'])
def test_loads_refuses_a_repeated_key(text):
    with pytest.raises(FormatError) as refused:
        canonical.loads(text)
    assert refused.value.code == "NotJson"
    assert "key 'a' stands twice" in refused.value.message


@pytest.mark.parametrize("text", ['["\\ud800"]', '{"\\udfff":1}'])
def test_half_a_character_is_refused(text):
    with pytest.raises(FormatError) as refused:
        canonical.loads(text)
    assert refused.value.code == "NotCanonical"


@pytest.mark.parametrize("depth", [100, 900, 990, 5000, 200_000])
def test_deep_nesting_is_refused(depth):
    with pytest.raises(FormatError) as refused:
        canonical.loads("[" * depth + "]" * depth)
    assert refused.value.code in ("NotJson", "NotCanonical")


def test_deep_values_are_refused():
    value: list[object] = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(FormatError) as refused:
        canonical.dumps(value)
    assert refused.value.code == "NotCanonical"
