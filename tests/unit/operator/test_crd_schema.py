"""The converter: what has an exact counterpart is said, everything else raises with its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from disagg_operator.crd_schema import SchemaError, structural_schema

TEXT = {"type": "string", "maxLength": 9}
NULL = {"type": "null"}
RULE = {"rule": "true", "message": "no"}


def named(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "additionalProperties": False}


def listed(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "maxItems": 3, "items": items, **more}


class Inner(BaseModel):
    """Inside."""

    model_config = ConfigDict(extra="forbid")

    size: Annotated[int, Field(ge=1, le=9)] = 4
    note: Annotated[str, Field(max_length=5)] | None = None


class Outer(BaseModel):
    """Outside."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra={
            "x-kubernetes-validations": [{"message": "m", "rule": "self.kind == 'a'", "fieldPath": ".inner.size"}]
        },
    )

    kind: Literal["a"]
    inner: Inner = Inner()
    maybe: Inner | None = None
    """Or not."""
    many: Annotated[list[Inner], Field(max_length=2)]
    labels: Annotated[dict[str, Annotated[str, Field(max_length=7)]], Field(max_length=8)]
    free: Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] = {}
    on: bool = True


INNER = {
    "type": "object",
    "description": "Inside.",
    "properties": {
        "size": {"type": "integer", "default": 4, "minimum": 1, "maximum": 9},
        "note": {"type": "string", "maxLength": 5},
    },
}


def test_what_pydantic_says_becomes_what_an_api_server_takes() -> None:
    assert structural_schema(Outer.model_json_schema(), "outer") == {
        "type": "object",
        "description": "Outside.",
        "required": ["kind", "many", "labels"],
        "properties": {
            "kind": {"type": "string", "enum": ["a"]},
            "inner": {**INNER, "default": {"size": 4}},
            "maybe": {**INNER, "description": "Or not."},
            "many": {"type": "array", "maxItems": 2, "items": INNER},
            "labels": {
                "type": "object",
                "maxProperties": 8,
                "additionalProperties": {"type": "string", "maxLength": 7},
            },
            "free": {"type": "object", "default": {}, "x-kubernetes-preserve-unknown-fields": True},
            "on": {"type": "boolean", "default": True},
        },
        "x-kubernetes-validations": [{"rule": "self.kind == 'a'", "message": "m", "fieldPath": ".inner.size"}],
    }


def test_fields_may_be_named_like_keywords() -> None:
    names = ("title", "default", "$ref", "anyOf", "const", "required", "properties", "additionalProperties")
    schema = structural_schema(named(**dict.fromkeys(names, TEXT)), "x")
    assert schema["properties"] == dict.fromkeys(names, TEXT)


@pytest.mark.parametrize(
    ("node", "path", "keyword"),
    [
        # Keywords without a counterpart, or with another meaning there.
        ({"type": "integer", "exclusiveMinimum": 0}, "x", "exclusiveMinimum"),
        ({"type": "integer", "exclusiveMaximum": 5}, "x", "exclusiveMaximum"),
        ({**TEXT, "examples": ["a"]}, "x", "examples"),
        ({**TEXT, "deprecated": True}, "x", "deprecated"),
        ({**TEXT, "readOnly": True}, "x", "readOnly"),
        ({**TEXT, "nullable": True}, "x", "nullable"),
        ({**TEXT, "contentMediaType": "x/y"}, "x", "contentMediaType"),
        (listed(TEXT, uniqueItems=True), "x", "uniqueItems"),
        (listed(TEXT, prefixItems=[TEXT]), "x", "prefixItems"),
        ({**named(a=TEXT), "patternProperties": {"^a": TEXT}}, "x", "patternProperties"),
        ({**named(a=TEXT), "propertyNames": TEXT}, "x", "propertyNames"),
        ({**named(a=TEXT), "discriminator": {"propertyName": "a"}}, "x", "discriminator"),
        ({**named(a=TEXT), "x-kubernetes-embedded-resource": True}, "x", "x-kubernetes-embedded-resource"),
        ({**named(a=TEXT), "oneOf": [TEXT]}, "x", "oneOf"),
        ({**named(a=TEXT), "allOf": [TEXT]}, "x", "allOf"),
        ({**named(a=TEXT), "not": TEXT}, "x", "not"),
        # Keywords on a type that they say nothing about.
        ({"type": "integer", "maxLength": 3}, "x", "maxLength"),
        ({**TEXT, "maximum": 3}, "x", "maximum"),
        ({"type": "boolean", "format": "int32"}, "x", "format"),
        # Types.
        ({}, "x", "type"),
        ({"oneOf": [TEXT, {"type": "integer"}]}, "x", "type"),
        ({"type": "null"}, "x", "type"),
        ({"type": ["string", "null"]}, "x", "type"),
        ({"enum": ["a", 1]}, "x", "type"),
        ({"type": "string", "enum": ["a", None]}, "x", "enum"),
        ({"type": "integer", "enum": [True]}, "x", "enum"),
        ({"type": "integer", "const": "a"}, "x", "enum"),
        ({**TEXT, "format": "duration"}, "x", "format"),
        ({**TEXT, "format": "uri"}, "x", "format"),
        # Nulls.
        ({"anyOf": [TEXT, {"type": "integer"}]}, "x", "anyOf"),
        ({"anyOf": [TEXT, {"type": "integer"}, NULL], "default": None}, "x", "anyOf"),
        ({"anyOf": [TEXT], "default": None}, "x", "anyOf"),
        ({"anyOf": [TEXT, NULL]}, "x", "anyOf"),
        ({"anyOf": [TEXT, NULL], "default": "a"}, "x", "anyOf"),
        ({"anyOf": [TEXT, NULL], "default": None, "maxLength": 3}, "x", "maxLength"),
        (listed({"anyOf": [TEXT, NULL]}), "x[]", "anyOf"),
        ({**TEXT, "default": None}, "x", "default"),
        # Bounds.
        ({"type": "string"}, "x", "maxLength"),
        ({"type": "string", "format": "date-time"}, "x", "maxLength"),
        ({"type": "array", "items": TEXT}, "x", "maxItems"),
        ({"type": "object", "additionalProperties": TEXT}, "x", "maxProperties"),
        (named(a=named(b={"type": "string"})), "x.a.b", "maxLength"),
        (listed(named(b={"type": "string"})), "x[].b", "maxLength"),
        ({"type": "object", "maxProperties": 1, "additionalProperties": {"type": "string"}}, "x{}", "maxLength"),
        # Objects.
        ({"type": "object", "additionalProperties": True}, "x", "additionalProperties"),
        ({**named(a=TEXT), "additionalProperties": True}, "x", "additionalProperties"),
        ({**named(a=TEXT), "additionalProperties": TEXT, "maxProperties": 1}, "x", "additionalProperties"),
        ({"type": "object"}, "x", "properties"),
        (named(), "x", "properties"),
        ({**named(a=TEXT), "required": ["b"]}, "x", "required"),
        (
            {**named(a=TEXT), "x-kubernetes-preserve-unknown-fields": True},
            "x",
            "x-kubernetes-preserve-unknown-fields",
        ),
        (
            {"type": "object", "x-kubernetes-preserve-unknown-fields": False},
            "x",
            "x-kubernetes-preserve-unknown-fields",
        ),
        # Lists.
        ({"type": "array", "maxItems": 1}, "x", "items"),
        (listed([TEXT]), "x", "items"),
        (listed(named(a=TEXT), **{"x-kubernetes-list-type": "bag"}), "x", "x-kubernetes-list-type"),
        (listed(named(a=TEXT), **{"x-kubernetes-list-type": "set"}), "x", "x-kubernetes-list-type"),
        (listed(named(a=TEXT), **{"x-kubernetes-list-type": "map"}), "x", "x-kubernetes-list-map-keys"),
        (listed(named(a=TEXT), **{"x-kubernetes-list-map-keys": ["a"]}), "x", "x-kubernetes-list-map-keys"),
        (
            listed(named(a=TEXT), **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["a"]}),
            "x",
            "x-kubernetes-list-map-keys",
        ),
        (
            listed(named(a=TEXT), **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["b"]}),
            "x",
            "x-kubernetes-list-map-keys",
        ),
        (
            listed(named(a=named(b=TEXT)), **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["a"]}),
            "x",
            "x-kubernetes-list-map-keys",
        ),
        # References.
        ({"$ref": "#/$defs/Missing"}, "x", "$ref"),
        ({"$ref": "#/$defs/A", "$defs": {"A": named(a={"$ref": "#/$defs/A"})}}, "x.a", "$ref"),
        ({"$ref": "#/$defs/A", "maxLength": 3, "$defs": {"A": TEXT}}, "x", "maxLength"),
        # Defaults.
        ({**TEXT, "default": 1}, "x", "default"),
        ({"type": "integer", "default": True}, "x", "default"),
        ({"type": "integer", "default": 1.5}, "x", "default"),
        ({**TEXT, "default": "longer than 9"}, "x", "default"),
        ({**TEXT, "default": "A", "pattern": "^[a-z]$"}, "x", "default"),
        ({**TEXT, "default": "b", "enum": ["a"]}, "x", "default"),
        ({"type": "integer", "minimum": 2, "default": 1}, "x", "default"),
        (listed(TEXT, default=["a", "b", "c", "d"]), "x", "default"),
        (listed(TEXT, default=[1]), "x[]", "default"),
        ({**named(a=TEXT), "default": {"b": "c"}}, "x", "default"),
        ({**named(a=TEXT), "default": {"a": 1}}, "x.a", "default"),
        ({**named(a=TEXT), "required": ["a"], "default": {}}, "x", "default"),
    ],
)
def test_what_cannot_be_said_raises_with_path_and_keyword(node: dict[str, Any], path: str, keyword: str) -> None:
    with pytest.raises(SchemaError) as raised:
        structural_schema(node, "x")
    assert (raised.value.path, raised.value.keyword) == (path, keyword)
    assert str(raised.value).startswith(f"{path}: {keyword}: ")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"rule": "", "message": "m"}, "a rule is empty"),
        ({"rule": "true"}, "has no message"),
        ({**RULE, "optionalOldSelf": True}, "optionalOldSelf"),
        ({**RULE, "message": "two\nlines"}, "longer than a line"),
        ({**RULE, "message": "m" * 2049}, "longer than a line"),
        ({**RULE, "reason": "Because"}, "'Because' is not one of"),
        ({**RULE, "reason": "FieldValueDuplicate"}, "'FieldValueDuplicate' is not one of"),
        ({**RULE, "fieldPath": "a"}, "is not .name"),
        ({**RULE, "fieldPath": ".a[0]"}, "is not .name"),
        ({**RULE, "fieldPath": ".a.b"}, "there is no b"),
    ],
)
def test_a_rule_that_an_api_server_refuses_raises(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match="x-kubernetes-validations") as raised:
        structural_schema({**named(a=TEXT), "x-kubernetes-validations": [rule]}, "x")
    assert said in str(raised.value)


KEYED = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}


@pytest.mark.parametrize(
    "node",
    [
        listed(TEXT, **{"x-kubernetes-list-type": "set"}),
        listed(KEYED, **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["a"]}),
        {"type": "string", "maxLength": 20, "format": "date-time"},
        {"type": "integer", "format": "int64", "multipleOf": 8},
        {"type": "number", "default": 1},
        {"type": "object", "properties": {"a": TEXT}, "x-kubernetes-preserve-unknown-fields": True},
        {
            "type": "object",
            "default": {"any": None},
            "x-kubernetes-preserve-unknown-fields": True,
        },
        {"type": "object", "default": {"k": "v"}, "maxProperties": 1, "additionalProperties": TEXT},
    ],
)
def test_what_is_structural_already_stays_as_it_is(node: dict[str, Any]) -> None:
    assert structural_schema(node, "x") == node


NAMES = st.sampled_from(["a", "b", "title", "default", "required", "$ref"])
SCALARS = st.one_of(
    st.builds(lambda high: {"type": "string", "maxLength": high, "title": "T"}, st.integers(1, 9)),
    st.builds(lambda low: {"type": "integer", "minimum": low, "default": low + 1}, st.integers(-5, 5)),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "string", "const": "a"}, {"type": "string", "enum": ["x"], "default": "x"}]
    ),
)


def _nested(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    optional = inner.map(lambda node: {"anyOf": [_undefaulted(node), NULL], "default": None, "title": "T"})
    fields = st.dictionaries(NAMES, st.one_of(inner, optional), min_size=1, max_size=3)
    return st.one_of(
        fields.map(lambda found: {**named(**found), "title": "T"}),
        inner.map(listed),
        inner.map(lambda node: {"type": "object", "maxProperties": 2, "additionalProperties": node}),
    )


def _undefaulted(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "default"}


# Strategies hand out the same objects again; the tests change theirs.
SCHEMAS = st.recursive(SCALARS, _nested, max_leaves=8).map(json.dumps).map(json.loads)


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and every schema inside it."""
    yield node
    inner = [*node.get("properties", {}).values(), *node.get("anyOf", ())]
    inner += [node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)]
    for one in inner:
        yield from nodes(one)


@given(SCHEMAS)
def test_converting_again_changes_nothing_and_nothing_foreign_is_left(schema: dict[str, Any]) -> None:
    once = structural_schema(schema, "x")
    assert structural_schema(once, "x") == once
    for node in nodes(once):
        assert not {"title", "anyOf", "const", "$ref"} & set(node)
        assert node.get("additionalProperties") is not False


@given(SCHEMAS, st.data())
def test_an_unknown_keyword_raises_wherever_it_stands(schema: dict[str, Any], data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from([node for node in nodes(schema) if node != NULL]))
    chosen["unheard"] = 1
    with pytest.raises(SchemaError) as raised:
        structural_schema(schema, "x")
    assert raised.value.keyword == "unheard"


@given(SCHEMAS, st.data())
def test_a_bound_that_is_taken_away_raises_wherever_it_stood(schema: dict[str, Any], data: st.DataObject) -> None:
    bounds = [
        (node, key) for node in nodes(schema) for key in ("maxLength", "maxItems", "maxProperties") if key in node
    ]
    if not bounds:
        return
    node, keyword = data.draw(st.sampled_from(bounds))
    del node[keyword]
    with pytest.raises(SchemaError) as raised:
        structural_schema(schema, "x")
    assert raised.value.keyword == keyword
