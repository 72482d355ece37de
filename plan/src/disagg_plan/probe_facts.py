"""What the ranks of a started engine say of their caches: the files that a probe writes and `disagg probe` reads.

One file for each rank, `rank-N.json`. An engine's adapter writes facts and judges nothing; what they mean is decided
in `disagg_plan.probed`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError

from disagg_plan.errors import FormatError
from disagg_plan.wire import Count, Offset, Positive, RankId, Wire

SCHEMA: Final = "disagg.dev/probe/v1"

MAX_FILE_BYTES = 16 << 20
"""Largest rank file that is read; one of a hundred layers is below 64 KiB."""

Text = Annotated[str, Field(max_length=4096)]


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank}.json"


class TensorFacts(Wire):
    """One cache tensor.

    Attributes:
        strides: in elements.
        element: bytes of an element.
        storage: number of the memory that it is a view of.
        offset: bytes from the start of that memory.
    """

    shape: Annotated[list[Offset], Field(max_length=16)]
    strides: Annotated[list[Offset], Field(max_length=16)]
    element: Annotated[int, Field(ge=1, le=64)]
    dtype: Text
    storage: Offset
    offset: Offset


class LayerFacts(Wire):
    """The cache of one layer.

    Attributes:
        name: as the engine calls the entry.
        layer: model layer that the name says, if it says one.
        group: number of the engine's KV cache group; none if the entry belongs to no group.
        spec: type of the engine's KV cache spec.
        role: what the cache is for, where the engine tells caches of one type apart.
        block_tokens: tokens of a block in its group.
        heads: KV heads on this rank, as the spec has them.
        head_size, head_size_v: elements of K and V of a head and token; no V in a latent.
        axes: what each axis of the tensors counts: `blocks`, `tokens`, `heads`, `content` (the elements of a head and
            token), `parts` (K and V), or a name for what is none of these.
        axes_problem: why the axes are not known; then there are none.
        tensors: one, or one for K and one for V.
    """

    name: Text
    layer: Annotated[int, Field(ge=0, le=9999)] | None
    group: Annotated[int, Field(ge=0, le=1024)] | None
    spec: Text
    role: Text = ""
    block_tokens: Count
    backend: Text
    heads: Offset
    head_size: Offset
    head_size_v: Offset
    axes: Annotated[list[Text], Field(max_length=16)]
    axes_problem: Text = ""
    tensors: Annotated[list[TensorFacts], Field(max_length=64)]


class RankFacts(Wire):
    """What one rank says.

    Attributes:
        rank: `pipeline_rank * tensor + tensor_rank`.
        context: product of the context parallel sizes.
        version: of the engine.
        backend: attention backends of its layers, sorted and joined by `+`.
        model: name that the engine serves it by.
        dtype: of the cache, as the engine is told it.
        block_tokens: tokens of a block.
        blocks: blocks of the pool.
        total_heads: KV heads of the whole model, by its config; 0 where the engine does not know.
        layout: the engine's own name for the order of axes.
        config: what of the model's config.json is a number, text or truth value, `text_config` included.
    """

    schema_: Annotated[Literal["disagg.dev/probe/v1"], Field(alias="schema")]
    rank: RankId
    tensor: Count
    tensor_rank: RankId
    pipeline: Count
    pipeline_rank: RankId
    context: Count
    engine: Text
    version: Text
    backend: Text
    model: Annotated[str, Field(min_length=1, max_length=253)]
    revision: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    dtype: Text
    block_tokens: Count
    blocks: Positive
    total_heads: Offset
    layout: Text = ""
    config: Annotated[dict[str, Any], Field(default_factory=dict)]
    layers: Annotated[list[LayerFacts], Field(max_length=65536)]


def encode_facts(facts: RankFacts) -> str:
    """The text of a rank's file."""
    return facts.model_dump_json(by_alias=True, indent=1) + "\n"


def decode_facts(text: bytes, file: str) -> RankFacts:
    """Read a rank's file.

    Raises:
        FormatError: `BadFacts`, with the file and the first field that is wrong.
    """
    if len(text) > MAX_FILE_BYTES:
        raise FormatError("BadFacts", f"{file}: {len(text)} bytes are more than the {MAX_FILE_BYTES} of any rank file")
    try:
        return RankFacts.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(piece) for piece in first["loc"]) or "document"
        raise FormatError("BadFacts", f"{file}: {path}: {first['msg']} (it is {_excerpt(first['input'])})") from error


def _excerpt(value: Any) -> str:
    text = value.model_dump_json() if isinstance(value, BaseModel) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
