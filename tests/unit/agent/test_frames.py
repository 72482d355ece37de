"""Frames: what goes in comes out, and whatever else comes in ends in a named error with nothing left open."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_agent.errors import FrameError
from disagg_agent.frames import MAX_FDS, Codec, send_with_fds
from disagg_agent.messages import Abort, Bye, Failed, Held, Load, Opened, SideChannel, SourceRef, ToAgent, ToEngine

LOAD = Load("r", SourceRef("prefill-0", "s", "g", "::1", 65535), 40, 16, {"attention": b"\1\0\0\0\2\0\0\0"})

BAD_BODIES = {
    "nothing": b"",
    "garbage": b"\xc1" * 24,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "no message": msgspec.msgpack.encode([1, 2, 3]),
    "no tag": msgspec.msgpack.encode({"request": "r"}),
    "unknown tag": msgspec.msgpack.encode({"type": "adopt", "request": "r"}),
    "tag of another conversation": msgspec.msgpack.encode(
        {"type": "held", "request": "r", "generation": "g", "lease": 1.0}
    ),
    "unknown field": msgspec.msgpack.encode({"type": "abort", "request": "r", "force": True}),
    "missing field": msgspec.msgpack.encode({"type": "abort"}),
    "wrong type": msgspec.msgpack.encode({"type": "abort", "request": 5}),
    "empty request id": msgspec.msgpack.encode({"type": "abort", "request": ""}),
    "request id too long": msgspec.msgpack.encode({"type": "abort", "request": "r" * 257}),
    "not UTF-8": msgspec.msgpack.encode({"type": "abort", "request": "abc"}).replace(b"abc", b"\xff\xfe\xfd"),
    "something behind": msgspec.msgpack.encode({"type": "abort", "request": "r"}) + b"\0",
    "cut short": msgspec.msgpack.encode({"type": "abort", "request": "r"})[:-1],
    "endless array": b"\xdd\xff\xff\xff\xff",
    "deeper than any stack": (
        b"\x87\xa4type\xa8register\xa8protocol\x01\xa4rank\x00\xa9placement\xa5agent\xa8segments\x90\xa7regions\x90"
        b"\xa7factors\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    ),
}


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.fixture
def codec() -> Codec[ToAgent]:
    return Codec(ToAgent, limit=1 << 20)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    right.settimeout(10.0)
    with left, right:
        yield left, right


def read(codec: Codec[ToAgent], data: bytes) -> list[ToAgent | None]:
    """All messages of a stream that ends after `data`, and None for its end."""

    async def main() -> list[ToAgent | None]:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        found: list[ToAgent | None] = []
        while not found or found[-1] is not None:
            found.append(await codec.read(reader))
        return found

    return asyncio.run(main())


# Round trips.


def test_frames_arrive_in_order_and_then_the_stream_ends(codec: Codec[ToAgent]) -> None:
    data = codec.encode(LOAD) + codec.encode(Abort("r")) + codec.encode(Abort("s"))
    assert read(codec, data) == [LOAD, Abort("r"), Abort("s"), None]


def test_a_frame_may_arrive_byte_by_byte(codec: Codec[ToAgent]) -> None:
    async def main() -> ToAgent | None:
        reader = asyncio.StreamReader()
        reading = asyncio.create_task(codec.read(reader))
        for byte in codec.encode(LOAD):
            reader.feed_data(bytes([byte]))
            await asyncio.sleep(0)
        return await reading

    assert asyncio.run(main()) == LOAD


@given(request=st.text(min_size=1, max_size=256), pages=st.dictionaries(st.text(max_size=20), st.binary(max_size=64)))
def test_any_load_survives_the_wire(request: str, pages: dict[str, bytes]) -> None:
    codec: Codec[ToAgent] = Codec(ToAgent)
    message = Load(request, SourceRef("p", request, "g", "h", 1), 2**62, 0, pages)
    assert read(codec, codec.encode(message)) == [message, None]


def test_receive_takes_exactly_one_frame_and_its_descriptors(
    codec: Codec[ToAgent], pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    pipe = os.pipe()
    try:
        send_with_fds(ours, codec.encode(LOAD), list(pipe))
        send_with_fds(ours, codec.encode(Abort("r")), [])
    finally:
        for fd in pipe:
            os.close(fd)
    message, fds = codec.receive(theirs)
    assert message == LOAD
    read_end, write_end = fds
    os.write(write_end, b"through the other process's pipe")
    assert os.read(read_end, 100) == b"through the other process's pipe"
    assert not os.get_inheritable(read_end)
    for fd in fds:
        os.close(fd)
    assert codec.receive(theirs) == (Abort("r"), [])
    ours.close()
    assert codec.receive(theirs) == (None, [])


def test_a_frame_larger_than_every_socket_buffer_is_received(pair: tuple[socket.socket, socket.socket]) -> None:
    codec: Codec[ToAgent] = Codec(ToAgent)
    ours, theirs = pair
    message = Load("r", LOAD.source, 1, 0, {"attention": bytes(8 << 20)})
    sender = threading.Thread(target=send_with_fds, args=(ours, codec.encode(message), []))
    sender.start()
    assert codec.receive(theirs) == (message, [])
    sender.join(10.0)
    assert not sender.is_alive()


def test_a_struct_of_the_other_direction_is_refused() -> None:
    to_engine: Codec[ToEngine] = Codec(ToEngine)
    side: Codec[SideChannel] = Codec(SideChannel)
    assert to_engine.decode(to_engine.encode(Held("r", "g", 1.0))[4:]) == Held("r", "g", 1.0)
    with pytest.raises(FrameError) as caught:
        side.decode(to_engine.encode(Failed("r", "c", "m", True))[4:])
    assert caught.value.code == "BadFrame"


# Refusals.


def verdict(body: bytes) -> str:
    """What a side channel makes of a body; anything but a `FrameError` is a crash."""
    codec: Codec[SideChannel] = Codec(SideChannel)
    try:
        codec.decode(body)
    except FrameError as error:
        return error.code
    return "message"


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_bad_body_is_named(codec: Codec[ToAgent], body: bytes) -> None:
    with pytest.raises(FrameError) as caught:
        read(codec, frame(body))
    assert caught.value.code == "BadFrame"
    assert f"{len(body)} bytes" in caught.value.message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_frame_error(body: bytes) -> None:
    assert verdict(body) in ("message", "BadFrame")


@given(st.data())
def test_a_damaged_message_is_a_message_or_a_frame_error(data: st.DataObject) -> None:
    codec: Codec[SideChannel] = Codec(SideChannel)
    body = bytearray(codec.encode(Opened("r", "g", 1, 2, {"attention": b"\1\0\0\0"}, 12.5))[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert verdict(bytes(body)) in ("message", "BadFrame")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stream_that_ends_in_a_header_is_torn(codec: Codec[ToAgent], cut: int) -> None:
    with pytest.raises(FrameError) as caught:
        read(codec, codec.encode(LOAD)[:cut])
    assert caught.value.code == "TornFrame"


@pytest.mark.parametrize("missing", [1, 10, "all"])
def test_a_stream_that_ends_in_a_body_is_torn_with_both_numbers(codec: Codec[ToAgent], missing: int | str) -> None:
    whole = codec.encode(LOAD)
    size = len(whole) - 4
    came = 0 if missing == "all" else size - int(missing)
    with pytest.raises(FrameError) as caught:
        read(codec, whole[: 4 + came])
    assert caught.value.code == "TornFrame"
    assert f"{came} of {size} bytes" in caught.value.message


def test_a_length_above_the_limit_ends_the_read_before_a_byte_of_it_has_come(codec: Codec[ToAgent]) -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack(">I", codec.limit + 1))
        # No body and no end of stream: only a reader that judges the length first can return.
        async with asyncio.timeout(10.0):
            await codec.read(reader)

    with pytest.raises(FrameError) as caught:
        asyncio.run(main())
    assert caught.value.code == "FrameTooLarge"
    assert str(codec.limit + 1) in caught.value.message
    assert str(codec.limit) in caught.value.message


def test_the_sender_hears_that_its_message_is_too_large(codec: Codec[ToAgent]) -> None:
    fits = Load("r", LOAD.source, 1, 0, {"a": bytes(codec.limit - 200)})
    assert read(codec, codec.encode(fits)) == [fits, None]
    with pytest.raises(FrameError) as caught:
        codec.encode(Load("r", LOAD.source, 1, 0, {"a": bytes(codec.limit)}))
    assert caught.value.code == "FrameTooLarge"
    assert "Load" in caught.value.message


# Descriptors never outlive a failure.


def send_raw(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


FAILURES = {
    "torn header": (b"\0\0", "TornFrame"),
    "torn body": (frame(bytes(100))[:50], "TornFrame"),
    "no body at all": (struct.pack(">I", 100), "TornFrame"),
    "no body of four bytes": (struct.pack(">I", 4), "TornFrame"),
    "too large": (struct.pack(">I", 2**31), "FrameTooLarge"),
    **{name: (frame(body), "BadFrame") for name, body in BAD_BODIES.items() if len(body) < 1000},
}


@pytest.mark.parametrize(("data", "code"), FAILURES.values(), ids=FAILURES)
def test_descriptors_of_a_failed_frame_are_closed(
    codec: Codec[ToAgent],
    pair: tuple[socket.socket, socket.socket],
    open_fds: Callable[[], set[str]],
    data: bytes,
    code: str,
) -> None:
    ours, theirs = pair
    before = open_fds()
    pipe = os.pipe()
    send_raw(ours, data, list(pipe))
    for fd in pipe:
        os.close(fd)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(FrameError) as caught:
        codec.receive(theirs)
    assert caught.value.code == code
    assert open_fds() == before


def test_descriptors_are_closed_when_the_socket_times_out(
    codec: Codec[ToAgent], pair: tuple[socket.socket, socket.socket], open_fds: Callable[[], set[str]]
) -> None:
    ours, theirs = pair
    before = open_fds()
    pipe = os.pipe()
    send_raw(ours, codec.encode(LOAD)[:20], list(pipe))
    for fd in pipe:
        os.close(fd)
    theirs.settimeout(0.05)
    with pytest.raises(TimeoutError):
        codec.receive(theirs)
    assert open_fds() == before


def test_a_frame_cannot_collect_descriptors_without_end(
    codec: Codec[ToAgent], pair: tuple[socket.socket, socket.socket], open_fds: Callable[[], set[str]]
) -> None:
    ours, theirs = pair
    before = open_fds()
    pipe = os.pipe()
    data = codec.encode(LOAD)
    for part in (data[:10], data[10:20], data[20:]):
        send_raw(ours, part, [pipe[0]] * (MAX_FDS // 2))
    for fd in pipe:
        os.close(fd)
    with pytest.raises(FrameError) as caught:
        codec.receive(theirs)
    assert caught.value.code == "TooManyDescriptors"
    assert open_fds() == before


def test_sending_too_many_descriptors_is_refused_before_anything_is_sent(
    codec: Codec[ToAgent], pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    with pytest.raises(FrameError) as caught:
        send_with_fds(ours, codec.encode(LOAD), [ours.fileno()] * (MAX_FDS + 1))
    assert caught.value.code == "TooManyDescriptors"
    ours.close()
    assert codec.receive(theirs) == (None, [])


def test_reasons_fit_into_a_frame_however_long_they_are() -> None:
    codec: Codec[SideChannel] = Codec(SideChannel)
    error = FrameError("Code", "x" * 100_000)
    assert codec.decode(codec.encode(Bye(error.code, error.message))[4:]) == Bye(error.code, error.message)
    assert error.message.startswith("xxxx")
