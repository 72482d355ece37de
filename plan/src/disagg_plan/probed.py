"""From what every rank of a started engine says to the explicit geometry of its model. Pure: values in, values out.

Units are heads of the whole model, and a rank sees its share only. With one tensor-parallel rank its heads are all;
with more, the model's own number of KV heads decides, and every rank must hold just the share that follows from it
(one head each, replicated, where there are more ranks than heads). What does not add up is refused, not guessed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic.alias_generators import to_camel

from disagg_plan.dtypes import dtype_bytes
from disagg_plan.errors import Refusal
from disagg_plan.geometry import Geometry, Group, Part, check_geometry
from disagg_plan.probe_facts import LayerFacts, RankFacts, rank_file
from disagg_plan.probed_pages import LATENT, Form, Order, form
from disagg_plan.profiles import Layout
from disagg_plan.ranges import format_ranges
from disagg_plan.topology import can_hold, unit_interval

Files = Mapping[str, RankFacts]
"""Facts by the name of their file."""

_SAME = (
    "engine", "version", "backend", "model", "revision", "dtype", "block_tokens", "blocks", "total_heads", "layout",
    "tensor", "pipeline", "context",
)  # fmt: skip
"""What all ranks of one engine must say alike."""

_MOST_NAMED = 8
"""How many missing files a refusal names."""

_KINDS = {"FullAttentionSpec": "attention", LATENT: "mla"}
"""KV cache specs that a plan can hold, and what their groups are called."""

_NOT_YET = {
    "SlidingWindowSpec": "a sliding window: which pages move depends on the window",
    "SlidingWindowMLASpec": "a sliding window of latents: which pages move depends on the window",
    "RSWASpec": "a sliding window: which pages move depends on the window",
    "ChunkedLocalAttentionSpec": "attention within chunks: pages before the chunk are gone",
    "MambaSpec": "recurrent state, which is no page of tokens",
    "CrossAttentionSpec": "cross attention: its pages belong to encoder states",
    "EncoderOnlyAttentionSpec": "encoder attention, which keeps no cache",
    "SinkFullAttentionSpec": "attention sinks, kept apart from the tokens",
}


@dataclass(frozen=True)
class Merged:
    """What all ranks say together.

    Attributes:
        geometry: of the whole model; a table for each KV cache group of the engine.
        order, layouts: how every page is arranged, and the orders of heads and tokens that fit all of them.
        stages: layers of each pipeline stage.
        facts: what all ranks say alike, by the first of them.
        notes: sentences about what was inferred.
    """

    geometry: Geometry
    order: Order
    layouts: tuple[Layout, ...]
    stages: tuple[tuple[int, ...], ...]
    facts: RankFacts
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    """One layer on one rank."""

    where: str
    facts: LayerFacts
    form: Form


def merge(files: Files) -> Merged:
    """Put the facts of all ranks together.

    Raises:
        Refusal: `MissingRank`, `RanksDisagree`, `UnsupportedTopology`, `UnsupportedCache`, `UnknownLayer`,
            `UnknownAxes`, `KernelBlocks`, `UnclearHeads`, `UnknownDtype`, `BadStages`, or as `check_geometry`; each
            names file, field and both values.
    """
    ranks = _ranks(files)
    first = ranks[0]
    dtype_bytes(first.dtype, f"{rank_file(0)}: dtype")
    entries = [_entries(rank) for rank in ranks]
    stages: list[tuple[int, ...]] = []
    layers: dict[int, _Entry] = {}
    for stage in range(first.pipeline):
        merged = _stage(entries[stage * first.tensor : (stage + 1) * first.tensor])
        for layer, entry in merged.items():
            if layer in layers:
                raise Refusal(
                    "RanksDisagree",
                    f"{entry.where}.layer",
                    f"layer {layer} is in two pipeline stages, also in {layers[layer].where}",
                    "Probe one engine at a time, into an empty folder",
                )
            layers[layer] = entry
        stages.append(tuple(sorted(merged)))
    order, layouts = _common(layers)
    geometry = Geometry(_groups(layers, first))
    check_geometry(geometry)
    return Merged(geometry, order, layouts, tuple(stages), first, tuple(_notes(layers, first)))


def _ranks(files: Files) -> list[RankFacts]:
    """All ranks in order, after every rank is there and says the same of the engine."""
    if not files:
        raise Refusal("MissingRank", "rank-0.json", "the folder holds no rank files", "Start the engine with the probe")
    first_file = min(files)
    first = files[first_file]
    for file, facts in sorted(files.items()):
        for name in _SAME:
            mine, other = getattr(facts, name), getattr(first, name)
            if mine != other:
                raise Refusal(
                    "RanksDisagree",
                    f"{file}: {to_camel(name)}",
                    f"it is {mine!r}, in {first_file} it is {other!r}",
                    "Probe one engine at a time, into an empty folder",
                )
        _check_place(file, facts)
    count = first.tensor * first.pipeline
    absent = (rank_file(rank) for rank in range(count) if rank_file(rank) not in files)
    missing = list(itertools.islice(absent, _MOST_NAMED))
    if missing:
        raise Refusal(
            "MissingRank",
            missing[0],
            f"{len(files)} rank files are there, an engine of {first.tensor} tensor-parallel ranks and "
            f"{first.pipeline} pipeline stages has {count}; {', '.join(missing)} missing",
            "Wait until every worker has written, or gather the folders of all nodes",
        )
    if first.context > 1:
        raise Refusal(
            "UnsupportedTopology",
            f"{first_file}: context",
            f"context parallelism of {first.context} is not planned yet",
            "Use 1",
        )
    return [files[rank_file(rank)] for rank in range(count)]


def _check_place(file: str, facts: RankFacts) -> None:
    place = facts.pipeline_rank * facts.tensor + facts.tensor_rank
    if file != rank_file(facts.rank) or facts.rank != place or facts.tensor_rank >= facts.tensor:
        raise Refusal(
            "RanksDisagree",
            f"{file}: rank",
            f"it is {facts.rank}, and tensor rank {facts.tensor_rank} of {facts.tensor} in stage "
            f"{facts.pipeline_rank} of {facts.pipeline} is rank {place}",
            "Keep each file under the name that its rank gave it",
        )


def _entries(rank: RankFacts) -> dict[int, _Entry]:
    """Entries of one rank by layer."""
    file = rank_file(rank.rank)
    _check_kinds(file, rank)
    if not rank.layers:
        raise Refusal("BadStages", f"{file}: layers", "the rank keeps no cache", "Use fewer pipeline stages")
    found: dict[int, _Entry] = {}
    memory: dict[tuple[int | None, int, int], str] = {}
    for layer in rank.layers:
        where = f"{file}: {layer.name}"
        number = _layer_number(where, layer)
        if number in found:
            raise Refusal(
                "UnsupportedCache",
                f"{where}.layer",
                f"layer {number} has two caches, {found[number].facts.name!r} and {layer.name!r}: not planned yet",
                "Serve this model without disaggregation",
            )
        for tensor in layer.tensors:
            other = memory.setdefault((layer.group, tensor.storage, tensor.offset), layer.name)
            if other != layer.name:
                raise Refusal(
                    "UnsupportedCache",
                    f"{where}.offset",
                    f"it is the same memory as {other!r}: layers that share a cache are not planned yet",
                    "Serve this model without disaggregation",
                )
        found[number] = _Entry(where, layer, form(where, rank, layer))
    return found


def _check_kinds(file: str, rank: RankFacts) -> None:
    """Refuse kinds of cache that no plan holds, all of them at once."""
    wrong: dict[str, list[LayerFacts]] = {}
    for layer in rank.layers:
        kind = f"{layer.spec} ({layer.role})" if layer.role == "indexer" else layer.spec
        if kind not in _KINDS:
            wrong.setdefault(kind, []).append(layer)
    if wrong:
        said = "; ".join(
            f"{_named(layers)} keep {kind}: {_why_not(kind, layers[0])}" for kind, layers in sorted(wrong.items())
        )
        raise Refusal(
            "UnsupportedCache",
            f"{file}: layers.spec",
            f"{said}; only full attention and latents are planned yet",
            "Serve this model without disaggregation, or with the window disabled if that is what it has",
        )


def _why_not(kind: str, layer: LayerFacts) -> str:
    if layer.role == "indexer":
        return "an indexer cache beside the latents"
    return _NOT_YET.get(kind, "a kind of cache that is not known here")


def _named(layers: list[LayerFacts]) -> str:
    numbers = [layer.layer for layer in layers if layer.layer is not None]
    if len(numbers) < len(layers):
        return "entries " + ", ".join(repr(layer.name) for layer in layers[:3])
    return f"layers {format_ranges(numbers)}"


def _layer_number(where: str, layer: LayerFacts) -> int:
    if layer.layer is None:
        raise Refusal(
            "UnknownLayer",
            f"{where}.name",
            "the name does not say which layer of the model it is",
            "State model.geometry by hand, or serve without this layer (a draft model, for instance)",
        )
    if layer.group is None:
        raise Refusal(
            "UnsupportedCache",
            f"{where}.group",
            "it belongs to no KV cache group: it shares another layer's cache, which is not planned yet",
            "Serve this model without disaggregation",
        )
    return layer.layer


def _stage(ranks: list[dict[int, _Entry]]) -> dict[int, _Entry]:
    """Layers of one pipeline stage, after all of its tensor-parallel ranks say the same of each."""
    first = ranks[0]
    for other in ranks[1:]:
        if set(other) != set(first):
            mine, theirs = next(iter(first.values())).where, next(iter(other.values())).where
            raise Refusal(
                "RanksDisagree",
                f"{theirs.partition(':')[0]}: layers",
                f"it has layers {format_ranges(other)}, {mine.partition(':')[0]} of the same stage has layers "
                f"{format_ranges(first)}",
                "Probe one engine at a time, into an empty folder",
            )
        for layer, entry in other.items():
            _check_alike(first[layer], entry)
    return first


def _check_alike(first: _Entry, other: _Entry) -> None:
    fields = ("group", "spec", "block_tokens", "heads", "head_size", "head_size_v")
    pairs = [(name, getattr(first.facts, name), getattr(other.facts, name)) for name in fields]
    pairs += [(name, getattr(first.form, name), getattr(other.form, name)) for name in ("order", "layouts", "cells")]
    for name, mine, theirs in pairs:
        if mine != theirs:
            raise Refusal(
                "RanksDisagree",
                f"{other.where}.{to_camel(name)}",
                f"it is {theirs!r}, in {first.where} it is {mine!r}",
                "Probe one engine at a time, into an empty folder",
            )


def _common(layers: Mapping[int, _Entry]) -> tuple[Order, tuple[Layout, ...]]:
    """Arrangement of all pages, which one engine has alike."""
    entries = list(layers.values())
    first = entries[0]
    layouts = first.form.layouts
    for entry in entries[1:]:
        layouts = tuple(layout for layout in layouts if layout in entry.form.layouts)
        if entry.form.order != first.form.order or not layouts:
            raise Refusal(
                "UnsupportedCache",
                f"{entry.where}.strides",
                f"pages are {entry.form.order} {'/'.join(entry.form.layouts)}, those of {first.where} "
                f"{first.form.order} {'/'.join(first.form.layouts)}: one engine has one arrangement",
                "Use one attention backend for all layers",
            )
        if entry.facts.block_tokens != first.facts.block_tokens:
            raise Refusal(
                "UnsupportedCache",
                f"{entry.where}.blockTokens",
                f"blocks have {entry.facts.block_tokens} tokens, those of {first.where} {first.facts.block_tokens}",
                "Use one block size for all layers",
            )
    return first.form.order, layouts


def _groups(layers: Mapping[int, _Entry], rank: RankFacts) -> tuple[Group, ...]:
    """Layers of one KV cache group with equal parts; each group of the engine is a table."""
    alike: dict[tuple[int, str, tuple[Part, ...]], list[int]] = {}
    for layer, entry in sorted(layers.items()):
        group = -1 if entry.facts.group is None else entry.facts.group
        alike.setdefault((group, _KINDS[entry.facts.spec], _parts(entry, rank)), []).append(layer)
    used: dict[str, int] = {}
    tables: dict[int, str] = {}
    groups = []
    for (number, kind, parts), held in alike.items():
        used[kind] = used.get(kind, 0) + 1
        name = kind if used[kind] == 1 else f"{kind}-{used[kind]}"
        groups.append(Group(name, tuple(held), parts, tables.setdefault(number, name)))
    return tuple(groups)


def _parts(entry: _Entry, rank: RankFacts) -> tuple[Part, ...]:
    facts, cells = entry.facts, entry.form.cells
    if facts.spec == LATENT:
        if entry.form.heads != 1 or len(cells) != 1:
            raise Refusal(
                "UnsupportedCache",
                f"{entry.where}.shape",
                f"a latent of {entry.form.heads} heads in {len(cells)} parts; it is one run for each token",
                "Serve this model without disaggregation",
            )
        return (Part("latent", 1, "replicated", cells[0]),)
    units = _units(entry, rank)
    if len(cells) == 2:
        return Part("k", units, "split", cells[0]), Part("v", units, "split", cells[1])
    element = facts.tensors[0].element
    k, v = facts.head_size * element, facts.head_size_v * element
    if k and v and k + v == cells[0]:
        return Part("k", units, "split", k), Part("v", units, "split", v)
    # Scales or padding beside K and V: they stay with their head and token, so one part names them all.
    return (Part("kv", units, "split", cells[0]),)


def _units(entry: _Entry, rank: RankFacts) -> int:
    """KV heads of the whole model, of which this rank holds `entry.form.heads`."""
    held, total = entry.form.heads, rank.total_heads
    if rank.tensor == 1:
        return held
    if total and can_hold(total, rank.tensor):
        low, high = unit_interval(total, "split", rank.tensor, 0)
        if high - low == held:
            return total
    raise Refusal(
        "UnclearHeads",
        f"{entry.where}.heads",
        f"{held} heads are on each of {rank.tensor} tensor-parallel ranks, the model states {total} in all: which "
        "heads a rank holds does not follow",
        "Probe with a tensor-parallel size of 1, where one rank holds every head",
    )


def _notes(layers: Mapping[int, _Entry], rank: RankFacts) -> list[str]:
    split = [entry for entry in layers.values() if entry.facts.spec != LATENT]
    if not split:
        return []
    total = f"{rank.total_heads} KV head{'' if rank.total_heads == 1 else 's'}"
    if rank.tensor == 1:
        notes = ["units: the one tensor-parallel rank holds every KV head"]
    elif rank.total_heads < rank.tensor:
        copies = rank.tensor // rank.total_heads
        notes = [f"units: the model has {total}, so each is on {copies} of {rank.tensor} tensor-parallel ranks"]
    else:
        share = rank.total_heads // rank.tensor
        notes = [f"units: the model has {total}, {share} on each of {rank.tensor} ranks"]
    if rank.total_heads > 1 and all(entry.form.heads == 1 for entry in split):
        notes.append("layout: every rank holds one head, so the order is read from strides that move no byte")
    return notes
