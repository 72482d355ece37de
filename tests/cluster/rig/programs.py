"""Programs that end with the test run, whatever ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rig.binaries import RigError

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_STOP_SECONDS = 10.0


class Program:
    """One process with a log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                preexec_fn=_die_with_parent,
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """Ask it to end; end it if it does not."""
        if self.alive:
            self.process.terminate()
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()

    def tail(self, lines: int = 15) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def until(condition: Callable[[], bool], what: str, seconds: float, programs: Sequence[Program] = ()) -> None:
    """Wait for a condition.

    Raises:
        RigError: the time ran out, or one of `programs` ended; with the tail of its log.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        for program in programs:
            if not program.alive:
                raise RigError(f"{program.name} ended while waiting for {what}:\n{program.tail()}")
        if time.monotonic() > deadline:
            tails = "\n".join(f"--- {program.name}\n{program.tail()}" for program in programs)
            raise RigError(f"{what}: not after {seconds:.0f} s\n{tails}")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
