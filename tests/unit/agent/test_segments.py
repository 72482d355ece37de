"""Memory handed over as file descriptors: mapped once, checked first, closed always."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from disagg_agent.cards import HOST, RegionDeclaration
from disagg_agent.errors import RegistrationRefused
from disagg_agent.segments import create_segment, map_segments, region_cards


def test_both_sides_see_the_same_bytes(open_fds: Callable[[], set[str]]) -> None:
    before = open_fds()
    fd, ours = create_segment("test", 3 * 4096)
    (theirs,) = map_segments([fd], [3 * 4096])
    assert theirs.address != ours.address
    ours.bytes[5000] = 7
    theirs.bytes[12287] = 9
    assert (theirs.bytes[5000], ours.bytes[12287]) == (7, 9)
    assert ours.size == theirs.size == len(theirs.bytes) == 12288
    assert ours.place == theirs.place == HOST
    # Python's mmap keeps a descriptor of its own for either mapping; the one that was handed over is closed.
    assert len(open_fds() - before) == 2
    assert not any(name.startswith(f"{fd} ") for name in open_fds())


def test_a_part_of_the_memory_may_be_mapped() -> None:
    fd, ours = create_segment("test", 8192)
    (theirs,) = map_segments([fd], [4096])
    theirs.bytes[4095] = 3
    assert ours.bytes[4095] == 3
    assert theirs.size == 4096


@pytest.mark.parametrize("sizes", [[], [4096, 4096]])
def test_as_many_descriptors_as_segments(open_fds: Callable[[], set[str]], sizes: list[int]) -> None:
    fd, _ = create_segment("test", 4096)
    with pytest.raises(RegistrationRefused) as caught:
        map_segments([fd], sizes)
    assert caught.value.code == "BadSegments"
    assert "1 file descriptors" in caught.value.message
    assert f"{len(sizes)} segments" in caught.value.message
    assert not any(name.startswith(f"{fd} ") for name in open_fds())


@pytest.mark.parametrize("size", [0, 4097, 2**62])
def test_a_segment_shorter_than_it_is_said_to_be(open_fds: Callable[[], set[str]], size: int) -> None:
    good, _ = create_segment("good", 4096)
    bad, _ = create_segment("bad", 4096)
    with pytest.raises(RegistrationRefused) as caught:
        map_segments([good, bad], [4096, size])
    assert caught.value.code == "BadSegments"
    assert f"segment 1 is said to have {size} bytes, it has 4096" in caught.value.message
    assert not any(name.startswith((f"{good} ", f"{bad} ")) for name in open_fds())


def test_descriptors_that_are_no_writable_memory(tmp_path: Path, open_fds: Callable[[], set[str]]) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    for fd in (os.open(path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY), os.open("/dev/null", os.O_RDWR)):
        with pytest.raises(RegistrationRefused) as caught:
            map_segments([fd], [4096])
        assert caught.value.code == "BadSegments"
        assert not any(name.startswith(f"{fd} ") for name in open_fds())


def test_addresses_of_regions() -> None:
    first, second = (create_segment("test", 8192) for _ in range(2))
    regions = [RegionDeclaration("g", 3, 0, 1, 4096, 100, 128, 7), RegionDeclaration("g", 3, 1, 0, 0, 100, 128, 7)]
    cards = region_cards([first[1], second[1]], regions)
    assert [card.base for card in cards] == [second[1].address + 4096, first[1].address]
    assert [(card.group, card.layer, card.region, card.stride, card.pages) for card in cards] == [
        ("g", 3, 0, 128, 7),
        ("g", 3, 1, 128, 7),
    ]
    os.close(first[0])
    os.close(second[0])
