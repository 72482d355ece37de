"""One connection of the side channel: framed messages, bounded buffers, greetings compared first."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket

import msgspec

from disagg_agent.errors import FrameError, PeerRefused
from disagg_agent.frames import Codec
from disagg_agent.handshake import check_hello
from disagg_agent.messages import Bye, Hello, SideChannel

HANDSHAKE_SECONDS = 5.0
_MAX_FRAME = 16 << 20
_MAX_BUFFERED = 32 << 20
_numbers = itertools.count(1)


class Channel:
    """A connection whose greetings have been exchanged and agree.

    Attributes:
        number: unique in this process, for logs and as a key.
        peer: the other side's greeting.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: Codec[SideChannel], peer: Hello
    ) -> None:
        self.number = next(_numbers)
        self.peer = peer
        self._reader = reader
        self._writer = writer
        self._codec = codec

    @staticmethod
    async def open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ours: Hello) -> Channel:
        """Exchange greetings on a fresh connection, in either role.

        Raises:
            PeerRefused: the greetings differ, or the other side said so first.
            FrameError: what came is no greeting.
            TimeoutError: nothing came in time.
            OSError: the connection failed.
        """
        # Small frames in both directions: without this, each waits for the other's delayed acknowledgement.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        codec: Codec[SideChannel] = Codec(SideChannel, limit=_MAX_FRAME)
        writer.write(codec.encode(ours))
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            theirs = await codec.read(reader)
        if theirs is None:
            raise FrameError("PeerClosed", "the peer closed the connection before its greeting")
        if isinstance(theirs, Bye):
            raise PeerRefused(theirs.code, theirs.message)
        if not isinstance(theirs, Hello):
            raise FrameError("BadFrame", f"the peer greets with {type(theirs).__name__}")
        try:
            check_hello(ours, theirs)
        except PeerRefused as error:
            writer.write(codec.encode(Bye(error.code, error.message)))
            raise
        return Channel(reader, writer, codec, theirs)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message. A peer that does not read is cut off rather than buffered for ever, and delays nobody."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MAX_BUFFERED:
            transport.abort()
            return
        self._writer.write(self._codec.encode(message))

    async def receive(self) -> SideChannel | None:
        """The next message, or None when the peer has closed.

        Raises:
            FrameError: bytes that are no message; the connection is of no more use.
            PeerRefused: the peer says why it ends the connection.
            OSError: the connection failed.
        """
        message = await self._codec.read(self._reader)
        if isinstance(message, Bye):
            raise PeerRefused(message.code, message.message)
        return message

    def abort(self) -> None:
        """End the connection now; a pending `receive` returns."""
        self._writer.transport.abort()

    async def close(self, reason: Bye | None = None) -> None:
        """Say why, and close."""
        if reason is not None:
            self.send(reason)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
