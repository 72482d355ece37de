"""Kinds and devices of memory over real NIXL, on a machine without a GPU.

NIXL finds registered memory by its kind and device. So host memory under another device number shows whether rows
bear the device of their side, and what claims to be GPU memory has to fail by name and move nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from disagg_agent.cards import HOST, Place
from disagg_agent.engines.synthetic.content import request_seed
from disagg_agent.errors import MoverError, RegistrationRefused
from disagg_agent.messages import Connect, Connected, Failed, Moved, Probe, Probed, SourceRef
from disagg_agent.mover import Mover
from disagg_agent.plan_loader import check_plan
from disagg_agent.segments import DeviceAccess, Segment, create_segment
from disagg_plan import wire

pytestmark = pytest.mark.nixl

replace = msgspec.structs.replace

SRC = {"attention": [5, 6, 0]}
DST = {"attention": [17, 2, 3]}
GPU = Place("VRAM", 0)


@pytest.fixture
def small(build: Any) -> Any:
    """P TP 2 to D TP 4."""
    return build.deployment(build.heads(4, layers=2), 2, 4).plan()


def all_arrive(movers: Any, arrays: Any) -> None:
    movers.connect()
    movers.fill("first", SRC, 48)
    for one, moved in zip(movers.decode, movers.moved(48, 0, SRC, DST), strict=True):
        assert moved.code == "", moved
        assert one.pool.verify(request_seed("first"), arrays(DST), 48)[1] == 0
        assert one.pool.stray_bytes(arrays(DST)) == 0


@pytest.mark.parametrize(("prefill", "decode"), [(0, 0), (0, 5), (3, 0), (3, 5)])
def test_rows_bear_the_device_of_their_side(stage: Any, small: Any, arrays: Any, prefill: int, decode: int) -> None:
    movers = stage.movers(small, prefill_place=Place("DRAM", prefill), decode_place=Place("DRAM", decode))
    all_arrive(movers, arrays)


def claims(place: Place) -> Callable[[Any], Any]:
    return lambda card: replace(card, place=place)


@pytest.mark.parametrize("place", [GPU, Place("VRAM", 3), Place("DRAM", 3)], ids=str)
def test_a_card_that_claims_other_memory_moves_nothing(stage: Any, small: Any, arrays: Any, place: Place) -> None:
    movers = stage.movers(small)
    one = movers.decode[0]
    with movers.serving():
        found = one.ask(Connect("prefill-0/p0", 0, claims(place)(movers.prefill[0].card)), Connected)
        assert (found.link, found.code) == ("prefill-0/p0", "PrepareFailed")
        assert "NIXL_ERR_NOT_FOUND" in found.message
        assert one.ask(Probe("prefill-0/p0"), Probed).code == "NotConnected"
        moved = one.ask(movers.move(0, "m", 48, 0, SRC, DST), Moved)
    assert (moved.code, moved.bytes) == ("NotConnected", 0)
    assert one.untouched()
    # The same card without the claim is as good as ever.
    all_arrive(movers, arrays)


def test_a_decode_agent_names_a_peer_that_claims_a_gpu(stage: Any, small: Any, until: Any) -> None:
    movers = stage.movers(small)
    for source in movers.prefill:
        source.card = claims(GPU)(source.card)
    peer, decode, engine = stage.decode_of(movers)
    engine.load("r", SourceRef(peer.replica, "s", "g", "", 0), 48, engine.ids(48))
    until(lambda: decode.transfers()["loads"] == len(engine.workers), "decode has been asked")
    with movers.serving():
        sock = peer.accept()
        assert {(one.code, one.freed) for one in engine.expect(Failed)} == {("PrepareFailed", True)}
    until(lambda: decode.peers()[0]["code"] == "PrepareFailed", "the peer is given up by name")
    assert engine.stray_bytes() == 0
    sock.close()


# Memory of our own.


@dataclass
class Pretended:
    """Host memory that is said to be a GPU's."""

    segment: Segment
    place: Place

    @property
    def address(self) -> int:
        return self.segment.address

    @property
    def size(self) -> int:
        return self.segment.size


def test_a_mover_whose_gpu_memory_nixl_refuses_does_not_start(build: Any) -> None:
    plan = build.deployment(build.heads(4, layers=2), 1, 1).plan()
    fd, segment = create_segment("pretended", 1 << 16)
    os.close(fd)
    device = DeviceAccess(Pretended(segment, GPU), lambda: None)
    with pytest.raises(MoverError) as caught:
        Mover(plan, "prefill", 0, [(segment.address, segment.size)], [], lambda event: None, GPU, device)
    assert caught.value.code == "RegisterFailed"
    assert "VRAM of device 0" in caught.value.message
    assert "cuda_copy" in caught.value.message


@pytest.fixture
def agent(stage: Any, small: Any) -> Any:
    return stage.agent("decode", check_plan(wire.encode(small), None))


@pytest.mark.parametrize("fds", [0, 1])
def test_gpu_memory_with_a_mover_in_the_agent_is_refused(stage: Any, agent: Any, fds: int) -> None:
    worker = stage.worker(agent, 1)
    pretended = [Pretended(worker.pool.segment, Place("VRAM", 2))]
    with pytest.raises(RegistrationRefused) as caught:
        worker.register(segments=pretended, fds=[worker.pool.fd] * fds)
    assert caught.value.code == "UnsharableMemory"
    assert "decode rank 1 has VRAM of device 2" in caught.value.message
    assert "use placement InEngine or Auto" in caught.value.message
    # An operator reads the same sentence.
    status, text = agent.get("/readyz")
    assert status == 503
    assert f"last refusal: UnsharableMemory: {caught.value.message}" in text
    assert agent.refused("UnsharableMemory") == 1


@pytest.mark.parametrize("placement", ["agent", "engine"])
def test_memory_in_two_places_is_refused(stage: Any, agent: Any, placement: str) -> None:
    worker = stage.worker(agent, 1, placement=placement)
    segments = [Pretended(worker.pool.segment, HOST), Pretended(worker.pool.segment, GPU)]
    with pytest.raises(RegistrationRefused, match="decode rank 1") as caught:
        worker.register(segments=segments, fds=[])
    assert caught.value.code == "MixedMemory"
    stage.worker(agent, 1).register()


def test_a_mover_in_an_engine_without_a_gpu_fails_by_name_and_leaves(stage: Any, agent: Any) -> None:
    """The engine's own library finds out; its agent goes on, and serves the rank once it comes with host memory."""
    worker = stage.worker(agent, 1, placement="engine")
    with pytest.raises(MoverError) as caught:
        worker.register(segments=[Pretended(worker.pool.segment, GPU)])
    assert caught.value.code == "NoScratch"
    stage.worker(agent, 1, placement="engine").register()
    assert agent.agent.engine.sessions.keys() == {1}
