"""The one place that calls NIXL: names its errors, and holds what its bindings need to be told.

Measured traps that this module absorbs (NIXL 1.5.1):

* the progress thread busy-polls a core for ever, so it is off, and whoever owns a port drives progress;
* `add_remote_agent` returns bytes, and `release` of a handle in flight does not stop its data;
* truncated metadata poisons the agent name it carries: names are never reused (`mover.py` makes them unique).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from disagg_agent.cards import HOST, MemoryKind, Place
from disagg_agent.errors import MoverError

if TYPE_CHECKING:
    from collections.abc import Iterator

Operation = Literal["READ", "WRITE"]


class NixlPort:
    """A NIXL agent with the UCX backend and no thread of its own. Not thread-safe: one thread owns it.

    Args:
        name: unique for ever; a name seen once with bad metadata is unusable.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._peers: set[str] = set()
        with named("NixlUnavailable"):
            # Imported here: the plan room, tests and tools use this package without NIXL installed.
            from nixl._api import nixl_agent, nixl_agent_config

            _quieten()
            self._agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))

    def register(self, segments: Iterable[tuple[int, int]], place: Place = HOST) -> None:
        """Register memory, `(address, bytes)` each, all in one place.

        Raises:
            MoverError: `RegisterFailed`; for GPU memory also where UCX has no support for it or was told to do without.
        """
        rows = [(address, size, place.device, "") for address, size in segments]
        try:
            with named("RegisterFailed"):
                self._agent.register_memory(rows, place.kind)
        except MoverError as error:
            if place.kind == "DRAM":
                raise
            hint = "UCX must be able to see the GPU: where UCX_TLS is set, it has to contain cuda_copy"
            raise MoverError(error.code, f"NIXL takes no {place}: {error.message}; {hint}") from error

    def metadata(self) -> bytes:
        """Connection info and memory keys of everything registered: a secret."""
        with named("MetadataFailed"):
            return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes, expected: str) -> None:
        """Load a peer's metadata. Blocks while UCX connects: call only for a peer that has just answered.

        Raises:
            MoverError: `ConnectFailed`, or `WrongName` if the metadata is another agent's.
        """
        with named("ConnectFailed"):
            name = self._agent.add_remote_agent(metadata)
        actual = name.decode() if isinstance(name, bytes) else str(name)
        if actual != expected:
            if actual not in self._peers:
                self._agent.remove_remote_agent(actual)
            raise MoverError("WrongName", f"metadata of {actual!r} came under the name {expected!r}")
        self._peers.add(actual)

    def disconnect(self, name: str) -> None:
        """Forget a peer."""
        self._peers.discard(name)
        with named("DisconnectFailed"):
            self._agent.remove_remote_agent(name)

    def prepare(self, rows: np.ndarray[Any, np.dtype[np.uint64]], remote: str | None, kind: MemoryKind = "DRAM") -> Any:
        """Prepare one side of transfers.

        Args:
            rows: strided rows `(address, bytes, device, stride, count)`, shape `(n, 5)` of uint64.
            remote: name of the peer whose memory they lie in; None for our own.
            kind: of that side's memory; the other side's may differ.

        Raises:
            MoverError: `PrepareFailed`, the side never registered such memory under that device.
        """
        with named("PrepareFailed"):
            return self._agent.prep_xfer_dlist("NIXL_INIT_AGENT" if remote is None else remote, rows, kind)

    def post(
        self,
        operation: Operation,
        local: Any,
        local_index: np.ndarray[Any, np.dtype[np.int32]],
        remote: Any,
        remote_index: np.ndarray[Any, np.dtype[np.int32]],
    ) -> tuple[Any, bool]:
        """Make and post one transfer; its handle and whether it has ended already (shared memory copies at once)."""
        with named("TransferFailed"):
            handle = self._agent.make_prepped_xfer(operation, local, local_index, remote, remote_index)
            return handle, self._agent.transfer(handle) == "DONE"

    def ended(self, handle: Any) -> bool:
        """Whether a transfer has ended well; also drives progress.

        Raises:
            MoverError: `TransferFailed`, it has ended badly.
        """
        with named("TransferFailed"):
            state = self._agent.check_xfer_state(handle)
            if state == "ERR":
                raise MoverError("TransferFailed", "NIXL reports the transfer in error")
            return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        """Free a transfer that has ended."""
        with named("ReleaseFailed"):
            handle.release()

    def progress(self) -> None:
        """Serve remote transfers that target our memory; does nothing useful unless called often."""
        with named("ProgressFailed"):
            self._agent.get_new_notifs()


def _quieten() -> None:
    """Bring NIXL's own logger under ours: it prints to standard output, which belongs to our importer."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)


@contextmanager
def named(code: str) -> Iterator[None]:
    """Turn whatever a foreign library raises into a `MoverError` of this code."""
    # NIXL's exceptions have no base of their own but `Exception`; bad arguments surface as ValueError or TypeError.
    try:
        yield
    except MoverError:
        raise
    except Exception as error:
        raise MoverError(code, f"{type(error).__name__}: {error}") from error
