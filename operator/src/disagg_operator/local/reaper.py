"""Ends what a killed runner leaves behind: reads on standard input what it started, and acts when that ends.

Children of a runner die with it, but not their own children (a real engine is a tree of processes), and nobody
would remove its folder of sockets. Uses the standard library alone, so that it starts in milliseconds.

Lines: `+PID` a session was started, `-PID` it has ended, `/…` a folder to remove.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable


def reap(lines: Iterable[str]) -> None:
    """Follow a runner until its end, then end every session that it has not ended and remove its folders."""
    sessions: set[int] = set()
    folders: set[str] = set()
    for line in lines:
        word = line.rstrip("\n")
        if word.startswith("+"):
            sessions.add(int(word[1:]))
        elif word.startswith("-"):
            sessions.discard(int(word[1:]))
        elif word.startswith("/"):
            folders.add(word)
    for session in sessions:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    reap(sys.stdin)
