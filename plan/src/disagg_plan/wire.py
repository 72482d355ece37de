"""The wire format `disagg.dev/transfer-plan/v1` as strict types.

This module is the only thing that planner, proof and agents share. It says what a document may contain,
not whether the document is right: that is `disagg_plan.proof`.

A plan is a template between one prefill and one decode replica. All offsets and lengths are bytes inside one
page; all strides are bytes; token counts are tokens; ranks are `pp * tensor + tp`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from disagg_plan import canonical
from disagg_plan.errors import FormatError
from disagg_plan.ranges import parse_ranges

SCHEMA = "disagg.dev/transfer-plan/v1"

MAX_BYTES = 2**40
"""Upper bound of every offset, length and stride: far above any page, far below int64 overflow in sums."""

Offset = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Positive = Annotated[int, Field(ge=1, le=MAX_BYTES)]
Count = Annotated[int, Field(ge=1, le=2**20)]
RankId = Annotated[int, Field(ge=0, le=2**16)]
NAME_PATTERN = r"^[a-z0-9]([a-z0-9_.-]{0,61}[a-z0-9])?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
LayerRange = Annotated[str, Field(min_length=1, max_length=4096)]


class Wire(BaseModel):
    """Base: camelCase on the wire, frozen, no coercion, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel, populate_by_name=True)


def _pair(value: Any) -> Any:
    # JSON has no tuples, and strict mode accepts nothing else for one.
    return tuple(value) if isinstance(value, list) else value


class Parallelism(Wire):
    """How a replica is cut: tensor- and pipeline-parallel sizes, decode context parallelism and its interleave."""

    tensor: Count
    pipeline: Count
    decode_context: Count
    interleave: Count

    @property
    def ranks(self) -> int:
        """Number of ranks of one replica."""
        return self.tensor * self.pipeline


class Region(Wire):
    """Memory of one page in one tensor: `bytes` used, `stride` to the next page."""

    bytes: Positive
    stride: Positive


class CellRepeat(Wire):
    """A cell of several equally long runs, `stride` bytes apart (convolution rows)."""

    count: Count
    stride: Positive


class PagePart(Wire):
    """Where the cells of one part lie: unit `x`, token `y` at `offset + (x - first) * unitStride + y * tokenStride`."""

    name: Name
    region: Annotated[int, Field(ge=0, le=64)]
    units: Annotated[tuple[Offset, Positive], BeforeValidator(_pair)]
    offset: Offset
    unit_stride: Offset
    token_stride: Offset
    cell_bytes: Positive
    cell_repeat: CellRepeat | None = None


class Page(Wire):
    """The bytes of one block of one layer and group on one rank."""

    block_tokens: Count | None = None
    regions: Annotated[list[Region], Field(min_length=1, max_length=64)]
    parts: Annotated[list[PagePart], Field(min_length=1, max_length=64)]
    per_block: Count | None = None


class Rank(Wire):
    """Page index and layers of each group that this rank holds."""

    pages: dict[Name, Annotated[int, Field(ge=0)]]
    layers: dict[Name, LayerRange]


class Side(Wire):
    """One replica: its parallelism, the table of pages, and its ranks in order."""

    role: Literal["prefill", "decode"]
    parallelism: Parallelism
    pages: Annotated[list[Page], Field(min_length=1, max_length=65536)]
    ranks: Annotated[list[Rank], Field(min_length=1, max_length=65536)]


class Tokens(Wire):
    """Which token positions of a request a group needs; `size` belongs to `window` and `chunk` alone."""

    rule: Literal["all", "window", "chunk", "state"]
    size: Count | None = None

    @model_validator(mode="after")
    def _size(self) -> Self:
        if (self.size is not None) != (self.rule in ("window", "chunk")):
            raise ValueError(f"rule {self.rule!r} {'needs' if self.size is None else 'takes no'} size")
        return self


class GroupPart(Wire):
    """A named tensor of a group and how it is sharded over tensor-parallel ranks."""

    name: Name
    units: Count
    sharding: Literal["split", "replicated"]


class Group(Wire):
    """Layers that share a block table."""

    name: Name
    kind: Literal["paged", "state"]
    layers: LayerRange
    table: Name
    tokens: Tokens
    parts: Annotated[list[GroupPart], Field(min_length=1, max_length=64)]
    sub_tokens: Count | None = None


class Repeat(Wire):
    """One loop of a copy: `count` times, `src` and `dst` bytes apart."""

    count: Count
    src: Offset
    dst: Offset


class Copy(Wire):
    """For every listed layer and pair of sub-blocks: `bytes` from `src` to `dst`, over the product of `repeat`."""

    group: Name
    layers: LayerRange
    part: Name
    bytes: Positive
    src: Offset
    dst: Offset
    repeat: Annotated[list[Repeat], Field(max_length=8)]
    src_sub: Offset
    dst_sub: Offset


class Edge(Wire):
    """All that decode rank `to` reads from prefill rank `from`: the copies of `shapes[shape]`."""

    source: Annotated[RankId, Field(alias="from")]
    destination: Annotated[RankId, Field(alias="to")]
    shape: Annotated[int, Field(ge=0)]


class Compat(Wire):
    """What two peers must agree on before they exchange a byte."""

    digest: Digest
    factors: dict[str, Any]


class Summary(Wire):
    """Figures of the plan, all per token except `state_bytes_per_request` and `copies_per_block`.

    Attributes:
        bytes_per_token: bytes of one token's cells over all layers, each unit counted once.
        state_bytes_per_request: the same for state groups, which have no tokens.
        copies_per_block: runs, after joining adjoining ones, that fill one block of every destination rank.
        max_source_bytes: bytes per token that the busiest prefill rank sends.
        mean_source_bytes: the mean over all prefill ranks, rounded down.
        max_destination_bytes: bytes per token that the largest decode rank receives.
    """

    bytes_per_token: Offset
    state_bytes_per_request: Offset
    copies_per_block: Offset
    max_source_bytes: Offset
    mean_source_bytes: Offset
    max_destination_bytes: Offset


class Warning_(Wire):
    """Something that works but that a person should know."""

    code: str
    message: str


class Plan(Wire):
    """Every edge between the ranks of one prefill and one decode replica."""

    schema_: Annotated[Literal["disagg.dev/transfer-plan/v1"], Field(alias="schema")]
    digest: Digest
    compat: Compat
    source: Side
    destination: Side
    groups: Annotated[list[Group], Field(min_length=1, max_length=64)]
    shapes: Annotated[list[list[Copy]], Field(max_length=65536)]
    edges: Annotated[list[Edge], Field(max_length=1048576)]
    completions: dict[str, list[RankId]]
    summary: Summary
    warnings: list[Warning_]

    def group(self, name: str) -> Group:
        """The group of that name.

        Raises:
            KeyError: the plan has no such group.
        """
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(name)

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the block tables, sorted: a request has one list of block ids for each."""
        return tuple(sorted({group.table for group in self.groups}))


def document(plan: Plan) -> dict[str, Any]:
    """The plan as plain JSON values, absent optionals left out."""
    return plan.model_dump(by_alias=True, exclude_none=True, mode="json")


def encode(plan: Plan) -> bytes:
    """Canonical bytes of the plan, exactly what is published."""
    return canonical.dumps(document(plan))


def seal(body: dict[str, Any]) -> Plan:
    """Add the digest to a document that lacks one and check its form.

    Raises:
        FormatError: the document is not well-formed.
    """
    unsealed = {key: value for key, value in body.items() if key != "digest"}
    return _validate({**unsealed, "digest": canonical.digest(unsealed)})


def decode(data: bytes | str) -> Plan:
    """Read a plan and check its form and both digests. Whether it is *right* is for `disagg_plan.proof`.

    Raises:
        FormatError: `NotJson`, `NotCanonical`, `BadSchema`, `BadDigest` or `BadLayerRange`.
    """
    body = canonical.loads(data)
    if not isinstance(body, dict):
        raise FormatError("BadSchema", f"a plan is an object, this is {type(body).__name__}")
    plan = _validate(body)
    unsealed = {key: value for key, value in body.items() if key != "digest"}
    actual = canonical.digest(unsealed)
    if plan.digest != actual:
        raise FormatError("BadDigest", f"the plan says digest {plan.digest}, its content has {actual}")
    factors = canonical.digest(plan.compat.factors)
    if plan.compat.digest != factors:
        raise FormatError("BadDigest", f"compat says digest {plan.compat.digest}, its factors have {factors}")
    return plan


def _validate(body: dict[str, Any]) -> Plan:
    try:
        plan = Plan.model_validate(body, by_name=False)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(piece) for piece in first["loc"]) or "plan"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise FormatError("BadSchema", f"{where}: {first['msg']}{more}") from error
    for group in plan.groups:
        parse_ranges(group.layers)
    for side in (plan.source, plan.destination):
        for rank in side.ranks:
            for layers in rank.layers.values():
                parse_ranges(layers)
    for shape in plan.shapes:
        for copy in shape:
            parse_ranges(copy.layers)
    return plan
