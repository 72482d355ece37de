"""What a vLLM worker's cache looks like: from its tensors to the regions that the agent compares with the plan.

Takes facts about tensors (`TensorFacts`), not tensors, so that it is tested without torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disagg_agent.cards import RegionDeclaration
from disagg_agent.errors import RegistrationRefused
from disagg_plan.ranges import parse_ranges
from disagg_plan.wire import Plan

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class TensorFacts:
    """One layer's cache tensor.

    Attributes:
        storage: number of the storage that it is a view of.
        offset: bytes from the start of that storage.
        shape, strides: as torch gives them, strides in elements.
        element: bytes of an element.
    """

    name: str
    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: int


def layer_id(name: str) -> int:
    """Model layer of a cache entry: `model.layers.3.self_attn.attn` is 3.

    Raises:
        RegistrationRefused: `UnknownLayer`; matching by position instead would move plausible bytes of wrong layers.
    """
    found = _LAYER.findall(name)
    if len(found) != 1:
        raise RegistrationRefused("UnknownLayer", f"cache entry {name!r} does not say which layer it is")
    return int(found[0])


def regions(plan: Plan, tensors: Sequence[TensorFacts]) -> list[RegionDeclaration]:
    """One region per layer: vLLM keeps K and V of a layer in one tensor whose first axis is the block.

    Raises:
        RegistrationRefused: `UnknownLayer`, or `WrongShape` if a block is not contiguous.
    """
    declared = []
    for facts in tensors:
        layer = layer_id(facts.name)
        group = group_of_layer(plan, layer)
        inner = 1
        for size, stride in zip(reversed(facts.shape[1:]), reversed(facts.strides[1:]), strict=True):
            if size != 1 and stride != inner:
                raise RegistrationRefused(
                    "WrongShape",
                    f"{facts.name}: a block is not contiguous, its shape is {list(facts.shape)} and its strides are "
                    f"{list(facts.strides)}",
                )
            inner *= size
        declared.append(
            RegionDeclaration(
                group=group,
                layer=layer,
                region=0,
                segment=facts.storage,
                offset=facts.offset,
                bytes=inner * facts.element,
                stride=facts.strides[0] * facts.element,
                pages=facts.shape[0],
            )
        )
    return declared


def group_of_layer(plan: Plan, layer: int) -> str:
    """The plan's group that holds a layer.

    Raises:
        RegistrationRefused: `UnknownLayer`, no group does.
    """
    for group in plan.groups:
        if layer in parse_ranges(group.layers):
            return group.name
    raise RegistrationRefused("UnknownLayer", f"the engine has a cache for layer {layer}, the plan has no such layer")


def tables(plan: Plan, groups: Sequence[Sequence[str]]) -> list[str]:
    """Block table of each KV cache group of the engine, by the layers that it names.

    Raises:
        RegistrationRefused: `UnknownLayer`, or `MixedGroup` if one group of the engine spans tables of the plan.
    """
    result = []
    by_name: Mapping[str, str] = {group.name: group.table for group in plan.groups}
    for names in groups:
        found = {by_name[group_of_layer(plan, layer_id(name))] for name in names}
        if len(found) != 1:
            raise RegistrationRefused(
                "MixedGroup", f"the engine keeps layers of tables {sorted(found)} in one cache group"
            )
        result.append(found.pop())
    return result
