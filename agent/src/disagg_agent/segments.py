"""Shared memory between an engine and its agent: made by one, mapped by the other, passed as file descriptors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from disagg_agent.cards import HOST, Place, RegionCard, RegionDeclaration
from disagg_agent.errors import RegistrationRefused
from disagg_agent.frames import close_all

Bytes = NDArray[np.uint8]


class Memory(Protocol):
    """Memory of this process that a mover may be given; whoever owns it keeps it alive."""

    @property
    def address(self) -> int:
        """Where it begins."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def place(self) -> Place:
        """Host memory, or which GPU's."""


@dataclass(frozen=True)
class DeviceAccess:
    """What a mover needs to use GPU memory of its process; whoever owns the memory makes it.

    Attributes:
        scratch: memory of the same GPU that nothing else uses, for probes: a probe into host memory would take another
            path than requests do, and prove nothing about theirs.
        enter: called first of all on the mover's thread, to make the GPU current there. A new thread has none, and UCX
            without one quietly does without the links between GPUs.
    """

    scratch: Memory
    enter: Callable[[], None]


class Segment:
    """A mapped file descriptor: host memory.

    Attributes:
        bytes: the memory as an array of uint8; views of it keep the mapping alive.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.size = size
        self.place: Place = HOST


def create_segment(name: str, size: int) -> tuple[int, Segment]:
    """New anonymous shared memory; the descriptor is the caller's to pass on and close."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd, Segment(fd, size)


def map_segments(fds: list[int], sizes: Sequence[int]) -> list[Segment]:
    """Map what an engine handed over, and close the descriptors whatever happens.

    Raises:
        RegistrationRefused: `BadSegments` if the descriptors do not match the sizes or are no such memory.
    """
    try:
        if len(fds) != len(sizes):
            raise RegistrationRefused("BadSegments", f"{len(fds)} file descriptors came for {len(sizes)} segments")
        segments = []
        for index, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
            actual = os.fstat(fd).st_size
            if size < 1 or actual < size:
                # Touching a mapping beyond the end of its file is a SIGBUS, not an error: refuse it here.
                raise RegistrationRefused(
                    "BadSegments", f"segment {index} is said to have {size} bytes, it has {actual}"
                )
            segments.append(Segment(fd, size))
        return segments
    except (OSError, ValueError) as error:
        raise RegistrationRefused("BadSegments", f"a segment cannot be mapped: {error}") from error
    finally:
        close_all(fds)


def region_cards(segments: Sequence[Memory], regions: Sequence[RegionDeclaration]) -> list[RegionCard]:
    """Addresses of declared regions in this process."""
    return [
        RegionCard(
            region.group,
            region.layer,
            region.region,
            segments[region.segment].address + region.offset,
            region.stride,
            region.pages,
        )
        for region in regions
    ]
