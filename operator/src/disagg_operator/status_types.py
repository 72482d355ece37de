"""The status of a `DisaggDeployment` as pydantic types: what the operator reports.

Status holds counts, names and digests, never lists that grow with replicas. Whatever is not known is left out:
write it with `model_dump(by_alias=True, exclude_none=True)`. No field has a default in the schema: what an API server
filled in would look like a report.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(max_length=71, pattern=r"^sha256:[0-9a-f]{64}$")]
ShortDigest = Annotated[str, Field(max_length=10, pattern=r"^[0-9a-f]{10}$")]
Line = Annotated[str, Field(max_length=1024)]
# What is reported is text, not a closed list: an operator may see more than the schema before it knew of.
Word = Annotated[str, Field(max_length=63)]
Time = Annotated[
    str,
    Field(
        max_length=20,
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$",
        json_schema_extra={"format": "date-time"},
    ),
]


class StatusPart(BaseModel):
    """Base: camelCase, frozen, unknown fields refused; attribute docstrings are what `kubectl explain` shows."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
    )


def _short(fields: dict[str, Any]) -> str:
    return str(fields["digest"]).removeprefix("sha256:")[:10]


class PlanStatus(StatusPart):
    """The plan that is published."""

    digest: Digest
    """Digest of the whole plan."""
    short_digest: Annotated[ShortDigest, Field(default_factory=_short)]
    """First 10 hex digits of the digest, as labels and names carry it; a printer column cannot cut them out."""
    compat_digest: Digest
    """Digest of what both sides must agree on."""
    config_maps: Annotated[list[Annotated[str, Field(max_length=253)]], Field(max_length=64, default_factory=list)]
    """ConfigMaps that hold plans: the current one first, then those that pods still use."""
    edges: Count
    """Pairs of a prefill rank and a decode rank between which bytes move."""
    bytes_per_token: Count
    """Bytes of the KV cache of one token, over all layers."""
    copies_per_block: Count
    """Copies that move one block, over all ranks and layers."""


class RoleStatus(StatusPart):
    """Replicas of one side."""

    desired: Count
    """Replicas that are declared."""
    ready: Count
    """Replicas that serve."""
    updated: Count
    """Replicas of the current revision."""
    on_current_plan: Count
    """Replicas whose every rank has loaded the current plan."""
    summary: Word
    """`ready/desired`."""


class RolesStatus(StatusPart):
    """Both sides."""

    prefill: RoleStatus | None = None
    decode: RoleStatus | None = None


class TransferStatus(StatusPart):
    """How bytes move."""

    protocol_requested: Word | None = None
    """As declared."""
    protocol_observed: Word | None = None
    """As agents report it; absent until one has."""
    pairs_verified: Count | None = None
    """Pairs of a prefill and a decode agent that have met and agree."""
    pairs_expected: Count | None = None
    """Pairs of the current revision."""


class Condition(StatusPart):
    """One aspect of the state, with the bounds of `metav1.Condition`."""

    type: Annotated[
        str,
        Field(
            max_length=316,
            pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
            r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
        ),
    ]
    """Name of the condition, in CamelCase."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, as one word in CamelCase for programs."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, as a sentence with field, numbers and the way out."""
    last_transition_time: Time
    """When `status` last changed."""
    observed_generation: Count | None = None
    """Generation of the object that was judged."""


class Status(StatusPart):
    """What was observed and decided."""

    observed_generation: Count | None = None
    """Generation of the object that everything here is about."""
    summary: Line | None = None
    """One line: replicas and topology."""
    plan: PlanStatus | None = None
    """Absent where there is none, because the spec is refused."""
    roles: RolesStatus | None = None
    parallelism: Word | None = None
    """Tensor-parallel sizes, `prefill->decode`."""
    transfer: TransferStatus | None = None
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=32,
            default_factory=list,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ]
    """`Ready` says whether requests can be served."""
