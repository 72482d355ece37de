"""What ranks say of themselves and of their memory: the vocabulary that all conversations share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

RequestId = Annotated[str, Meta(min_length=1, max_length=256)]
Word = Annotated[str, Meta(max_length=256)]
Key = Annotated[str, Meta(max_length=512)]
"""A word with something of ours put to it: names of links and moves."""
Natural = Annotated[int, Meta(ge=0, le=2**62)]
RankId = Annotated[int, Meta(ge=0, le=2**16)]
PageCount = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
DeviceIndex = Annotated[int, Meta(ge=0, le=2**16)]

MemoryKind = Literal["DRAM", "VRAM"]
"""NIXL's words for host and GPU memory."""
Placement = Literal["agent", "engine"]
"""The process in which a rank's mover lives."""


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages and their parts: immutable, unknown fields refused."""


class Place(Struct, frozen=True):
    """Where memory is.

    Attributes:
        kind: host memory or GPU memory; the two sides of an edge may differ.
        device: index of the GPU as its owner counts; 0 for host memory. NIXL finds registered memory by it, so that
            whoever reads must say the same number as who registered.
    """

    kind: MemoryKind
    device: DeviceIndex

    def __str__(self) -> str:
        return f"{self.kind} of device {self.device}"


HOST = Place("DRAM", 0)
"""Host memory."""


class SegmentDeclaration(Struct, frozen=True):
    """Memory that an engine registers as one piece.

    Attributes:
        size: bytes.
        place: where it is; the same for all segments of a rank.
    """

    size: Natural
    place: Place


class RegionDeclaration(Struct, frozen=True):
    """One (group, layer, region of the page) as an engine declares it: an offset into one of its segments."""

    group: Word
    layer: Natural
    region: Natural
    segment: Natural
    offset: Natural
    bytes: Natural
    stride: Natural
    pages: PageCount


class RegionCard(Struct, frozen=True):
    """The same as a mover reaches it: `base` is an address in the mover's process."""

    group: Word
    layer: Natural
    region: Natural
    base: Natural
    stride: Natural
    pages: PageCount


class MoverCard(Struct, frozen=True):
    """How other movers reach this one: a NIXL agent name, its metadata, the memory that it registered and where it is.

    The metadata holds memory keys: whoever has it can read the memory. It is never logged.
    """

    name: Word
    metadata: bytes
    regions: list[RegionCard]
    place: Place


class RankCard(Struct, frozen=True):
    """One registered rank of a pod."""

    rank: RankId
    factors: dict[Word, Any]
    mover: MoverCard
