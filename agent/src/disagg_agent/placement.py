"""Where a rank's mover may live, by where its memory is: one decision for engine and agent.

GPU memory stays in the process that allocated it. A file descriptor cannot hand it over as it can host memory, and
another process's mapping of it (CUDA IPC) is nothing that a network card can be relied on to reach.
"""

from __future__ import annotations

from collections.abc import Iterable

from disagg_agent.cards import HOST, Place, Placement
from disagg_agent.errors import RegistrationRefused


def choose_placement(wanted: str, place: Place) -> Placement:
    """Placement of a rank whose deployment wants `auto`, `agent` or `engine`; `auto` goes by the kind of memory.

    Whether a placement that was asked for by name is possible is the agent's to judge (`check_placement`): its refusal
    is what an operator reads.

    Raises:
        RegistrationRefused: `UnknownPlacement`.
    """
    match wanted:
        case "auto":
            return "engine" if place.kind == "VRAM" else "agent"
        case "agent" | "engine":
            return wanted
        case _:
            raise RegistrationRefused("UnknownPlacement", f"{wanted!r} is none of the placements auto, agent, engine")


def check_placement(placement: Placement, place: Place, who: str) -> None:
    """Whether a mover in that process can register the memory.

    Args:
        who: the rank, for messages.

    Raises:
        RegistrationRefused: `UnsharableMemory`, GPU memory for a mover in the agent.
    """
    if placement == "agent" and place.kind != "DRAM":
        raise RegistrationRefused(
            "UnsharableMemory",
            f"{who} has {place}, which an engine cannot hand over to its agent as it can host memory; use placement "
            "InEngine or Auto, where the mover lives in the engine",
        )


def one_place(places: Iterable[Place], who: str) -> Place:
    """The place that all memory of a rank shares; host memory if there is none.

    Raises:
        RegistrationRefused: `MixedMemory`; a transfer has one kind of memory on either side.
    """
    found = set(places)
    if len(found) > 1:
        names = sorted(str(place) for place in found)
        raise RegistrationRefused(
            "MixedMemory", f"{who} has memory in {len(found)} places, {' and '.join(names)}; a rank's must be in one"
        )
    return found.pop() if found else HOST
