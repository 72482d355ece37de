"""A prefill rank in a process of its own: prints its card, then serves until its standard input closes."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from disagg_agent.engines.synthetic.pool import RankPool
from disagg_agent.messages import MoverEvent, Serve
from disagg_agent.mover import Mover
from disagg_agent.segments import region_cards
from disagg_plan import wire


def main() -> None:
    plan = wire.decode(Path(sys.argv[1]).read_bytes())
    pages = int(sys.argv[2])
    pool = RankPool(plan.source, 0, pages, {group.name: group.table for group in plan.groups})

    def ignore(_event: MoverEvent) -> None:
        return

    mover = Mover(
        plan,
        "prefill",
        0,
        [(pool.segment.address, pool.segment.size)],
        region_cards([pool.segment], pool.regions),
        ignore,
    )
    mover.submit(Serve(+1))
    sys.stdout.buffer.write(msgspec.msgpack.encode(mover.card).hex().encode() + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.read()
    mover.close()


main()
