"""From pydantic's JSON Schema to the structural schema of a CustomResourceDefinition (`apiextensions.k8s.io/v1`).

JSON Schema says more than an API server takes: some of it is refused there, some is ignored without a word. So nothing
is passed on that is not listed here, and whatever has no exact counterpart raises. Beyond what an API server asks for,
every string, list and map must have a bound: rules in CEL are admitted by the most that they could cost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

Schema = dict[str, Any]

PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
LIST_TYPE: Final = "x-kubernetes-list-type"
LIST_KEYS: Final = "x-kubernetes-list-map-keys"
RULES: Final = "x-kubernetes-validations"

_SHARED = ("type", "description", "default", "enum")
_OF_TYPE: Final = {
    "string": ("format", "pattern", "minLength", "maxLength"),
    "integer": ("format", "minimum", "maximum", "multipleOf"),
    "number": ("format", "minimum", "maximum", "multipleOf"),
    "boolean": (),
    "array": ("minItems", "maxItems", "items", LIST_TYPE, LIST_KEYS),
    "object": ("required", "properties", "additionalProperties", "minProperties", "maxProperties", PRESERVE),
}
_FORMATS: Final = {"string": ("date-time",), "integer": ("int32", "int64"), "number": ("float", "double")}
_PYTHON: Final[Mapping[str, type | tuple[type, ...]]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}
_RULE_KEYS = ("rule", "message", "messageExpression", "reason", "fieldPath")
# With the fourth that there is, FieldValueDuplicate, an API server leaves the message out.
_RULE_REASONS = ("FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired")
_MAX_MESSAGE = 2048
_FIELD_PATH = re.compile(r"(\.[A-Za-z_][A-Za-z0-9_]*)+")
_NULL = {"type": "null"}


class SchemaError(Exception):
    """A type says what no structural schema can say, or leaves open what one must say.

    Attributes:
        path: the field, e.g. `spec.groups[].name`.
        keyword: what is wrong there.
    """

    def __init__(self, path: str, keyword: str, why: str) -> None:
        super().__init__(f"{path}: {keyword}: {why}")
        self.path = path
        self.keyword = keyword


def structural_schema(document: Mapping[str, Any], path: str) -> Schema:
    """The structural schema that accepts what a JSON Schema accepts.

    Unknown fields are the one exception: JSON Schema refuses them, an API server drops them, or refuses them where
    the client asks for strict validation, as kubectl does.

    Args:
        document: what pydantic's `model_json_schema(by_alias=True)` returns.
        path: name of the field that it is for, for errors.

    Raises:
        SchemaError: the first place that has no exact counterpart.
    """
    node = {key: value for key, value in document.items() if key != "$defs"}
    return _Converter(document.get("$defs", {})).convert(node, path, ())


class _Converter:
    """Converts with the definitions of one document at hand."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions

    def convert(self, reference: Mapping[str, Any], path: str, within: tuple[str, ...]) -> Schema:
        """The schema of one field; `within` are the definitions that it is inside of."""
        node, within = self._resolve(reference, path, within)
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in _OF_TYPE:
            raise SchemaError(path, "type", f"{kind!r} is not one of {', '.join(_OF_TYPE)}")
        allowed = (*_SHARED, *_OF_TYPE[kind], RULES)
        for keyword in node:
            if keyword not in allowed:
                raise SchemaError(path, keyword, f"a structural schema of type {kind} cannot say this")
        found = {keyword: node[keyword] for keyword in allowed if keyword in node}
        if kind == "object":
            self._object(found, path, within)
        elif kind == "array":
            self._array(found, path, within)
        else:
            _check_scalar(found, path)
        if RULES in found:
            found[RULES] = [_rule(rule, found, path) for rule in found[RULES]]
        if "default" in found:
            found["default"] = _default(found["default"], found, path)
        return found

    def _resolve(
        self, reference: Mapping[str, Any], path: str, within: tuple[str, ...]
    ) -> tuple[Schema, tuple[str, ...]]:
        """The node itself: references followed, `X or null` read as X that may be absent, titles left out."""
        node = dict(reference)
        while True:
            node.pop("title", None)
            if "$ref" in node:
                name = str(node.pop("$ref")).removeprefix("#/$defs/")
                if name in within:
                    raise SchemaError(path, "$ref", f"{name} holds itself, and a structural schema has no references")
                if name not in self._definitions:
                    raise SchemaError(path, "$ref", f"{name} is not defined")
                within = (*within, name)
                node = _beside(node, self._definitions[name], path)
            elif "anyOf" in node:
                node = _optional(node, path)
            else:
                if "const" in node:
                    node["enum"] = [node.pop("const")]
                return node, within

    def _object(self, found: Schema, path: str, within: tuple[str, ...]) -> None:
        properties = found.get("properties", {})
        free = found.get(PRESERVE)
        # Without the keyword JSON Schema lets other fields pass and a structural schema drops them. So does pydantic
        # with extra="ignore", the only setting under which it leaves the keyword out.
        more = found.pop("additionalProperties", None)
        if free is not None and (free is not True or more is False):
            raise SchemaError(path, PRESERVE, "is true or absent, and not beside additionalProperties: false")
        if more is True and not free:
            raise SchemaError(path, "additionalProperties", f"any field may stand here: say so with {PRESERVE}")
        if isinstance(more, Mapping):
            if properties or free:
                raise SchemaError(path, "additionalProperties", "a map has neither named nor unknown fields")
            if "maxProperties" not in found:
                raise SchemaError(path, "maxProperties", "a map needs a bound")
            found["additionalProperties"] = self.convert(more, f"{path}{{}}", within)
        elif not properties and not free:
            raise SchemaError(path, "properties", "an object that can hold nothing")
        for name in found.get("required", ()):
            if name not in properties:
                raise SchemaError(path, "required", f"{name} is not a property")
        if properties:
            found["properties"] = {
                name: self.convert(item, f"{path}.{name}", within) for name, item in properties.items()
            }

    def _array(self, found: Schema, path: str, within: tuple[str, ...]) -> None:
        if "maxItems" not in found:
            raise SchemaError(path, "maxItems", "a list needs a bound")
        if not isinstance(found.get("items"), Mapping):
            raise SchemaError(path, "items", "a list needs the schema of its items")
        items = found["items"] = self.convert(found["items"], f"{path}[]", within)
        keys = found.get(LIST_KEYS, [])
        if found.get(LIST_TYPE, "atomic") not in ("atomic", "set", "map"):
            raise SchemaError(path, LIST_TYPE, "is one of atomic, set, map")
        if (found.get(LIST_TYPE) == "map") != bool(keys):
            raise SchemaError(path, LIST_KEYS, f"are given with {LIST_TYPE}: map, and only there")
        if found.get(LIST_TYPE) == "set" and items["type"] in ("array", "object"):
            raise SchemaError(path, LIST_TYPE, "a set holds scalars")
        for key in keys:
            field = items.get("properties", {}).get(key, {"type": "absent"})
            if field["type"] in ("array", "object", "absent"):
                raise SchemaError(path, LIST_KEYS, f"{key} is no scalar property of the items")
            if key not in items.get("required", ()) and "default" not in field:
                raise SchemaError(path, LIST_KEYS, f"{key} is neither required nor has it a default")


def _beside(node: Schema, definition: Mapping[str, Any], path: str) -> Schema:
    """A definition with what stands beside the reference to it: annotations win, anything else must not compete."""
    for keyword in node:
        if keyword in definition and keyword not in ("description", "default"):
            raise SchemaError(path, keyword, "stands beside a reference and in what it refers to")
    return {**definition, **node}


def _optional(node: Schema, path: str) -> Schema:
    """`X or null` as X, for a field whose absence means the same as null: an API server drops nulls."""
    choices = node.pop("anyOf")
    others = [choice for choice in choices if choice != _NULL]
    if len(others) != 1 or len(choices) != 2:
        raise SchemaError(path, "anyOf", "only a type or null can be said")
    if "default" not in node or node.pop("default") is not None:
        raise SchemaError(path, "anyOf", "a field that may be null needs null as its default")
    return _beside(node, others[0], path)


def _check_scalar(found: Schema, path: str) -> None:
    kind = found["type"]
    if "format" in found and found["format"] not in _FORMATS.get(kind, ()):
        raise SchemaError(path, "format", f"{found['format']!r} is unknown for type {kind}")
    for value in found.get("enum", ()):
        if not _is(value, kind):
            raise SchemaError(path, "enum", f"{value!r} is not of type {kind}")
    if kind == "string" and "maxLength" not in found and "enum" not in found:
        raise SchemaError(path, "maxLength", "a string needs a bound")


def _rule(rule: Mapping[str, Any], found: Schema, path: str) -> Schema:
    unknown = sorted(set(rule) - set(_RULE_KEYS))
    if unknown or not rule.get("rule"):
        raise SchemaError(path, RULES, f"a rule has {', '.join(unknown)}" if unknown else "a rule is empty")
    if not rule.get("message") and not rule.get("messageExpression"):
        raise SchemaError(path, RULES, f"{rule['rule']!r} has no message: people would be shown the rule")
    if "\n" in rule.get("message", "") or len(rule.get("message", "")) > _MAX_MESSAGE:
        raise SchemaError(path, RULES, f"the message of {rule['rule']!r} is longer than a line")
    if rule.get("reason", _RULE_REASONS[0]) not in _RULE_REASONS:
        raise SchemaError(path, RULES, f"reason {rule['reason']!r} is not one of {', '.join(_RULE_REASONS)}")
    if "fieldPath" in rule:
        _check_field_path(rule["fieldPath"], found, path)
    return {key: rule[key] for key in _RULE_KEYS if key in rule}


def _check_field_path(field: str, schema: Schema, path: str) -> None:
    if _FIELD_PATH.fullmatch(field) is None:
        raise SchemaError(path, RULES, f"fieldPath {field!r} is not .name or .name.name")
    for name in field[1:].split("."):
        schema = schema.get("properties", {}).get(name)
        if schema is None:
            raise SchemaError(path, RULES, f"fieldPath {field!r}: there is no {name}")


def _default(value: Any, schema: Schema, path: str) -> Any:
    """A default without the nulls of absent fields, if the schema accepts it.

    An API server judges a default as it stands, before the defaults of its fields are filled in.
    """
    if not _is(value, schema["type"]):
        raise SchemaError(path, "default", f"{value!r} is not of type {schema['type']}")
    if "enum" in schema and value not in schema["enum"]:
        raise SchemaError(path, "default", f"{value!r} is not one of {schema['enum']}")
    if "pattern" in schema and re.search(schema["pattern"], value) is None:
        raise SchemaError(path, "default", f"{value!r} does not match {schema['pattern']}")
    if schema["type"] == "array":
        value = [_default(item, schema["items"], f"{path}[]") for item in value]
    if schema["type"] == "object":
        value = {
            name: _default_field(item, name, schema, path)
            for name, item in value.items()
            if item is not None or name not in schema.get("properties", {})
        }
        for name in schema.get("required", ()):
            if name not in value:
                raise SchemaError(path, "default", f"{name} is required")
    size = value if isinstance(value, int | float) else len(value)
    for keyword, bound in schema.items():
        if (keyword.startswith("min") and size < bound) or (keyword.startswith("max") and size > bound):
            raise SchemaError(path, "default", f"{value!r} is beyond {keyword} {bound}")
    return value


def _default_field(value: Any, name: str, schema: Schema, path: str) -> Any:
    field = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
    if field is not None:
        return _default(value, field, f"{path}.{name}")
    if PRESERVE not in schema:
        raise SchemaError(path, "default", f"{name} is not a property")
    return value


def _is(value: Any, kind: str) -> bool:
    # A Python bool is an int; in JSON it is not.
    return isinstance(value, _PYTHON[kind]) and (kind == "boolean" or not isinstance(value, bool))
