"""GPU memory as torch has it. The only module here that calls CUDA, and only for tensors that are on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disagg_agent.cards import HOST, Place
from disagg_agent.errors import RegistrationRefused
from disagg_agent.mover import PROBE_BYTES
from disagg_agent.segments import DeviceAccess


@dataclass(frozen=True)
class TensorMemory:
    """A storage as the agent's library wants it told; the storage keeps the memory alive."""

    storage: torch.UntypedStorage
    place: Place

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.storage.data_ptr())

    @property
    def size(self) -> int:
        """Its bytes."""
        return int(self.storage.nbytes())


def place_of(device: torch.device) -> Place:
    """Where a tensor of this device is.

    Raises:
        RegistrationRefused: `UnknownMemory`, neither a CPU's nor a CUDA GPU's.
    """
    if device.type == "cpu":
        return HOST
    if device.type == "cuda":
        return Place("VRAM", device.index or 0)
    raise RegistrationRefused("UnknownMemory", f"the cache is on {device}, which is neither host memory nor a CUDA GPU")


def memory_of(storage: torch.UntypedStorage) -> TensorMemory:
    """A storage with its place.

    Raises:
        RegistrationRefused: as `place_of`.
    """
    return TensorMemory(storage, place_of(storage.device))


def access(place: Place) -> DeviceAccess | None:
    """What a mover of that memory needs; None for host memory."""
    if place.kind == "DRAM":
        return None
    device = torch.device("cuda", place.device)
    scratch = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=device)

    def enter() -> None:
        torch.cuda.set_device(device)
        # Setting the device that a thread has by default does nothing; only work makes its context current.
        torch.zeros(1, device=device)

    return DeviceAccess(TensorMemory(scratch.untyped_storage(), place), enter)


def mark(place: Place) -> torch.cuda.Event:
    """A fence behind all work that the current stream of a GPU has been given. Waiting for it leaves the core alone."""
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(place.device))
    return event
