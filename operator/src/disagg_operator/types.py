"""The `DisaggDeployment` custom resource as pydantic types: what a user may declare.

Field names on the wire are camelCase. Unknown fields are refused: a misspelt field that is silently ignored is
found by users as a wrong deployment.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.config import JsonDict

from disagg_operator.constants import API_VERSION, KIND
from disagg_operator.pod_template import TEMPLATE_SCHEMA, check_template
from disagg_plan.errors import Refusal

Short = Annotated[str, Field(min_length=1, max_length=253)]
PartName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9_.-]*[a-z0-9])?$")]
ObjectName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
Ranges = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[0-9,-]+$")]
Free = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]


def _rules(*rules: JsonDict) -> JsonDict:
    """Schema of a type with what an API server judges by itself, in CEL.

    Messages write numbers with `format`: what `string()` returns counts as unbounded text, which joined to other
    text costs more than any budget.

    The same things are refused here or in planning, where there may be no API server. What takes a table of the
    planner (backends, dtypes, models) is judged there only: a table may grow without a new schema.
    """
    return {"x-kubernetes-validations": [*rules]}


class Spec(BaseModel):
    """Base: camelCase, frozen, unknown fields refused; attribute docstrings are what `kubectl explain` shows."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True, use_attribute_docstrings=True
    )


class GeometryPart(Spec):
    """One tensor of a layer's cache: `elements` per unit and token."""

    name: PartName
    """`k`, `v`, `latent`, …"""
    units: Annotated[int, Field(ge=1, le=65536)]
    """What the part is sharded by, in the whole model: KV heads, or 1 for a latent."""
    sharding: Literal["split", "replicated"]
    """Whether units are spread over tensor-parallel ranks, or whole on every one."""
    elements: Annotated[int, Field(ge=1, le=1 << 24)]
    """Elements of one unit of one token."""
    dtype: Short | None = None
    """Type of its elements, where it is not that of the cache."""


class GeometryGroup(Spec):
    """Layers that share a block table and a page layout."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            {
                "rule": "self.parts.all(p, self.parts.exists_one(q, q.name == p.name))",
                "message": "a part stands twice in a group: give every part its own name",
                "fieldPath": ".parts",
            }
        )
    )

    name: PartName
    layers: Ranges
    """Layer ids as ranges, e.g. `0-27,30`."""
    table: PartName | None = None
    """Block table that its pages are listed in, where groups share one; the group's name otherwise."""
    # The rule above compares each with each: at 64 it takes most of what an API server lets one rule cost.
    parts: Annotated[list[GeometryPart], Field(min_length=1, max_length=32)]
    """In the order in which a joint page holds them."""


class GeometrySpec(Spec):
    """Explicit geometry; wins over what `config` says."""

    groups: Annotated[
        list[GeometryGroup],
        Field(
            min_length=1,
            max_length=64,
            # Order carries no meaning here, and every group has its own name. Parts do have an order.
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ]


class ConfigMapKeyRef(Spec):
    """A key of a ConfigMap in the same namespace."""

    name: Short
    key: Short


class ConfigSource(Spec):
    """Where config.json comes from, if not inline."""

    config_map_key_ref: ConfigMapKeyRef


class Model(Spec):
    """The model that both sides serve. Name and revision are part of compatibility."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            {
                "rule": "!(has(self.config) && has(self.configFrom))",
                "message": "config and configFrom exclude each other: remove one",
                "reason": "FieldValueForbidden",
                "fieldPath": ".configFrom",
            },
            {
                "rule": "has(self.config) || has(self.configFrom) || has(self.geometry)",
                "message": "one of config, configFrom and geometry is needed",
                "reason": "FieldValueRequired",
            },
        )
    )

    name: Short
    revision: Short | None = None
    """Revision of the weights."""
    config: Free | None = None
    """config.json of the model, from which the geometry follows."""
    config_from: ConfigSource | None = None
    geometry: GeometrySpec | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.config is not None and self.config_from is not None:
            raise ValueError("config and configFrom exclude each other")
        if self.config is None and self.config_from is None and self.geometry is None:
            raise ValueError("one of config, configFrom and geometry is needed")
        return self


Pages = Literal["joint", "separate", "opaque"]


class Engine(Spec):
    """Engine, version and attention backend: together they choose the page layout.

    `pages` states how that backend arranges its pages instead, for one whose layout is not known here.
    `loadFailurePolicy` says what the engine does with a request whose cache did not come: fail it, or compute it anew.
    """

    name: Short
    version: Short
    backend: Short
    pages: Pages | None = None
    load_failure_policy: Literal["fail", "recompute"] = "fail"


class EngineOverride(Spec):
    """What one role may do differently. `pages` is of the backend that it stands beside, as in `Engine`."""

    backend: Short
    pages: Pages | None = None


class KVCache(Spec):
    """How the cache is stored."""

    dtype: Short = "bfloat16"
    """Type of its elements, the same on both sides."""
    block_size: Annotated[int, Field(ge=1, le=65536)] = 16
    """Tokens of a block."""
    layout: Literal["HND", "NHD"] | None = None
    """Whether a head's tokens adjoin, or a token's heads; the backend's first where it is not stated."""


class KVCacheOverride(Spec):
    """What one role stores differently."""

    dtype: Short | None = None
    block_size: Annotated[int, Field(ge=1, le=65536)] | None = None
    layout: Literal["HND", "NHD"] | None = None


class ParallelismSpec(Spec):
    """How a replica is cut. `pipelineLayers` gives each stage's layers; without it, vLLM's even split is used."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            {
                "rule": "!has(self.pipelineLayers) || size(self.pipelineLayers) == self.pipeline",
                "messageExpression": "'%d stages are listed, pipeline is %d: list one layer range per stage'"
                ".format([size(self.pipelineLayers), self.pipeline])",
                "fieldPath": ".pipelineLayers",
            },
            {
                "rule": "self.decodeContext == 1",
                "messageExpression": "'decode context parallelism is not planned yet: use 1, not %d'"
                ".format([self.decodeContext])",
                "fieldPath": ".decodeContext",
            },
        )
    )

    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor-parallel ranks."""
    pipeline: Annotated[int, Field(ge=1, le=256)] = 1
    """Pipeline stages."""
    decode_context: Annotated[int, Field(ge=1, le=256)] = 1
    """Decode context parallelism; only 1 is planned yet."""
    pipeline_layers: Annotated[list[Ranges], Field(max_length=256)] | None = None
    """Layers of each stage, e.g. `["0-14", "15-31"]`."""


class Role(Spec):
    """One side: its replicas, how each is cut, and the pods that it runs in."""

    replicas: Annotated[int, Field(ge=0, le=10000)] = 1
    """Engine instances; changing it makes no new revision."""
    parallelism: ParallelismSpec = ParallelismSpec()
    engine: EngineOverride | None = None
    kv_cache: KVCacheOverride | None = None
    template: Annotated[dict[str, Any], WithJsonSchema(TEMPLATE_SCHEMA)]

    @field_validator("template", mode="before")
    @classmethod
    def _template(cls, value: Any) -> dict[str, Any]:
        return check_template(value)


class Agent(Spec):
    """The transfer agent. `placement` says where movers live: host memory in the agent, GPU memory in the engine."""

    placement: Literal["Auto", "Sidecar", "InEngine"] = "Auto"
    """`Auto`: host memory in the agent, GPU memory in the engine. `Sidecar`: host memory only."""
    image: Short = "disagg-agent:0.1.0"
    """Image of the agent."""


class Transport(Spec):
    """How bytes move."""

    protocol: Literal["Auto", "TCP", "SharedMemory"] = "Auto"
    lease_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Seconds that prefill holds a request's pages."""
    deadline_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Seconds that a load may take."""


def _dtype(role: str) -> str:
    return (
        f"(has(self.{role}.kvCache) && has(self.{role}.kvCache.dtype) ? self.{role}.kvCache.dtype : self.kvCache.dtype)"
    )


def _units_fit(role: str) -> JsonDict:
    tensor = f"self.{role}.parallelism.tensor"
    return {
        "rule": "!has(self.model.geometry) || self.model.geometry.groups.all(g, g.parts.all(p, "
        f"p.sharding == 'replicated' || p.units % {tensor} == 0 || {tensor} % p.units == 0))",
        "messageExpression": "'units of a part cannot be placed on %d tensor-parallel ranks: of units and ranks one "
        f"must divide the other, for every part of model.geometry that is split'.format([{tensor}])",
        "fieldPath": f".{role}.parallelism.tensor",
    }


class DeploymentSpec(Spec):
    """What is declared."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            {
                "rule": f"{_dtype('prefill')} == {_dtype('decode')}",
                "messageExpression": f"'prefill stores ' + {_dtype('prefill')} + ', decode ' + {_dtype('decode')} + "
                "': a copy does not convert, use the same dtype on both sides'",
                "fieldPath": ".decode.kvCache.dtype",
            },
            _units_fit("prefill"),
            _units_fit("decode"),
        )
    )

    model: Model
    engine: Engine
    kv_cache: KVCache = KVCache()
    prefill: Role
    decode: Role
    agent: Agent = Agent()
    transport: Transport = Transport()

    def role(self, name: str) -> Role:
        """The side of that name."""
        return self.prefill if name == "prefill" else self.decode

    def kv_cache_of(self, name: str) -> KVCache:
        """Cache settings of a role, overrides applied."""
        override = self.role(name).kv_cache
        changed = override.model_dump(exclude_none=True) if override else {}
        return self.kv_cache.model_copy(update=changed)

    def backend_of(self, name: str) -> str:
        """Attention backend of a role, override applied."""
        override = self.role(name).engine
        return override.backend if override else self.engine.backend

    def pages_of(self, name: str) -> Pages | None:
        """Arrangement of a role's pages where it is stated; one that is stated for another backend is not taken."""
        override = self.role(name).engine
        return override.pages if override else self.engine.pages


class Metadata(BaseModel):
    """The part of object metadata that is read; the rest belongs to the API server."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")]
    namespace: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")] = (
        "default"
    )
    uid: str = ""
    generation: int = 1


class DisaggDeployment(BaseModel):
    """The custom resource."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)

    api_version: Literal["disagg.dev/v1alpha1"] = API_VERSION
    kind: Literal["DisaggDeployment"] = KIND
    metadata: Metadata
    spec: DeploymentSpec
    status: dict[str, Any] | None = None


def parse_deployment(document: Any) -> DisaggDeployment:
    """Read a custom resource.

    Raises:
        Refusal: `InvalidSpec` with the path of the first field that is wrong.
    """
    try:
        return DisaggDeployment.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(piece) for piece in first["loc"]) or "document"
        count = error.error_count()
        more = f"; {count - 1} more {'fields are' if count > 2 else 'field is'} wrong" if count > 1 else ""
        message = first["msg"].removeprefix("Value error, ")
        raise Refusal("InvalidSpec", path, f"{message}{more}", "docs/spec.md describes every field") from error
