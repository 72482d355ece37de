"""What a model keeps per token: groups of layers, their parts, and the units that parts are sharded by.

Geometry says nothing about pages, ranks or engines. It is derived from a Hugging Face config.json
(`disagg_plan.architectures`) or declared explicitly; explicit wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from disagg_plan.errors import Refusal
from disagg_plan.ranges import format_ranges

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
    """Refuse a geometry that contradicts itself.

    Raises:
        Refusal: `BadGeometry` for no groups, repeated names, empty groups, or a layer whose parts repeat.
    """

    def refuse(message: str, remedy: str) -> Refusal:
        return Refusal("BadGeometry", field, message, remedy)

    if not geometry.groups:
        raise refuse("no groups: there would be nothing to move", "State at least one group")
    names = [group.name for group in geometry.groups]
    for name in names:
        if names.count(name) > 1:
            raise refuse(f"group {name!r} stands twice", "Give every group its own name")
    owner: dict[tuple[str, int], str] = {}
    for group in geometry.groups:
        parts = [part.name for part in group.parts]
        if not group.layers or not parts:
            raise refuse(f"group {group.name!r} has no {'parts' if group.layers else 'layers'}", "State both")
        for part in parts:
            if parts.count(part) > 1:
                raise refuse(f"group {group.name!r} has part {part!r} twice", "Give every part its own name")
            for layer in group.layers:
                other = owner.setdefault((part, layer), group.name)
                if other != group.name:
                    raise refuse(
                        f"part {part!r} of layer {layer} is in groups {other!r} and {group.name!r}",
                        f"Take layer {layer} out of one (group {group.name!r} has {format_ranges(group.layers)})",
                    )
