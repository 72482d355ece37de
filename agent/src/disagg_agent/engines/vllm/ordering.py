"""The order of messages and GPU kernels: nothing is said to be readable or writable before the GPU has got there.

An engine's process runs ahead of its GPU. A remote mover reads and writes GPU memory without asking any stream, so
messages that let it wait for the kernels that they depend on: a hold for those that wrote its pages, a load for those
that still use or clear the pages that it fills. With host memory there is no such thing, and nothing of this runs.

See docs/decisions/0004. Knows nothing of torch: `Fence` is what `torch.cuda.Event` offers of it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

log = logging.getLogger(__name__)

KEPT_FENCES = 64
"""Steps that are looked back on; an older one is covered by the oldest that is kept."""


class Fence(Protocol):
    """A mark in a stream of GPU work."""

    def query(self) -> bool:
        """Whether the GPU has passed it."""

    def synchronize(self) -> None:
        """Wait until it has, without holding up the interpreter."""


@dataclass(frozen=True)
class Step:
    """A step of the engine, as its scheduler numbers them.

    Attributes:
        number: counts from 1.
        written: by request that has finished since the step before: the last step that computed anything for it.
    """

    number: int = 0
    written: Mapping[str, int] = field(default_factory=dict)


class StepLog:
    """The scheduler's side: numbers the steps, and knows which one computed a request last."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[str, int] = {}

    def next(self, scheduled: Iterable[str], finished: Iterable[str]) -> Step:
        """The step that is about to run.

        Args:
            scheduled: requests that it computes.
            finished: requests that have finished since the step before.
        """
        self._number += 1
        written = {request: self._last.pop(request) for request in finished if request in self._last}
        self._last.update(dict.fromkeys(scheduled, self._number))
        return Step(self._number, written)


class DeviceOrder:
    """The worker's side: sends messages in their order, each when the GPU has ended what it depends on.

    A message whose kernels have ended goes at once, which costs one query. Another waits on a thread of this object;
    the engine's step never does. Messages keep their order whatever they wait for, so that an abort never overtakes
    its load.

    Args:
        mark: puts a fence behind all work that the current stream has been given.
        on_broken: called once, from any thread, when the GPU fails; nothing is sent any more.
    """

    def __init__(self, mark: Callable[[], Fence], on_broken: Callable[[str], None]) -> None:
        self._mark = mark
        self._on_broken = on_broken
        self._fences: dict[int, Fence] = {}
        self._waiting: queue.SimpleQueue[tuple[Fence, Callable[[], None]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = 0
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="device-order", daemon=True)
        self._thread.start()

    def begin(self, step: int) -> None:
        """A step begins: mark what the GPU was given up to now, which ends when all earlier steps have."""
        self._fences[step] = self._mark()
        while len(self._fences) > KEPT_FENCES:
            del self._fences[next(iter(self._fences))]

    def after(self, step: int, send: Callable[[], None]) -> None:
        """Send when the kernels of a step that has begun, and of all before it, have ended. One thread calls this."""
        later = [number for number in self._fences if number > step]
        fence = self._fences[later[0]] if later else self._mark()
        with self._lock:
            if self._broken:
                return
            if self._count or not fence.query():
                self._count += 1
                self._waiting.put((fence, send))
                return
        send()

    def close(self) -> None:
        """Send nothing more, and end the thread once the GPU lets it."""
        with self._lock:
            self._broken = True
        self._waiting.put(None)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            fence, send = entry
            try:
                fence.synchronize()
            except RuntimeError as error:
                # What the pages hold is unknown now: nobody is told that they may be read or written.
                with self._lock:
                    broken, self._broken = self._broken, True
                if not broken:
                    log.exception("the GPU failed while a message waited for it")
                    self._on_broken(f"the GPU failed: {error}")
                return
            with self._lock:
                if self._broken:
                    return
            send()
            with self._lock:
                self._count -= 1
