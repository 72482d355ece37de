"""GPU memory on its way to NIXL: which kinds, devices and rows a mover hands over.

NIXL itself is replaced here by a recorder, since no GPU is at hand; nothing that says what moves is tested so.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disagg_agent.cards import HOST, MoverCard, Place
from disagg_agent.errors import MoverError
from disagg_agent.messages import Connect, Connected, Move, Moved, MoveSource, Probe, Probed, pack_pages
from disagg_agent.mover import PROBE_BYTES, Mover
from disagg_agent.nixl_port import NixlPort
from disagg_agent.plan_loader import LoadedPlan
from disagg_agent.segments import DeviceAccess

SCRATCH = 0x7F0000
POOL = (1 << 20, 1 << 16)
PLACES = [HOST, Place("VRAM", 0), Place("VRAM", 3)]


@dataclass
class Recorder:
    """What NIXL was called with, in order."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)
    refuse: set[str] = field(default_factory=set)

    def agent(self, name: str, _config: Any) -> Any:
        def register_memory(rows: Any, kind: str) -> None:
            if kind in self.refuse:
                raise RuntimeError("NIXL_ERR_BACKEND")
            self.calls.append(("register", rows, kind))

        def prep_xfer_dlist(peer: str, rows: np.ndarray, kind: str) -> tuple[str, str]:
            self.calls.append(("prepare", peer, rows.copy(), kind))
            return peer, kind

        def make_prepped_xfer(operation: str, local: Any, _mine: Any, remote: Any, _theirs: Any) -> Any:
            self.calls.append((operation, local, remote))
            return SimpleNamespace(release=lambda: None)

        return SimpleNamespace(
            register_memory=register_memory,
            prep_xfer_dlist=prep_xfer_dlist,
            make_prepped_xfer=make_prepped_xfer,
            get_agent_metadata=lambda: f"keys of {name}".encode(),
            add_remote_agent=lambda metadata: metadata.removeprefix(b"keys of "),
            remove_remote_agent=lambda peer: None,
            transfer=lambda handle: "DONE",
            check_xfer_state=lambda handle: "DONE",
            get_new_notifs=dict,
        )

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    api = SimpleNamespace(nixl_agent=recorder.agent, nixl_agent_config=lambda **options: options)
    monkeypatch.setitem(sys.modules, "nixl", SimpleNamespace(_api=api))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    return recorder


@dataclass
class Scratch:
    """Memory that is only a number."""

    place: Place
    size: int = PROBE_BYTES
    address: int = SCRATCH


class Made:
    """A mover of decode rank 1 and what it said."""

    def __init__(self, kit: Any, loaded: LoadedPlan, place: Place, device: DeviceAccess | None) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        cards = kit.cards(loaded, "decode", 1, 8, POOL[0])
        self.mover = Mover(loaded.plan, "decode", 1, [POOL], cards, self.events.put, place, device)

    def ask(self, command: Any, wanted: type) -> Any:
        self.mover.submit(command)
        answer = self.events.get(timeout=10)
        assert isinstance(answer, wanted)
        return answer


@pytest.fixture
def make(kit: Any, loaded: LoadedPlan, nixl: Recorder) -> Iterator[Any]:
    made: list[Made] = []

    def start(place: Place, device: DeviceAccess | None = None) -> Made:
        access = device or (None if place.kind == "DRAM" else DeviceAccess(Scratch(place), lambda: None))
        made.append(Made(kit, loaded, place, access))
        return made[-1]

    yield start
    for one in made:
        one.mover.close()


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_memory_is_registered_as_what_it_is(make: Any, nixl: Recorder, place: Place) -> None:
    mover = make(place).mover
    ((_, rows, kind),) = nixl.of("register")
    scratch = mover._host_scratch.ctypes.data if place == HOST else SCRATCH
    assert kind == place.kind
    assert rows == [(*POOL, place.device, ""), (scratch, PROBE_BYTES, place.device, "")]
    assert mover.card.place == place


@pytest.mark.parametrize("ours", PLACES, ids=str)
@pytest.mark.parametrize("theirs", PLACES, ids=str)
def test_each_side_is_prepared_as_what_it_is(
    make: Any, kit: Any, loaded: LoadedPlan, nixl: Recorder, ours: Place, theirs: Place
) -> None:
    """Decode in GPU memory reads from prefill in host memory, the reverse, and both alike."""
    one = make(ours)
    regions = kit.cards(loaded, "prefill", 0, 8, 1 << 30)
    card = MoverCard("prefill-0-x", b"keys of prefill-0-x", regions, theirs)
    assert one.ask(Connect("link", 0, card), Connected) == Connected("link", "", "")
    (_, peer, mine, kind), (_, other, remote, other_kind) = nixl.of("prepare")
    assert (peer, kind, other, other_kind) == ("NIXL_INIT_AGENT", ours.kind, "prefill-0-x", theirs.kind)
    assert set(mine[:, 2].tolist()) == {ours.device}
    assert set(remote[:, 2].tolist()) == {theirs.device}
    assert mine[:, 0].min() >= POOL[0]
    assert remote[:, 0].min() >= 1 << 30

    nixl.calls.clear()
    assert one.ask(Probe("link"), Probed).code == ""
    (_, peer, mine, kind), (_, other, remote, other_kind) = nixl.of("prepare")
    assert (peer, kind, other, other_kind) == ("NIXL_INIT_AGENT", ours.kind, "prefill-0-x", theirs.kind)
    scratch = one.mover._host_scratch.ctypes.data if ours == HOST else SCRATCH
    assert mine.tolist() == [[scratch, PROBE_BYTES, ours.device, PROBE_BYTES, 1]]
    assert remote.tolist() == [[regions[0].base, PROBE_BYTES, theirs.device, PROBE_BYTES, 1]]

    nixl.calls.clear()
    pages = {"attention": pack_pages([1, 2])}
    moved = one.ask(Move("m", 32, 0, pages, [MoveSource("link", pages)]), Moved)
    assert moved.code == ""
    assert moved.bytes > 0
    # What is read goes between the two prepared lists and nowhere else.
    assert nixl.calls == [("READ", ("NIXL_INIT_AGENT", ours.kind), ("prefill-0-x", theirs.kind))]


def test_the_thread_of_a_mover_enters_its_device_before_nixl_is_made(make: Any, nixl: Recorder) -> None:
    entered: list[tuple[int | None, int]] = []
    place = Place("VRAM", 3)
    access = DeviceAccess(Scratch(place), lambda: entered.append((threading.get_ident(), len(nixl.calls))))
    one = make(place, access)
    assert entered == [(one.mover._thread.ident, 0)]


def test_host_memory_enters_no_device(make: Any) -> None:
    entered: list[None] = []
    make(HOST, DeviceAccess(Scratch(HOST), lambda: entered.append(None)))
    assert entered == []


def failing() -> None:
    raise RuntimeError("CUDA error: device busy")


@pytest.mark.parametrize(
    ("scratch", "code"),
    [
        (None, "NoScratch"),
        (Scratch(HOST), "NoScratch"),
        (Scratch(Place("VRAM", 0)), "NoScratch"),
        (Scratch(Place("VRAM", 3), size=PROBE_BYTES - 1), "NoScratch"),
        (Scratch(Place("VRAM", 3)), "DeviceUnavailable"),
    ],
    ids=["none", "host memory", "another GPU", "too small", "no device"],
)
def test_a_device_that_cannot_be_used(
    kit: Any, loaded: LoadedPlan, nixl: Recorder, scratch: Scratch | None, code: str
) -> None:
    with pytest.raises(MoverError) as caught:
        Made(kit, loaded, Place("VRAM", 3), scratch and DeviceAccess(scratch, failing))
    assert caught.value.code == code
    assert ("VRAM of device 3" if code == "NoScratch" else "device busy") in caught.value.message
    assert nixl.calls == []


def test_what_to_do_where_nixl_takes_no_gpu_memory(nixl: Recorder) -> None:
    nixl.refuse = {"VRAM", "DRAM"}
    port = NixlPort("x")
    with pytest.raises(MoverError) as caught:
        port.register([POOL], Place("VRAM", 3))
    assert caught.value.code == "RegisterFailed"
    for part in ("VRAM of device 3", "NIXL_ERR_BACKEND", "UCX_TLS", "cuda_copy"):
        assert part in caught.value.message
    with pytest.raises(MoverError) as caught:
        port.register([POOL])
    assert caught.value.code == "RegisterFailed"
    assert "UCX_TLS" not in caught.value.message
