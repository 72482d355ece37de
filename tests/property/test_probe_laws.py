"""An engine that lays its cache out as a plan says is probed back to the geometry that was planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from disagg_plan import wire
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.planner import Replica, build_plan
from disagg_plan.probe_facts import SCHEMA, LayerFacts, RankFacts, TensorFacts, rank_file
from disagg_plan.probed import merge
from disagg_plan.probed_choice import choose
from disagg_plan.profiles import Layout, stated_profile
from disagg_plan.ranges import parse_ranges
from disagg_plan.topology import can_hold

BLOCKS = 5


@dataclass(frozen=True)
class Engine:
    """A geometry, and an engine that holds it."""

    geometry: Geometry
    replica: Replica
    heads: int
    element: int
    axis: bool
    """Whether K and V that adjoin have an axis of their own."""

    def plan(self) -> wire.Plan:
        prefill = replace(self.replica, role="prefill")
        return build_plan(self.geometry, prefill, replace(self.replica, role="decode"), {"model": "test"})


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    tensor = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    heads = draw(st.sampled_from([units for units in range(1, 9) if can_hold(units, tensor)]))
    element = draw(st.sampled_from([1, 2, 4]))
    pages = draw(st.sampled_from(["joint", "separate", "opaque"]))
    axis = pages == "joint" and draw(st.booleans())
    latent = not axis and pages != "separate" and draw(st.booleans())
    layers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True))
    cut = draw(st.integers(1, len(layers)))
    groups = []
    seen: dict[str, int] = {}
    for held in sorted(sorted(some) for some in (layers[:cut], layers[cut:]) if some):
        kind = "mla" if latent and draw(st.booleans()) else "attention"
        seen[kind] = seen.get(kind, 0) + 1
        name = kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"
        k, v = draw(st.integers(1, 6)), draw(st.integers(1, 6))
        parts = (
            (Part("latent", 1, "replicated", k * element),)
            if kind == "mla"
            else (
                Part("k", heads, "split", k * element),
                Part("v", heads, "split", (k if axis else v) * element),
            )
        )
        groups.append(Group(name, tuple(held), parts, name))
    geometry = Geometry(tuple(groups))
    ordered = draw(st.permutations(geometry.layers))
    stage = draw(st.integers(0, len(ordered) - 1))
    stages = tuple(tuple(some) for some in (ordered[:stage], ordered[stage:]) if some)
    layout: Layout = "HND" if pages == "opaque" else draw(st.sampled_from(["HND", "NHD"]))
    replica = Replica(
        role="prefill",
        parallelism=wire.Parallelism(tensor=tensor, pipeline=len(stages), decode_context=1, interleave=1),
        stages=stages,
        profile=stated_profile("vllm", "NEW_ATTN", pages),
        layout=layout,
        block_tokens=draw(st.integers(1, 8)),
    )
    return Engine(geometry, replica, heads, element, axis)


def facts_of(engine: Engine, plan: wire.Plan) -> dict[str, RankFacts]:
    """What the ranks of an engine say whose tensors lie as the plan's pages do."""
    side = plan.source
    files = {}
    for number, rank in enumerate(side.ranks):
        stage, tensor_rank = divmod(number, side.parallelism.tensor)
        layers = [
            layer_of(engine, plan, group, layer, side.pages[index])
            for group, index in rank.pages.items()
            for layer in parse_ranges(rank.layers[group])
        ]
        files[rank_file(number)] = RankFacts(
            schema_=SCHEMA,
            rank=number,
            tensor=side.parallelism.tensor,
            tensor_rank=tensor_rank,
            pipeline=side.parallelism.pipeline,
            pipeline_rank=stage,
            context=1,
            engine="vllm",
            version="0.32.0",
            backend="NEW_ATTN",
            model="m",
            dtype={1: "uint8", 2: "float16", 4: "float32"}[engine.element],
            block_tokens=engine.replica.block_tokens,
            blocks=BLOCKS,
            total_heads=engine.heads,
            config={},
            layers=layers,
        )
    return files


def layer_of(engine: Engine, plan: wire.Plan, group: str, layer: int, page: wire.Page) -> LayerFacts:
    index = [found.name for found in engine.geometry.groups].index(group)
    parts = engine.geometry.groups[index].parts
    first = page.parts[0]
    held = first.units[1] - first.units[0]
    tokens = engine.replica.block_tokens
    opaque = engine.replica.profile.arrangement == "opaque"
    cells = [part.cell_bytes for part in parts]
    token = sum(cells) if opaque else first.token_stride
    tensors = []
    axes = ["blocks", "heads", "tokens", *(["parts"] if engine.axis else []), "content"]
    contents = cells if len(page.regions) > 1 else cells[:1] if engine.axis else [sum(cells)]
    for region, content in enumerate(contents):
        placed = next(part for part in page.parts if part.region == region)
        strides = [page.regions[region].stride, placed.unit_stride, token if region == 0 else placed.token_stride]
        strides += [*([cells[0]] if engine.axis else []), engine.element]
        sizes = [BLOCKS, held, tokens, *([2] if engine.axis else []), content // engine.element]
        tensors.append(
            TensorFacts(
                shape=sizes,
                strides=[stride // engine.element for stride in strides],
                element=engine.element,
                dtype="",
                storage=layer * 2 + region,
                offset=0,
            )
        )
    latent = parts[0].name == "latent"
    return LayerFacts(
        name=f"model.layers.{layer}.attn",
        layer=layer,
        group=index,
        spec="MLAAttentionSpec" if latent else "FullAttentionSpec",
        block_tokens=tokens,
        backend="NEW_ATTN",
        heads=held,
        head_size=cells[0] // engine.element,
        head_size_v=0 if latent else cells[1] // engine.element,
        axes=axes,
        tensors=tensors,
    )


@given(engine=engines())
def test_what_was_planned_is_probed_back(engine: Engine) -> None:
    plan = engine.plan()
    found = merge(facts_of(engine, plan))
    assert found.geometry == engine.geometry
    assert [set(stage) for stage in found.stages] == [set(stage) for stage in engine.replica.stages]
    choice = choose(found)
    assert choice.profile is None
    # K and V in one axis are told from a kernel's own order by nothing: then they are cut by head only.
    one_axis = engine.replica.profile.arrangement != "separate" and not engine.axis
    if one_axis and choice.layout == "HND":
        assert choice.pages == "opaque"
    else:
        assert choice.pages == ("joint" if one_axis or engine.axis else "separate")
    assert moved(engine, choice.pages, choice.layout) == moved(
        engine, engine.replica.profile.arrangement, engine.replica.layout
    )


def moved(engine: Engine, pages: Literal["joint", "separate", "opaque"], layout: Layout) -> list[Any]:
    """Who sends how much to whom in which layers; the same however whole blocks are cut into copies."""
    replica = replace(engine.replica, profile=stated_profile("vllm", "NEW_ATTN", pages), layout=layout)
    plan = replace(engine, replica=replica).plan()
    sent: dict[tuple[int, int, str, str], int] = {}
    for edge in plan.edges:
        for copy in plan.shapes[edge.shape]:
            size = copy.bytes
            for loop in copy.repeat:
                size *= loop.count
            key = (edge.source, edge.destination, copy.group, copy.layers)
            sent[key] = sent.get(key, 0) + size
    return sorted(sent.items())
