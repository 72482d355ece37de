"""Page ids on the wire, and the bounds that every message has."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_agent import messages
from disagg_agent.cards import HOST, MoverCard, Place, RankCard, RegionCard, SegmentDeclaration
from disagg_agent.errors import FrameError
from disagg_agent.frames import Codec
from disagg_agent.messages import (
    Cancel,
    Move,
    Moved,
    MoveSource,
    Ranks,
    SideChannel,
    SourceRef,
    ToAgent,
    ToEngine,
    pack_pages,
    unpack_pages,
)

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32))
def test_page_ids_survive(ids: list[int]) -> None:
    found = unpack_pages(pack_pages(np.array(ids, dtype=np.int64)))
    assert found.dtype == np.int64
    assert found.tolist() == ids


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_whole_number_type_packs_alike(dtype: Any) -> None:
    assert pack_pages(np.array([0, 1, 127], dtype=dtype)) == b"\0\0\0\0\1\0\0\0\x7f\0\0\0"


def test_plain_lists_and_no_ids_pack() -> None:
    assert pack_pages([258]) == b"\2\1\0\0"
    assert pack_pages([]) == b""
    assert unpack_pages(b"").tolist() == []


@pytest.mark.parametrize(
    "ids",
    [[2**31], [-(2**31) - 1], np.array([2**63], dtype=np.uint64), [1.0], [0.5], [True], ["1"], [None]],
    ids=repr,
)
def test_what_is_no_page_id_is_refused(ids: Any) -> None:
    with pytest.raises(FrameError) as caught:
        pack_pages(ids)
    assert caught.value.code == "BadPages"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 4097])
def test_a_cut_list_is_refused_with_its_length(size: int) -> None:
    with pytest.raises(FrameError) as caught:
        unpack_pages(bytes(size))
    assert caught.value.code == "BadPages"
    assert str(size) in caught.value.message


def test_every_member_of_a_conversation_has_its_own_tag() -> None:
    for union in (ToAgent, ToEngine, SideChannel):
        tags = [member.__struct_config__.tag for member in get_args(union)]
        assert len(set(tags)) == len(tags) > 5
        Codec(union)


def test_every_message_refuses_fields_that_it_does_not_know() -> None:
    structs = [
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__struct_fields__
    ]
    assert len(structs) > 25
    for struct in structs:
        assert struct.__struct_config__.forbid_unknown_fields, struct
        assert struct.__struct_config__.frozen, struct


@pytest.mark.parametrize(
    ("struct", "field", "value"),
    [
        (SourceRef, "port", 65536),
        (SourceRef, "port", -1),
        (SourceRef, "host", "h" * 257),
        (RegionCard, "base", -1),
        (RegionCard, "pages", 2**31),
        (Place, "kind", "FILE"),
        (Place, "kind", "dram"),
        (Place, "device", -1),
        (Place, "device", 2**16 + 1),
        (SegmentDeclaration, "size", -1),
        (SegmentDeclaration, "place", None),
        (Moved, "bytes", -1),
        (Moved, "message", "m" * 4097),
    ],
)
def test_values_out_of_bounds_are_refused(struct: Any, field: str, value: Any) -> None:
    good = {
        SourceRef: SourceRef("p", "r", "g", "h", 1),
        RegionCard: RegionCard("g", 0, 0, 0, 1, 2**31 - 1),
        Place: Place("VRAM", 2**16),
        SegmentDeclaration: SegmentDeclaration(4096, HOST),
        Moved: Moved("0/r", 0, 0.0, "", ""),
    }[struct]
    plain = msgspec.to_builtins(good)
    assert msgspec.convert(plain, struct) == good
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({**plain, field: value}, struct)


def test_the_longest_request_of_the_highest_rank_has_a_move_that_can_be_sent() -> None:
    """With the mover in the engine a move goes over a socket, and its names are made of ours."""
    codec: Codec[ToEngine] = Codec(ToEngine)
    back: Codec[ToAgent] = Codec(ToAgent)
    request, replica = "r" * 256, "p" * 256
    move = Move(f"65536/{request}", 1, 0, {}, [MoveSource(f"{replica}/p65536", {})])
    assert codec.decode(codec.encode(move)[4:]) == move
    assert codec.decode(codec.encode(Cancel(move.id))[4:]) == Cancel(move.id)
    moved = Moved(move.id, 0, 0.0, "", "")
    assert back.decode(back.encode(moved)[4:]) == moved


def test_a_card_says_where_its_memory_is() -> None:
    """Nothing is assumed of memory: a card that does not say is no card."""
    codec: Codec[SideChannel] = Codec(SideChannel)
    mover = MoverCard("prefill-0", b"keys", [RegionCard("g", 0, 0, 4096, 64, 8)], Place("VRAM", 5))
    ranks = Ranks([RankCard(0, {}, mover)])
    assert codec.decode(codec.encode(ranks)[4:]) == ranks
    plain = msgspec.to_builtins(mover)
    del plain["place"]
    with pytest.raises(msgspec.ValidationError, match="place"):
        msgspec.convert(plain, MoverCard)
