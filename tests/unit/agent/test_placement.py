"""Where a mover may live, by where its memory is."""

from __future__ import annotations

import pytest

from disagg_agent.cards import HOST, Place
from disagg_agent.errors import RegistrationRefused
from disagg_agent.placement import check_placement, choose_placement, one_place

GPU = Place("VRAM", 3)


@pytest.mark.parametrize(
    ("wanted", "place", "placement"),
    [
        ("auto", HOST, "agent"),
        ("auto", GPU, "engine"),
        ("auto", Place("VRAM", 0), "engine"),
        ("agent", HOST, "agent"),
        ("engine", HOST, "engine"),
        ("engine", GPU, "engine"),
        # Impossible, and the agent's to refuse: its refusal is what an operator reads.
        ("agent", GPU, "agent"),
    ],
)
def test_placement_by_memory(wanted: str, place: Place, placement: str) -> None:
    assert choose_placement(wanted, place) == placement


@pytest.mark.parametrize("wanted", ["", "Auto", "InEngine", "sidecar"])
def test_a_placement_that_does_not_exist(wanted: str) -> None:
    with pytest.raises(RegistrationRefused) as caught:
        choose_placement(wanted, HOST)
    assert caught.value.code == "UnknownPlacement"
    assert repr(wanted) in caught.value.message


def test_gpu_memory_cannot_be_served_by_the_agent() -> None:
    for placement, place in (("agent", HOST), ("engine", HOST), ("engine", GPU)):
        check_placement(placement, place, "decode rank 1")
    with pytest.raises(RegistrationRefused) as caught:
        check_placement("agent", GPU, "decode rank 1")
    assert str(caught.value) == (
        "UnsharableMemory: decode rank 1 has VRAM of device 3, which an engine cannot hand over to its agent as it can "
        "host memory; use placement InEngine or Auto, where the mover lives in the engine"
    )


def test_all_memory_of_a_rank_is_in_one_place() -> None:
    assert one_place([], "rank 0") == HOST
    assert one_place([GPU, GPU], "rank 0") == GPU
    for places in ([GPU, HOST], [GPU, Place("VRAM", 0)], [HOST, GPU, Place("VRAM", 0)]):
        with pytest.raises(RegistrationRefused) as caught:
            one_place(places, "decode rank 1")
        assert caught.value.code == "MixedMemory"
        assert "decode rank 1" in caught.value.message
        for place in places:
            assert str(place) in caught.value.message
