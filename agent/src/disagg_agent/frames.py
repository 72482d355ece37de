"""Frames on sockets: four bytes of big-endian length, then one msgpack message.

The same framing serves the engine socket (where file descriptors may ride on a frame) and the side channel between
agents. Every read is bounded: a length above the limit ends the connection before a byte of it is buffered.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from disagg_agent.errors import FrameError

MAX_FRAME = 64 << 20
"""Largest frame: block ids of the longest request and metadata of a pod's ranks stay far below it."""

MAX_FDS = 64
"""File descriptors that one frame may carry (`SCM_MAX_FD` of Linux is 253)."""

_HEADER = struct.Struct(">I")
_FD = array.array("i")

Message = TypeVar("Message")


class Codec(Generic[Message]):
    """Encodes any message and decodes exactly the members of one tagged union.

    Args:
        union: a union of msgspec structs with distinct tags.
        limit: largest frame in bytes.
    """

    def __init__(self, union: Any, limit: int = MAX_FRAME) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()
        self.limit = limit

    def encode(self, message: msgspec.Struct) -> bytes:
        """One whole frame.

        Raises:
            FrameError: `FrameTooLarge`; the sender hears it, not the receiver.
        """
        body = self._encoder.encode(message)
        if len(body) > self.limit:
            raise FrameError("FrameTooLarge", f"a {type(message).__name__} of {len(body)} bytes exceeds {self.limit}")
        return _HEADER.pack(len(body)) + body

    def decode(self, body: bytes) -> Message:
        """A frame's body.

        Raises:
            FrameError: `BadFrame` if it is no message of the union.
        """
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise FrameError("BadFrame", f"{len(body)} bytes are no message of this protocol: {error}") from error

    async def read(self, reader: asyncio.StreamReader) -> Message | None:
        """The next message, or None at the end of the stream.

        Raises:
            FrameError: `FrameTooLarge`, `BadFrame`, or `TornFrame` if the stream ends inside a frame.
        """
        try:
            header = await reader.readexactly(_HEADER.size)
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise FrameError("TornFrame", "the stream ended inside a header") from error
            return None
        size = self._length(header)
        try:
            return self.decode(await reader.readexactly(size))
        except asyncio.IncompleteReadError as error:
            raise FrameError("TornFrame", f"the stream ended after {len(error.partial)} of {size} bytes") from error

    def receive(self, sock: socket.socket) -> tuple[Message | None, list[int]]:
        """Blocking twin of `read` that also collects file descriptors; the caller owns (and closes) them.

        Raises:
            FrameError: as `read`; descriptors that came along are closed first.
            OSError: the socket failed or timed out.
        """
        fds: list[int] = []
        try:
            header = _receive_exactly(sock, _HEADER.size, fds, may_end=True)
            if not header:
                return None, fds
            body = _receive_exactly(sock, self._length(header), fds, may_end=False)
            return self.decode(body), fds
        except BaseException:
            close_all(fds)
            raise

    def _length(self, header: bytes) -> int:
        size = int(_HEADER.unpack(header)[0])
        if size > self.limit:
            raise FrameError("FrameTooLarge", f"a frame of {size} bytes exceeds {self.limit}")
        return size


def send_with_fds(sock: socket.socket, frame: bytes, fds: list[int]) -> None:
    """Send a frame on a blocking Unix socket, descriptors riding on its first byte."""
    if len(fds) > MAX_FDS:
        raise FrameError("TooManyDescriptors", f"{len(fds)} file descriptors on one frame, at most {MAX_FDS}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = sock.sendmsg([frame], rights)
    if sent < len(frame):
        # Not for nothing: even an empty send fails once the receiver has answered and closed.
        sock.sendall(frame[sent:])


def close_all(fds: list[int]) -> None:
    """Close descriptors that nobody will use."""
    for fd in fds:
        os.close(fd)


def _receive_exactly(sock: socket.socket, size: int, fds: list[int], may_end: bool) -> bytes:
    """Exactly `size` bytes, or none if the stream may end here and does."""
    chunks: list[bytes] = []
    left = size
    while left:
        # Not `socket.recv_fds`: it ignores its flags, and what it receives would be inherited by children.
        data, control, flags, _address = sock.recvmsg(
            min(left, 1 << 20), socket.CMSG_SPACE(MAX_FDS * _FD.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, rights in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.extend(array.array("i", rights[: len(rights) - len(rights) % _FD.itemsize]))
        if len(fds) > MAX_FDS or flags & socket.MSG_CTRUNC:
            raise FrameError("TooManyDescriptors", f"more than {MAX_FDS} file descriptors on one frame")
        if not data:
            if left == size and may_end:
                return b""
            raise FrameError("TornFrame", f"the stream ended after {size - left} of {size} bytes")
        chunks.append(data)
        left -= len(data)
    return b"".join(chunks)
