"""YAML as Kubernetes reads it: dates are text, and a key that stands twice is an error instead of a silent choice."""

from __future__ import annotations

from typing import Any

import yaml

MAX_CHARACTERS = 8 << 20
"""Largest file that is read; an API server accepts objects of 1.5 MiB."""


class YamlError(Exception):
    """The text is not YAML that a deployment could be written in."""


class _Loader(yaml.SafeLoader):
    """Safe loading without the timestamp type, keys unique."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                where = key.start_mark
                raise YamlError(f"key {key.value!r} stands twice (line {where.line + 1}, column {where.column + 1})")
            seen.add(key.value)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def load_all(text: str) -> list[Any]:
    """Every document of a text.

    Raises:
        YamlError: what is wrong, in one line with its place where that is known.
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlError(f"{len(text)} characters are more than the {MAX_CHARACTERS} that are read")
    try:
        return list(yaml.load_all(text, Loader=_Loader))
    except yaml.YAMLError as error:
        raise YamlError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise YamlError("it is nested too deeply") from error
    except (ValueError, TypeError, OverflowError) as error:
        # Numbers beyond what Python parses, keys that cannot be keys.
        raise YamlError(f"a value cannot be read: {' '.join(str(error).split())[:200]}") from error
