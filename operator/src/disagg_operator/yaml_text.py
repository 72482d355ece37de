"""Objects as YAML that people read: no anchors, and multi-line text as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes values in full where they repeat, and text with line breaks as a literal block."""

    def ignore_aliases(self, _data: Any) -> bool:
        """See `yaml.representer`."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def dump(documents: Iterable[Any]) -> str:
    """One or several documents."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
