"""What a model keeps per token: groups of layers, their parts, and the units that parts are sharded by.

Geometry says nothing about pages, ranks or engines. It is derived from a Hugging Face config.json
(`disagg_plan.architectures`) or declared explicitly; explicit wins.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from disagg_plan.errors import Refusal
from disagg_plan.ranges import MAX_LAYER, format_ranges
from disagg_plan.wire import NAME_PATTERN

GroupKind = Literal["paged", "state"]


@dataclass(frozen=True)
class Part:
    """A named tensor of a layer's cache.

    Attributes:
        name: `k`, `v`, `latent`, …
        units: what the part is sharded by, in the whole model: KV heads, or 1 for a latent.
        sharding: `split` over tensor-parallel ranks, or `replicated` on all of them.
        cell_bytes: bytes of one unit of one token.
    """

    name: str
    units: int
    sharding: Literal["split", "replicated"]
    cell_bytes: int


@dataclass(frozen=True)
class Group:
    """Layers that share a block table, page layout and token rule.

    Attributes:
        parts: in the order in which a joint page holds them; that order is part of the layout.
        layers: ascending model layer ids.
    """

    name: str
    layers: tuple[int, ...]
    parts: tuple[Part, ...]
    table: str
    kind: GroupKind = "paged"


@dataclass(frozen=True)
class Geometry:
    """All groups of a model, sorted by name: the order of a declaration carries no meaning."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(sorted(self.groups, key=lambda group: group.name)))

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer id that holds cache, ascending."""
        return tuple(sorted({layer for group in self.groups for layer in group.layers}))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's cells over all layers, each unit counted once."""
        return sum(len(group.layers) * part.units * part.cell_bytes for group in self.groups for part in group.parts)

    def first_layers(self, count: int) -> Geometry:
        """The same geometry cut to its first `count` layers, for runs that must fit into little memory.

        Raises:
            Refusal: `NoLayers` if nothing would be left.
        """
        kept = set(self.layers[:count])
        groups = []
        for group in self.groups:
            layers = tuple(layer for layer in group.layers if layer in kept)
            if layers:
                groups.append(replace(group, layers=layers))
        if not groups:
            raise Refusal("NoLayers", "layers", f"{count} layers leave no cache to move", "Keep at least one layer")
        return Geometry(tuple(groups))


def check_geometry(geometry: Geometry, field: str = "model.geometry") -> None:
    """Refuse a geometry that contradicts itself or that no plan could hold.

    Raises:
        Refusal: `BadGeometry` for no groups, repeated or unusable names, empty groups, a layer out of range or
            stated twice, a part without bytes, or a layer whose parts repeat.
    """
    if not geometry.groups:
        raise _bad(field, "no groups: there would be nothing to move", "State at least one group")
    for name, count in Counter(group.name for group in geometry.groups).items():
        if count > 1:
            raise _bad(field, f"group {name!r} stands twice", "Give every group its own name")
    owner: dict[tuple[str, int], str] = {}
    for group in geometry.groups:
        _check_group(group, field)
        for part in group.parts:
            for layer in group.layers:
                other = owner.setdefault((part.name, layer), group.name)
                if other != group.name:
                    raise _bad(
                        field,
                        f"part {part.name!r} of layer {layer} is in groups {other!r} and {group.name!r}",
                        f"Take layer {layer} out of one (group {group.name!r} has {format_ranges(group.layers)})",
                    )


def _check_group(group: Group, field: str) -> None:
    for name in (group.name, group.table, *(part.name for part in group.parts)):
        if not re.fullmatch(NAME_PATTERN, name):
            raise _bad(
                field,
                f"{name!r} is no name for a group, table or part",
                "Use up to 63 of a-z, 0-9, '_', '.' and '-', beginning and ending with a letter or digit",
            )
    if not group.layers or not group.parts:
        raise _bad(field, f"group {group.name!r} has no {'parts' if group.layers else 'layers'}", "State both")
    for layer, count in Counter(group.layers).items():
        if not 0 <= layer <= MAX_LAYER:
            raise _bad(
                field, f"layer {layer} of group {group.name!r} is not between 0 and {MAX_LAYER}", "Number layers from 0"
            )
        if count > 1:
            raise _bad(field, f"group {group.name!r} has layer {layer} twice", "State every layer once")
    for part, count in Counter(part.name for part in group.parts).items():
        if count > 1:
            raise _bad(field, f"group {group.name!r} has part {part!r} twice", "Give every part its own name")
    for stated in group.parts:
        if stated.units < 1 or stated.cell_bytes < 1:
            raise _bad(
                field,
                f"part {stated.name!r} of group {group.name!r} has {stated.units} units of {stated.cell_bytes} bytes",
                "Both are whole numbers above 0",
            )


def _bad(field: str, message: str, remedy: str) -> Refusal:
    return Refusal("BadGeometry", field, message, remedy)
