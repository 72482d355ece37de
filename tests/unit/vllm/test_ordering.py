"""Messages of a worker and the kernels that they depend on, with a GPU whose progress the test decides."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from disagg_agent.engines.vllm.decisions import HoldOrder, LoadOrder, Orders
from disagg_agent.engines.vllm.ordering import KEPT_FENCES, DeviceOrder, Step, StepLog
from disagg_agent.engines.vllm.worker import Registration, Results, WorkerHalf
from disagg_agent.messages import Hold, Load

SECONDS = 20.0


class Fence:
    """A mark that is passed when the test says so."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.failure: str | None = None

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        assert self.passed.wait(SECONDS)
        if self.failure:
            raise RuntimeError(self.failure)


@dataclass
class Gpu:
    """Every fence that was made, in order."""

    fences: list[Fence] = field(default_factory=list)

    def mark(self) -> Fence:
        self.fences.append(Fence())
        return self.fences[-1]

    def reach(self, count: int) -> None:
        """The GPU passes the first so many marks."""
        for fence in self.fences[:count]:
            fence.passed.set()


class Rig:
    """A `DeviceOrder`, its GPU, and what was sent."""

    def __init__(self) -> None:
        self.gpu = Gpu()
        self.sent: queue.Queue[str] = queue.Queue()
        self.broken: queue.Queue[str] = queue.Queue()
        self.order = DeviceOrder(self.gpu.mark, self.broken.put)

    def after(self, step: int, word: str) -> None:
        self.order.after(step, lambda: self.sent.put(word))

    def says(self, *words: str) -> None:
        assert [self.sent.get(timeout=SECONDS) for _ in words] == list(words)
        assert self.sent.empty()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.gpu.reach(len(rig.gpu.fences))
    rig.order.close()
    rig.order._thread.join(SECONDS)
    assert not rig.order._thread.is_alive()


# Steps, as the scheduler counts them.


def test_the_last_step_of_a_request() -> None:
    log = StepLog()
    assert log.next(["a", "b"], []) == Step(1, {})
    assert log.next(["b"], []) == Step(2, {})
    # The step after a request's last may have been scheduled before its end was known.
    assert log.next([], ["a", "never scheduled"]) == Step(3, {"a": 1})
    assert log.next(["a"], ["b", "a"]) == Step(4, {"b": 2})
    assert log.next([], ["a"]) == Step(5, {"a": 4})
    assert log._last == {}


# Messages.


def test_a_message_whose_kernels_have_ended_goes_at_once(rig: Rig) -> None:
    rig.order.begin(1)
    rig.order.begin(2)
    rig.gpu.reach(2)
    rig.after(1, "hold")
    assert rig.sent.get_nowait() == "hold"


def test_a_message_waits_for_its_step_and_for_no_later_one(rig: Rig) -> None:
    for step in (1, 2, 3):
        rig.order.begin(step)
    rig.gpu.reach(1)
    rig.after(1, "hold")
    assert rig.sent.empty(), "step 1 ends at the mark of step 2"
    rig.gpu.reach(2)
    rig.says("hold")
    assert not rig.gpu.fences[2].query()


def test_a_message_of_the_newest_step_has_a_mark_of_its_own(rig: Rig) -> None:
    rig.order.begin(1)
    rig.after(1, "hold")
    assert len(rig.gpu.fences) == 2
    rig.gpu.reach(1)
    assert rig.sent.empty()
    rig.gpu.reach(2)
    rig.says("hold")


def test_the_caller_never_waits_and_messages_keep_their_order(rig: Rig) -> None:
    rig.order.begin(1)
    rig.order.begin(2)
    rig.gpu.reach(1)
    rig.after(1, "load")
    # Its own kernels have ended, but an abort must not overtake its load.
    rig.after(0, "abort")
    assert rig.sent.empty()
    rig.gpu.reach(2)
    rig.says("load", "abort")
    rig.order.begin(3)
    rig.gpu.reach(3)
    rig.after(2, "next")
    rig.says("next")


def test_a_step_that_is_long_past_is_covered_by_the_oldest_that_is_known(rig: Rig) -> None:
    for step in range(1, KEPT_FENCES + 10):
        rig.order.begin(step)
    rig.after(1, "hold")
    rig.gpu.reach(9)
    assert rig.sent.empty()
    rig.gpu.reach(10)
    rig.says("hold")


def test_a_gpu_that_fails_lets_nothing_be_sent(rig: Rig) -> None:
    rig.order.begin(1)
    rig.after(0, "load")
    rig.after(0, "abort")
    rig.gpu.fences[0].failure = "CUDA error: an illegal memory access"
    rig.gpu.reach(1)
    assert rig.broken.get(timeout=SECONDS) == "the GPU failed: CUDA error: an illegal memory access"
    rig.order._thread.join(SECONDS)
    rig.after(0, "later")
    assert rig.sent.empty()
    assert rig.broken.empty()


def test_nothing_is_sent_after_the_end(rig: Rig) -> None:
    rig.order.begin(1)
    rig.after(0, "load")
    rig.order.close()
    rig.gpu.reach(1)
    rig.order._thread.join(SECONDS)
    rig.after(0, "later")
    assert rig.sent.empty()


# The worker.


class Connection:
    """An agent that listens."""

    def __init__(self) -> None:
        self.registered: tuple[Any, ...] = ()
        self.loaded = SimpleNamespace(plan=SimpleNamespace(digest="sha256:0"))
        self.sent: queue.Queue[Any] = queue.Queue()
        self.cuts = 0

    def register(self, *arguments: Any) -> None:
        self.registered = arguments

    def hold(self, message: Hold) -> None:
        self.sent.put(("hold", message.request))

    def load(self, message: Load) -> None:
        self.sent.put(("load", message.request))

    def abort(self, request: str) -> None:
        self.sent.put(("abort", request))

    def cut(self) -> None:
        self.cuts += 1
        on_lost = self.registered[7]
        on_lost("cut")

    def close(self) -> None:
        return


def worker(connection: Connection, gpu: Gpu | None, again: Any = None) -> WorkerHalf:
    mark = gpu.mark if gpu else None
    registration = Registration(0, {}, [], [], [], "engine" if gpu else "agent", None, mark)
    return WorkerHalf(connection, registration, ["attention"], again)  # type: ignore[arg-type]


def hold(request: str) -> HoldOrder:
    return HoldOrder(request, "g", 16, ((1,),))


def load(request: str) -> LoadOrder:
    return LoadOrder(request, 16, 0, ((1,),), "prefill-0", "s", "g", "host", 1)


def test_a_hold_waits_for_the_step_that_wrote_its_pages() -> None:
    connection, gpu = Connection(), Gpu()
    half = worker(connection, gpu)
    for number in (1, 2):
        half.begin(Step(number))
    third = Step(3, {"early": 1, "late": 2})
    half.begin(third)
    gpu.reach(2)
    half.execute(Orders(holds=(hold("early"), hold("late"))), third)
    assert connection.sent.get_nowait() == ("hold", "early")
    assert connection.sent.empty()
    gpu.reach(3)
    assert connection.sent.get(timeout=SECONDS) == ("hold", "late")
    half.close()


def test_a_load_waits_for_all_that_the_gpu_was_given_before_its_step() -> None:
    connection, gpu = Connection(), Gpu()
    half = worker(connection, gpu)
    for number in (1, 2):
        half.begin(Step(number))
    gpu.reach(1)
    half.execute(Orders(loads=(load("r"),), aborts=("r",)), Step(2))
    assert connection.sent.empty()
    gpu.reach(2)
    assert connection.sent.get(timeout=SECONDS) == ("load", "r")
    assert connection.sent.get(timeout=SECONDS) == ("abort", "r")
    half.close()


def test_a_failed_gpu_leaves_the_agent_for_good() -> None:
    """What waits fails, and so does what comes later; a restarted agent is not served by a GPU that has failed."""
    connection, gpu = Connection(), Gpu()
    half = worker(connection, gpu, lambda: pytest.fail("it connects again"))
    half.begin(Step(1))
    half.execute(Orders(loads=(load("r"),)), Step(1))
    gpu.fences[0].failure = "CUDA error"
    gpu.reach(1)
    assert half._order is not None
    half._order._thread.join(SECONDS)
    assert connection.cuts == 1
    half.execute(Orders(holds=(hold("h"),), loads=(load("later"),)), Step(2))
    assert half.results(idle=False) == Results({"h"}, {"r", "later"}, {"r", "later"})
    assert connection.sent.empty()


def test_host_memory_is_ordered_by_nothing() -> None:
    """No fence is made, no thread is started, and everything goes at once."""
    connection = Connection()
    before = threading.active_count()
    half = worker(connection, None)
    half.begin(Step(1))
    half.execute(Orders(holds=(hold("h"),), loads=(load("r"),), aborts=("r",)), Step(1))
    assert [connection.sent.get_nowait() for _ in range(3)] == [("hold", "h"), ("load", "r"), ("abort", "r")]
    assert threading.active_count() == before
    half.close()
