"""The second proof: plans executed on memory that is laid out as the engines do it, and compared cell by cell.

One array element stands for one byte of memory and holds a number that no other byte has, so that a byte which went
astray is seen wherever it went. Nothing here is taken from the planner, the prover or the page layouts of the
package; only pairing is, which has tests of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from disagg_plan import wire
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.pairing import Pairs, page_pairs
from disagg_plan.planner import Replica
from disagg_plan.profiles import find_profile
from disagg_plan.runs import edge_runs

UNTOUCHED = -1
"""A destination byte that nothing has written."""
STALE = -2
"""A source byte of a position that the request has not reached."""
FOREIGN = -3
"""A source byte of another request, or padding."""


@dataclass(frozen=True)
class Request:
    """Positions `[start, end)` of one request, and its block ids on both sides by table."""

    start: int
    end: int
    source: dict[str, list[int]]
    destination: dict[str, list[int]]
    pages: int


@dataclass(frozen=True)
class Engine:
    """One side's memory, from the sharding rules and its kernel's order of axes."""

    geometry: Geometry
    replica: Replica

    def ranks(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(rank, tensor-parallel rank, layers of its stage)."""
        numbers = itertools.count()
        for stage in self.replica.stages:
            for tensor_rank in range(self.replica.parallelism.tensor):
                yield next(numbers), tensor_rank, stage

    def units(self, part: Part, tensor_rank: int) -> list[int]:
        """Units on one rank: an equal share each, or the same unit on equally many neighbours."""
        tensor = self.replica.parallelism.tensor
        if part.sharding == "replicated":
            return list(range(part.units))
        if part.units >= tensor:
            return [unit for unit in range(part.units) if unit * tensor // part.units == tensor_rank]
        return [tensor_rank * part.units // tensor]

    def pages(self, group: Group, layer: int, tensor_rank: int, positions: np.ndarray) -> list[np.ndarray]:
        """Blocks of one layer, an array `(blocks, bytes)` for each region.

        Args:
            positions: shape `(blocks * block size,)`: the token that stands there, or one of the markers.
        """
        block = self.replica.block_tokens
        blocks = len(positions) // block
        cells = [cell_numbers(group, part, layer, self.units(part, tensor_rank), positions) for part in group.parts]
        if self.replica.profile.arrangement == "opaque":
            # All tokens of the first part, then all of the next, as one run for each unit.
            runs = [cell.reshape(len(cell), blocks, block * cell.shape[2]) for cell in cells]
            pages = np.concatenate(runs, axis=2).transpose(1, 0, 2)
            return [pages.reshape(blocks, pages.shape[1] * pages.shape[2])]
        if self.replica.profile.arrangement == "joint":
            cells = [np.concatenate(cells, axis=2)]
        # (unit, block, token, byte) to (block, unit, token, byte) or (block, token, unit, byte).
        axes = (1, 0, 2, 3) if self.replica.layout == "HND" else (1, 2, 0, 3)
        tensors = [cell.reshape(len(cell), blocks, block, cell.shape[2]).transpose(axes) for cell in cells]
        return [tensor.reshape(blocks, prod(tensor.shape[1:])) for tensor in tensors]


def cell_numbers(group: Group, part: Part, layer: int, units: list[int], positions: np.ndarray) -> np.ndarray:
    """A number for every byte, shape `(units, positions, cell bytes)`; markers stay as they are."""
    label = [other.name for other in group.parts].index(part.name) + 8 * sum(map(ord, group.name))
    number = np.array(units)[:, None, None] + 64 * (layer + 10_000 * label)
    number = (number * 4096 + positions[None, :, None]) * 4096 + np.arange(part.cell_bytes)
    return np.where(positions[None, :, None] < 0, positions[None, :, None], number)


Pools = dict[tuple[int, str, int, int], np.ndarray]
"""(rank, group, layer, region) to all bytes of its pool."""


class Astray(AssertionError):
    """A byte went where it must not."""


@dataclass(frozen=True)
class Execution:
    """A plan document carried out for one request on the memory of a deployment."""

    document: dict[str, Any]
    geometry: Geometry
    prefill: Replica
    decode: Replica
    request: Request

    def pools(self, role: str, position_of: Callable[[int], np.ndarray]) -> Pools:
        """Memory of one side.

        Args:
            position_of: by block size, what stands at each position of the request's blocks.
        """
        replica = self.prefill if role == "source" else self.decode
        ids = self.request.source if role == "source" else self.request.destination
        elsewhere = FOREIGN if role == "source" else UNTOUCHED
        engine = Engine(self.geometry, replica)
        pools: Pools = {}
        for rank, tensor_rank, stage in engine.ranks():
            for group in self.geometry.groups:
                for layer in set(stage) & set(group.layers):
                    found = engine.pages(group, layer, tensor_rank, position_of(replica.block_tokens))
                    for region, pages in enumerate(found):
                        stride = self.stride(role, rank, group.name, region)
                        if stride < pages.shape[1]:
                            raise Astray(f"{role} rank {rank}: pages of {pages.shape[1]} bytes at a stride of {stride}")
                        pool = np.full((self.request.pages, stride), elsewhere, dtype=np.int64)
                        pool[ids[group.table], : pages.shape[1]] = pages
                        pools[rank, group.name, layer, region] = pool.ravel()
        return pools

    def page(self, role: str, rank: int, group: str) -> dict[str, Any]:
        side = self.document[role]
        return side["pages"][side["ranks"][rank]["pages"][group]]

    def stride(self, role: str, rank: int, group: str, region: int) -> int:
        return self.page(role, rank, group)["regions"][region]["stride"]

    def before(self) -> tuple[Pools, Pools]:
        """Source memory, with stale cells behind the request's last token, and untouched destination memory."""
        request = self.request

        def source(block: int) -> np.ndarray:
            positions = np.arange(-(-request.end // block) * block)
            return np.where(positions < request.end, positions, STALE)

        def destination(block: int) -> np.ndarray:
            return np.full(-(-(request.end - request.start) // block) * block, UNTOUCHED)

        return self.pools("source", source), self.pools("destination", destination)

    def expected(self) -> Pools:
        """Destination memory as direct sharding fills it, to the end of the last sub-block."""
        request = self.request
        shared = int(np.gcd(self.prefill.block_tokens, self.decode.block_tokens))

        def destination(block: int) -> np.ndarray:
            positions = request.start + np.arange(-(-(request.end - request.start) // block) * block)
            moved = -(-request.end // shared) * shared
            return np.where(positions < request.end, positions, np.where(positions < moved, STALE, UNTOUCHED))

        return self.pools("destination", destination)

    def pairs(self, edge: dict[str, Any], name: str) -> Pairs:
        group = next(group for group in self.document["groups"] if group["name"] == name)
        return page_pairs(
            group["subTokens"],
            np.array(self.request.source[group["table"]], dtype=np.int64),
            self.page("source", edge["from"], name)["blockTokens"],
            np.array(self.request.destination[group["table"]], dtype=np.int64),
            self.page("destination", edge["to"], name)["blockTokens"],
            self.request.start,
            self.request.end,
        )

    def by_copies(self) -> None:
        """Carry out the document's copies, each as the format defines it."""
        source, destination = self.before()
        written = {key: np.zeros(len(pool), dtype=np.int64) for key, pool in destination.items()}
        for edge in self.document["edges"]:
            for copy in self.document["shapes"][edge["shape"]]:
                pairs = self.pairs(edge, copy["group"])
                within_src = within_dst = np.zeros(1, dtype=np.int64)
                for loop in copy["repeat"]:
                    steps = np.arange(loop["count"])
                    within_src = (within_src[:, None] + steps * loop["src"]).ravel()
                    within_dst = (within_dst[:, None] + steps * loop["dst"]).ravel()
                run = np.arange(copy["bytes"])
                src, src_region = self.addresses("source", edge["from"], copy, pairs, within_src[:, None] + run)
                dst, dst_region = self.addresses("destination", edge["to"], copy, pairs, within_dst[:, None] + run)
                for layer in layer_ids(copy["layers"]):
                    to = (edge["to"], copy["group"], layer, dst_region)
                    destination[to][dst] = source[edge["from"], copy["group"], layer, src_region][src]
                    np.add.at(written[to], dst, 1)
        self.compare(destination)
        if any((count > 1).any() for count in written.values()):
            raise Astray("a byte is written more than once")

    def addresses(
        self, role: str, rank: int, copy: dict[str, Any], pairs: Pairs, within: np.ndarray
    ) -> tuple[np.ndarray, int]:
        """Every byte that a copy touches on one side, in order, and its region."""
        page = self.page(role, rank, copy["group"])
        region = next(part["region"] for part in page["parts"] if part["name"] == copy["part"])
        ids, sub = (pairs.src_page, pairs.src_sub) if role == "source" else (pairs.dst_page, pairs.dst_sub)
        end = "src" if role == "source" else "dst"
        in_page = copy[end] + sub[:, None, None] * copy[f"{end}Sub"] + within[None, :, :]
        if in_page.size and int(in_page.max()) >= page["regions"][region]["bytes"]:
            raise Astray(f"{role} rank {rank}: byte {int(in_page.max())} is outside the page")
        return (ids[:, None, None] * page["regions"][region]["stride"] + in_page).ravel(), region

    def by_runs(self) -> None:
        """Carry out the runs that executors make of the copies."""
        plan = wire.seal(self.document)
        source, destination = self.before()
        written = {key: np.zeros(len(pool), dtype=np.int64) for key, pool in destination.items()}
        for edge, stated in zip(plan.edges, self.document["edges"], strict=True):
            for runs in edge_runs(plan, edge):
                pairs = self.pairs(stated, runs.group)
                src_stride = self.stride("source", edge.source, runs.group, runs.src_region)
                dst_stride = self.stride("destination", edge.destination, runs.group, runs.dst_region)
                for layer, (src, dst, size) in itertools.product(runs.layers, runs.rows.tolist()):
                    run = np.arange(size)
                    read = (pairs.src_page * src_stride + pairs.src_sub * runs.src_sub + src)[:, None] + run
                    write = (pairs.dst_page * dst_stride + pairs.dst_sub * runs.dst_sub + dst)[:, None] + run
                    to = (edge.destination, runs.group, layer, runs.dst_region)
                    destination[to][write] = source[edge.source, runs.group, layer, runs.src_region][read]
                    np.add.at(written[to], write, 1)
        self.compare(destination)
        if any((count > 1).any() for count in written.values()):
            raise Astray("a byte is written more than once")

    def compare(self, found: Pools) -> None:
        """Every byte as expected: cells of the request, and nothing else touched."""
        for key, expected in self.expected().items():
            wrong = np.flatnonzero(found[key] != expected)
            if len(wrong):
                rank, group, layer, region = key
                raise Astray(
                    f"decode rank {rank} group {group} layer {layer} region {region}: {len(wrong)} bytes are wrong, "
                    f"the first at {wrong[0]}: {found[key][wrong[0]]} instead of {expected[wrong[0]]}"
                )

    def is_right(self) -> bool:
        """Whether the document moves every byte right and tells every source whom to wait for."""
        try:
            self.by_copies()
            readers: dict[str, list[int]] = {str(rank): [] for rank in range(len(self.document["source"]["ranks"]))}
            for edge in self.document["edges"]:
                readers[str(edge["from"])].append(edge["to"])
            told = self.document["completions"]
        except (Astray, LookupError, ValueError, StopIteration):
            return False
        decode_ranks = range(len(self.document["destination"]["ranks"]))
        return set(told) == set(readers) and all(
            told[rank] == sorted(found) if found else len(told[rank]) == 1 and told[rank][0] in decode_ranks
            for rank, found in readers.items()
        )


def layer_ids(text: str) -> list[int]:
    """Layers of range text."""
    ends = [[int(number) for number in piece.split("-")] for piece in text.split(",")]
    return [layer for end in ends for layer in range(end[0], end[-1] + 1)]


def make_request(deployment: Any, start_blocks: int, tokens: int, seed: int = 0) -> Request:
    """A request of `tokens` tokens behind a prefix hit of whole decode blocks, on scattered pages."""
    random = np.random.default_rng(seed)
    start = start_blocks * deployment.decode.block_tokens
    end = start + tokens
    source_blocks = -(-end // deployment.prefill.block_tokens)
    decode_blocks = -(-tokens // deployment.decode.block_tokens)
    pages = max(source_blocks, decode_blocks) + 2
    tables = sorted({group.table for group in deployment.geometry.groups})
    return Request(
        start=start,
        end=end,
        source={table: random.permutation(pages)[:source_blocks].tolist() for table in tables},
        destination={table: random.permutation(pages)[:decode_blocks].tolist() for table in tables},
        pages=pages,
    )


@pytest.fixture(scope="session")
def execution() -> Callable[..., Execution]:
    """Makes the second proof of a document: `execution(document, deployment, start_blocks, tokens, seed)`."""

    def make(document: dict[str, Any], deployment: Any, start_blocks: int, tokens: int, seed: int = 0) -> Execution:
        request = make_request(deployment, start_blocks, tokens, seed)
        return Execution(document, deployment.geometry, deployment.prefill, deployment.decode, request)

    return make


@pytest.fixture(scope="session")
def astray() -> type[Astray]:
    """What a wrong execution raises."""
    return Astray


# Random deployments.


def _can_hold(part: Part, tensor: int) -> bool:
    return part.sharding == "replicated" or max(part.units, tensor) % min(part.units, tensor) == 0


@st.composite
def _parts(draw: st.DrawFn, number: int, alike: bool) -> tuple[Part, ...]:
    kinds = st.one_of(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8]), st.just("split")),
        st.tuples(st.sampled_from([1, 2]), st.just("replicated")),
    )
    count = draw(st.integers(1, 3))
    drawn = [draw(kinds)] * count if alike else [draw(kinds) for _ in range(count)]
    return tuple(
        Part(f"{name}{number}", units, sharding, draw(st.integers(1, 6)))
        for name, (units, sharding) in zip("kvs", drawn, strict=False)
    )


@st.composite
def _geometries(draw: st.DrawFn, alike: bool, largest_layer: int, most_layers: int, most_groups: int) -> Geometry:
    layers = draw(st.lists(st.integers(0, largest_layer), min_size=1, max_size=most_layers, unique=True))
    groups = []
    for number in range(draw(st.integers(1, most_groups))):
        some = layers if number == 0 else draw(st.lists(st.sampled_from(layers), min_size=1, unique=True))
        table = draw(st.sampled_from(["t0", "t1"]))
        groups.append(Group(f"g{number}", tuple(some), draw(_parts(number, alike)), table))
    return Geometry(tuple(groups))


@st.composite
def _stages(draw: st.DrawFn, layers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    shuffled = draw(st.permutations(layers))
    cuts = draw(st.sets(st.integers(1, max(1, len(layers) - 1)), max_size=min(2, len(layers) - 1)))
    edges = [0, *sorted(cuts), len(layers)]
    return tuple(tuple(shuffled[a:b]) for a, b in itertools.pairwise(edges))


@st.composite
def _deployments(
    draw: st.DrawFn, deployment_type: Any, largest_layer: int = 40, most_layers: int = 6, most_groups: int = 3
) -> Any:
    pair = draw(
        st.sampled_from(
            [
                ("JOINT", "JOINT"),
                ("SEPARATE", "SEPARATE"),
                ("JOINT", "SEPARATE"),
                ("SEPARATE", "JOINT"),
                ("OPAQUE",) * 2,
            ]
        )
    )
    geometry = draw(_geometries(pair != ("SEPARATE", "SEPARATE"), largest_layer, most_layers, most_groups))
    parts = [part for group in geometry.groups for part in group.parts]
    sizes = [size for size in range(1, 9) if all(_can_hold(part, size) for part in parts)]
    block = st.sampled_from([1, 2, 3, 4, 6, 8])
    source_block = draw(block)
    sides = []
    for role, backend in zip(("prefill", "decode"), pair, strict=True):
        stages = draw(_stages(geometry.layers))
        tokens = source_block if role == "prefill" or backend == "OPAQUE" else draw(block)
        sides.append(
            Replica(
                role=role,
                parallelism=wire.Parallelism(
                    tensor=draw(st.sampled_from(sizes)), pipeline=len(stages), decode_context=1, interleave=1
                ),
                stages=stages,
                profile=find_profile("synthetic", "1", backend),
                layout="HND" if backend == "OPAQUE" else draw(st.sampled_from(["HND", "NHD"])),
                block_tokens=tokens,
            )
        )
    return deployment_type(geometry, *sides)


@pytest.fixture(scope="session")
def deployments(deployment_type: Any) -> Callable[..., st.SearchStrategy[Any]]:
    """Makes strategies of random deployments that have a plan."""

    def make(**limits: int) -> st.SearchStrategy[Any]:
        return _deployments(deployment_type, **limits)

    return make
