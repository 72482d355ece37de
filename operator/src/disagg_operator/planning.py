"""From a custom resource to a proven plan: pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from disagg_operator.types import DeploymentSpec, GeometryGroup, GeometryPart, GeometrySpec
from disagg_plan import wire
from disagg_plan.architectures import from_config
from disagg_plan.dtypes import dtype_bytes
from disagg_plan.errors import FormatError, Refusal
from disagg_plan.geometry import Geometry, Group, Part
from disagg_plan.planner import Replica, build_plan
from disagg_plan.profiles import Profile, check_layout, find_profile, stated_profile
from disagg_plan.proof import Proof, prove
from disagg_plan.ranges import format_ranges, parse_ranges
from disagg_plan.topology import default_stages

ConfigMaps = Mapping[str, Mapping[str, str]]
"""Data of the ConfigMaps in the deployment's namespace, by name."""


def plan_deployment(spec: DeploymentSpec, config_maps: ConfigMaps) -> tuple[wire.Plan, Proof]:
    """Plan and prove a deployment.

    Raises:
        Refusal: the deployment cannot work.
        ProofError: the planner made a wrong plan; nothing may be published.
    """
    with _spec_paths():
        return _plan(spec, config_maps)


def _plan(spec: DeploymentSpec, config_maps: ConfigMaps) -> tuple[wire.Plan, Proof]:
    geometry = _geometry(spec, config_maps)
    factors = {
        "model": spec.model.name,
        "dtype": spec.kv_cache_of("prefill").dtype,
        "engine": spec.engine.name,
        "engineVersion": spec.engine.version,
    }
    if spec.model.revision is not None:
        factors["revision"] = spec.model.revision
    plan = build_plan(geometry, _replica(spec, geometry, "prefill"), _replica(spec, geometry, "decode"), factors)
    return plan, prove(plan)


def inputs_digest(spec: DeploymentSpec, config_maps: ConfigMaps) -> str:
    """Digest of everything that a plan is made from: the same inputs are answered by the same published plan.

    Raises:
        Refusal: the model's config cannot be found.
    """
    inputs = {
        "model": {"name": spec.model.name, "revision": spec.model.revision},
        "geometry": spec.model.geometry.model_dump(mode="json", exclude_defaults=True)
        if spec.model.geometry is not None
        else _config(spec, config_maps),
        "engine": {"name": spec.engine.name, "version": spec.engine.version},
        "roles": {
            role: {
                "parallelism": spec.role(role).parallelism.model_dump(mode="json", exclude_defaults=True),
                "cache": spec.kv_cache_of(role).model_dump(mode="json"),
                "backend": spec.backend_of(role),
                "pages": spec.pages_of(role),
            }
            for role in ("prefill", "decode")
        },
    }
    return "sha256:" + hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def deployment_geometry(spec: DeploymentSpec, config_maps: ConfigMaps) -> Geometry:
    """Geometry of the model: explicit, or derived from its config.json.

    Raises:
        Refusal: with the field that is wrong.
    """
    with _spec_paths():
        return _geometry(spec, config_maps)


def _geometry(spec: DeploymentSpec, config_maps: ConfigMaps) -> Geometry:
    dtypes = {role: spec.kv_cache_of(role).dtype for role in ("prefill", "decode")}
    if dtypes["prefill"] != dtypes["decode"]:
        raise Refusal(
            "DtypeMismatch",
            "spec.decode.kvCache.dtype",
            f"prefill stores {dtypes['prefill']}, decode {dtypes['decode']}: a copy does not convert",
            "Use the same dtype on both sides",
        )
    element = dtype_bytes(dtypes["prefill"], "spec.kvCache.dtype")
    if spec.model.geometry is not None:
        return _explicit(spec.model.geometry, element)
    return from_config(_config(spec, config_maps), element)


@contextmanager
def _spec_paths() -> Iterator[None]:
    """The plan room names fields from the spec on; people look for them from the object on."""
    try:
        yield
    except Refusal as refusal:
        if refusal.field.startswith("spec."):
            raise
        raise Refusal(refusal.code, f"spec.{refusal.field}", refusal.message, refusal.remedy) from refusal


def geometry_spec(geometry: Geometry, element: int | None = None) -> GeometrySpec:
    """The explicit form of a geometry; inverse of what `spec.model.geometry` means.

    Args:
        element: bytes of an element of `kvCache.dtype`; cells of whole elements are then given in them. Otherwise
            cells are given in bytes: parts of one model may have elements of different sizes.
    """
    return GeometrySpec(
        groups=[
            GeometryGroup(
                name=group.name,
                layers=format_ranges(group.layers),
                table=group.table,
                parts=[_part_spec(part, element) for part in group.parts],
            )
            for group in geometry.groups
        ]
    )


def _part_spec(part: Part, element: int | None) -> GeometryPart:
    if element is None or part.cell_bytes % element:
        elements, dtype = part.cell_bytes, "uint8"
        return GeometryPart(name=part.name, units=part.units, sharding=part.sharding, elements=elements, dtype=dtype)
    return GeometryPart(name=part.name, units=part.units, sharding=part.sharding, elements=part.cell_bytes // element)


def _config(spec: DeploymentSpec, config_maps: ConfigMaps) -> Mapping[str, Any]:
    if spec.model.config is not None:
        return spec.model.config
    reference = spec.model.config_from
    if reference is None:
        raise Refusal("InvalidSpec", "spec.model", "no config and no geometry", "State one of them")
    key = reference.config_map_key_ref
    field = "spec.model.configFrom.configMapKeyRef"
    data = config_maps.get(key.name)
    if data is None or key.key not in data:
        what = (
            f"ConfigMap {key.name!r} does not exist" if data is None else f"ConfigMap {key.name!r} has no {key.key!r}"
        )
        raise Refusal("ConfigNotFound", field, what, f"Create it with the model's config.json under {key.key!r}")
    if not isinstance(data[key.key], str):
        raise Refusal("ConfigNotFound", field, f"{key.key!r} is not text", "Store config.json as it is, as one string")
    try:
        config = json.loads(data[key.key])
    except (ValueError, RecursionError) as error:
        raise Refusal(
            "ConfigNotFound", field, f"{key.key!r} is not JSON: {error}", "Store config.json as it is"
        ) from error
    if not isinstance(config, dict):
        raise Refusal("ConfigNotFound", field, f"{key.key!r} is not a JSON object", "Store config.json as it is")
    return config


def _explicit(declared: GeometrySpec, element: int) -> Geometry:
    groups = []
    for index, group in enumerate(declared.groups):
        field = f"spec.model.geometry.groups[{index}]"
        parts = tuple(
            Part(
                part.name,
                part.units,
                part.sharding,
                part.elements * (dtype_bytes(part.dtype, f"{field}.parts") if part.dtype else element),
            )
            for part in group.parts
        )
        try:
            layers = parse_ranges(group.layers)
        except FormatError as error:
            raise Refusal("BadGeometry", f"{field}.layers", error.message, "Write e.g. 0-31") from error
        groups.append(Group(group.name, layers, parts, group.table or group.name))
    return Geometry(tuple(groups))


def _replica(spec: DeploymentSpec, geometry: Geometry, role: Literal["prefill", "decode"]) -> Replica:
    declared = spec.role(role).parallelism
    profile = _profile(spec, role)
    cache = spec.kv_cache_of(role)
    return Replica(
        role=role,
        parallelism=wire.Parallelism(
            tensor=declared.tensor, pipeline=declared.pipeline, decode_context=declared.decode_context, interleave=1
        ),
        stages=_stages(declared.pipeline, declared.pipeline_layers, geometry, f"spec.{role}.parallelism"),
        profile=profile,
        layout=check_layout(profile, cache.layout, f"spec.{role}.kvCache.layout"),
        block_tokens=cache.block_size,
    )


def _profile(spec: DeploymentSpec, role: Literal["prefill", "decode"]) -> Profile:
    stated = spec.pages_of(role)
    if stated is not None:
        return stated_profile(spec.engine.name, spec.backend_of(role), stated)
    return find_profile(spec.engine.name, spec.engine.version, spec.backend_of(role), "spec.engine")


def _stages(pipeline: int, declared: list[str] | None, geometry: Geometry, field: str) -> tuple[tuple[int, ...], ...]:
    if declared is None:
        try:
            return default_stages(geometry.layers, pipeline)
        except Refusal as refusal:
            raise Refusal(refusal.code, f"{field}.pipeline", refusal.message, refusal.remedy) from refusal
    if len(declared) != pipeline:
        raise Refusal(
            "BadStages",
            f"{field}.pipelineLayers",
            f"{len(declared)} stages are listed, pipeline is {pipeline}",
            "List one layer range per stage",
        )
    try:
        return tuple(parse_ranges(text) for text in declared)
    except FormatError as error:
        raise Refusal("BadStages", f"{field}.pipelineLayers", error.message, "Write e.g. 0-15") from error
