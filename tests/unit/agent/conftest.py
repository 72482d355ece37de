"""Plans and well-formed registrations for tests of the agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from disagg_agent.cards import HOST, MoverCard, Place, RankCard, RegionCard, RegionDeclaration, SegmentDeclaration
from disagg_agent.messages import PROTOCOL, Hello, Register
from disagg_agent.plan_loader import LoadedPlan, check_plan
from disagg_plan import wire
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.ranges import parse_ranges


@dataclass(frozen=True)
class Kit:
    """Makers of messages that a plan accepts, for tests to change in one place."""

    def load(self, plan: wire.Plan) -> LoadedPlan:
        return check_plan(wire.encode(plan), None)

    def regions(
        self, loaded: LoadedPlan, role: str, rank: int, pages: int | Mapping[str, int]
    ) -> list[RegionDeclaration]:
        """What a rank must register, one region after another in one segment; `pages` of all tables or by table."""
        side = loaded.side(role)
        held = side.ranks[rank]
        found = []
        end = 0
        for group, index in sorted(held.pages.items()):
            count = pages if isinstance(pages, int) else pages[loaded.plan.group(group).table]
            for layer in parse_ranges(held.layers[group]):
                for number, region in enumerate(side.pages[index].regions):
                    found.append(RegionDeclaration(group, layer, number, 0, end, region.bytes, region.stride, count))
                    end += region.stride * count
        return found

    def register(self, loaded: LoadedPlan, role: str, rank: int = 0, pages: int | Mapping[str, int] = 8) -> Register:
        """A registration with placement `agent` that is right in everything."""
        regions = self.regions(loaded, role, rank, pages)
        size = max(region.offset + region.stride * region.pages for region in regions)
        return Register(
            PROTOCOL, rank, loaded.expected_factors(role), "agent", [SegmentDeclaration(size, HOST)], regions
        )

    def cards(
        self, loaded: LoadedPlan, role: str, rank: int, pages: int | Mapping[str, int], base: int = 1 << 20
    ) -> list[RegionCard]:
        """The same memory as another mover sees it."""
        return [
            RegionCard(region.group, region.layer, region.region, base + region.offset, region.stride, region.pages)
            for region in self.regions(loaded, role, rank, pages)
        ]

    def card(
        self,
        loaded: LoadedPlan,
        role: str,
        rank: int = 0,
        pages: int | Mapping[str, int] = 8,
        place: Place = HOST,
    ) -> RankCard:
        mover = MoverCard(f"{role}-{rank}", b"metadata", self.cards(loaded, role, rank, pages), place)
        return RankCard(rank, loaded.expected_factors(role), mover)

    def hello(self, loaded: LoadedPlan, role: Any) -> Hello:
        return Hello(
            PROTOCOL, role, f"{role}-0", f"pod-{role}", "life-1", loaded.plan.digest, loaded.plan.compat.digest
        )


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(scope="session")
def loaded(build: Any, kit: Kit) -> LoadedPlan:
    """P TP2 to D TP4, separate K and V: every rank has two regions a layer."""
    return kit.load(build.deployment(build.heads(4, layers=2), 2, 4, backend="SEPARATE").plan())


@pytest.fixture(scope="session")
def two_tables() -> Geometry:
    """Groups with a block table each; stage 0 of two holds layers of the first alone."""
    parts = (Part("k", 2, "split", 8), Part("v", 2, "split", 8))
    return Geometry((Group("full", (0, 1, 2), parts, "full"), Group("window", (3, 4), parts, "window")))


@pytest.fixture
def open_fds() -> Callable[[], set[str]]:
    """Descriptors of this process, each with what it leads to."""

    def read() -> set[str]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            try:
                found.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
            except FileNotFoundError:  # the descriptor of the listing itself
                continue
        return found

    return read
