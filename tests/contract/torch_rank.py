"""One rank whose cache is a torch tensor, in a process of its own; `test_torch_memory.py` runs two of them.

torch_rank.py PLAN prefill RANK DEVICE    prints its card in hexadecimal, then serves until standard input ends
torch_rank.py PLAN decode RANK DEVICE     reads cards, one a line, moves a request, prints what came of it as JSON
"""

from __future__ import annotations

import json
import os
import queue
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from disagg_agent.cards import MoverCard
from disagg_agent.engines.synthetic.content import request_seed
from disagg_agent.engines.synthetic.pool import RankPool
from disagg_agent.engines.vllm.device import access, mark, memory_of
from disagg_agent.messages import Connect, Connected, Move, Moved, MoveSource, Probe, Probed, Serve, pack_pages
from disagg_agent.mover import Mover
from disagg_agent.segments import region_cards
from disagg_plan import wire

SECONDS = 60.0
PAGES = 24
TOKENS = 75
SRC = [5, 6, 0, 20, 3]
DST = [17, 2, 3, 9, 21]


class Rank:
    """A cache on a device, laid out as the plan says, and its mover."""

    def __init__(self, plan: wire.Plan, role: Any, rank: int, device: str) -> None:
        self.plan, self.rank = plan, rank
        side = plan.source if role == "prefill" else plan.destination
        self.host = RankPool(side, rank, PAGES, {group.name: group.table for group in plan.groups})
        os.close(self.host.fd)
        self.ids = {"attention": np.array(SRC if role == "prefill" else DST)}
        if role == "prefill":
            self.host.fill(request_seed("first"), self.ids, 0, TOKENS)
        self.cache = torch.from_numpy(self.host.segment.bytes).to(torch.device(device), copy=True)
        memory = memory_of(self.cache.untyped_storage())
        self.place = memory.place
        if self.place.kind == "VRAM":
            # As a hold does: nothing is readable before the kernels that wrote it have ended.
            mark(self.place).synchronize()
        self.events: queue.Queue[Any] = queue.Queue()
        self.mover = Mover(
            plan,
            role,
            rank,
            [(memory.address, memory.size)],
            region_cards([memory], self.host.regions),
            self.events.put,
            self.place,
            access(self.place),
        )

    def ask(self, command: Any, wanted: type) -> Any:
        self.mover.submit(command)
        answer = self.events.get(timeout=SECONDS)
        if not isinstance(answer, wanted):
            raise SystemExit(f"{answer} is no {wanted.__name__}")
        return answer


def prefill(rank: Rank) -> None:
    rank.mover.submit(Serve(+1))
    print(msgspec.msgpack.encode(rank.mover.card).hex(), flush=True)
    sys.stdin.read()
    rank.mover.close()


def decode(rank: Rank) -> None:
    sources = [edge.source for edge in rank.plan.edges if edge.destination == rank.rank]
    cards = [msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=MoverCard) for _ in sources]
    found: dict[str, Any] = {"place": str(rank.place), "links": []}
    for source, card in zip(sources, cards, strict=True):
        link = f"prefill-0/p{source}"
        connected = rank.ask(Connect(link, source, card), Connected)
        probed = rank.ask(Probe(link), Probed)
        found["links"].append([str(card.place), connected.code + connected.message, probed.code + probed.message])
    streams = [MoveSource(f"prefill-0/p{source}", {"attention": pack_pages(SRC)}) for source in sources]
    moved = rank.ask(Move("m", TOKENS, 0, {"attention": pack_pages(DST)}, streams), Moved)
    # As after `Loaded`: work that is launched from now on sees the bytes, without any synchronisation.
    rank.host.segment.bytes[:] = rank.cache.cpu().numpy()
    checked, wrong = rank.host.verify(request_seed("first"), rank.ids, TOKENS)
    found |= {"moved": moved.code + moved.message, "bytes": moved.bytes, "checked": checked, "wrong": wrong}
    found["stray"] = rank.host.stray_bytes(rank.ids)
    print(json.dumps(found), flush=True)
    rank.mover.close()


def main() -> None:
    plan = wire.decode(Path(sys.argv[1]).read_bytes())
    rank = Rank(plan, sys.argv[2], int(sys.argv[3]), sys.argv[4])
    prefill(rank) if sys.argv[2] == "prefill" else decode(rank)


main()
