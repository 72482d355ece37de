"""What a deployment is refused for: the field, the numbers, the way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from disagg_operator.planning import deployment_geometry, geometry_spec, plan_deployment
from disagg_operator.types import DisaggDeployment, parse_deployment
from disagg_plan.errors import Refusal

Changed = Callable[[dict[str, Any]], dict[str, Any]]

PART = {"name": "k", "units": 8, "sharding": "split", "elements": 128}


@pytest.mark.parametrize(
    ("fields", "code", "field", "said"),
    [
        ({"spec.prefil": {}}, "InvalidSpec", "spec.prefil", "Extra inputs"),
        ({"spec.decode.replicas": -1}, "InvalidSpec", "spec.decode.replicas", "greater than or equal to 0"),
        ({"spec.decode.parallelism.tensor": "four"}, "InvalidSpec", "spec.decode.parallelism.tensor", "integer"),
        ({"spec.model.config": None}, "InvalidSpec", "spec.model", "one of config, configFrom and geometry"),
        (
            {"spec.model.configFrom": {"configMapKeyRef": {"name": "m", "key": "config.json"}}},
            "InvalidSpec",
            "spec.model",
            "exclude each other",
        ),
        (
            {"spec.prefill.template": {"spec": {"containers": [{"name": "main"}]}}},
            "InvalidSpec",
            "spec.prefill.template",
            "exactly one container named 'engine', has ['main']",
        ),
        ({"metadata.name": "Bad_Name"}, "InvalidSpec", "metadata.name", "pattern"),
        (
            {"spec.decode.parallelism.tensor": 3},
            "IndivisibleUnits",
            "spec.decode.parallelism.tensor",
            "8 units of part 'k' cannot be placed on 3",
        ),
        (
            {"spec.decode.kvCache": {"dtype": "int8"}},
            "DtypeMismatch",
            "spec.decode.kvCache.dtype",
            "prefill stores bfloat16, decode int8",
        ),
        ({"spec.kvCache.dtype": "float7"}, "UnknownDtype", "spec.kvCache.dtype", "'float7'"),
        ({"spec.engine.backend": "NOPE"}, "UnknownProfile", "spec.engine.backend", "'NOPE'"),
        ({"spec.engine.version": "0.12.0"}, "UnknownProfile", "spec.engine.version", "0.12.0"),
        ({"spec.engine.name": "other"}, "UnknownProfile", "spec.engine.name", "'other'"),
        (
            {"spec.decode.engine": {"backend": "CPU_ATTN"}},
            "LayoutMismatch",
            "spec.decode.engine.backend",
            "vllm/CPU_ATTN",
        ),
        (
            {"spec.engine.backend": "CPU_ATTN", "spec.decode.kvCache": {"blockSize": 32}},
            "OpaqueBlockSize",
            "spec.decode.kvCache.blockSize",
            "prefill 16, decode 32",
        ),
        (
            {"spec.decode.parallelism.pipeline": 40},
            "TooManyStages",
            "spec.decode.parallelism.pipeline",
            "40 pipeline stages for 32 layers",
        ),
        (
            {"spec.decode.parallelism.pipelineLayers": ["0-15", "16-31"]},
            "BadStages",
            "spec.decode.parallelism.pipelineLayers",
            "2 stages are listed, pipeline is 1",
        ),
        (
            {"spec.model.config": None, "spec.model.configFrom": {"configMapKeyRef": {"name": "m", "key": "c"}}},
            "ConfigNotFound",
            "spec.model.configFrom.configMapKeyRef",
            "'m' does not exist",
        ),
        (
            {"spec.model.geometry": {"groups": [{"name": "a", "layers": "3-1", "parts": [PART]}]}},
            "BadGeometry",
            "spec.model.geometry.groups[0].layers",
            "3-1",
        ),
        (
            {"spec.model.config.model_type": "unheard"},
            "UnknownArchitecture",
            "spec.model.config.model_type",
            "'unheard'",
        ),
    ],
)
def test_refusals_name_field_numbers_and_way_out(
    changed: Changed, fields: dict[str, Any], code: str, field: str, said: str
) -> None:
    with pytest.raises(Refusal) as refused:
        plan_deployment(parse_deployment(changed(fields)).spec, {})
    assert refused.value.code == code
    assert refused.value.field == field
    assert said in refused.value.message
    assert refused.value.remedy


def test_config_from_a_config_map_plans_the_same(changed: Changed, deployment: DisaggDeployment) -> None:
    inline, _ = plan_deployment(deployment.spec, {})
    config = json.dumps(deployment.spec.model.config)
    fields = {"spec.model.config": None, "spec.model.configFrom": {"configMapKeyRef": {"name": "m", "key": "c"}}}
    referred, _ = plan_deployment(parse_deployment(changed(fields)).spec, {"m": {"c": config}})
    assert referred.digest == inline.digest


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_config_that_is_no_object_is_refused(changed: Changed, text: str) -> None:
    fields = {"spec.model.config": None, "spec.model.configFrom": {"configMapKeyRef": {"name": "m", "key": "c"}}}
    with pytest.raises(Refusal) as refused:
        plan_deployment(parse_deployment(changed(fields)).spec, {"m": {"c": text}})
    assert refused.value.code == "ConfigNotFound"


def test_explicit_geometry_wins_and_round_trips(deployment: DisaggDeployment) -> None:
    geometry = deployment_geometry(deployment.spec, {})
    explicit = deployment.spec.model.model_copy(update={"geometry": geometry_spec(geometry.first_layers(3))})
    cut = deployment.spec.model_copy(update={"model": explicit})
    assert deployment_geometry(cut, {}) == geometry.first_layers(3)
    assert plan_deployment(cut, {})[0].summary.bytes_per_token == 3 * 8 * 2 * 128 * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"spec.model.revision": "abc"},
        {"spec.model.name": "another"},
        {"spec.engine.version": "0.34.0"},
        {"spec.engine.backend": "FLASHINFER"},
        {"spec.kvCache.dtype": "float16"},
        {"spec.kvCache.blockSize": 32},
        {"spec.decode.kvCache": {"layout": "NHD"}},
        {"spec.model.config.num_hidden_layers": 31},
    ],
)
def test_whatever_peers_must_agree_on_changes_the_compat_digest(
    changed: Changed, deployment: DisaggDeployment, fields: dict[str, Any]
) -> None:
    before, _ = plan_deployment(deployment.spec, {})
    after, _ = plan_deployment(parse_deployment(changed(fields)).spec, {})
    assert before.compat.digest != after.compat.digest


@pytest.mark.parametrize(
    "fields", [{"spec.decode.parallelism.tensor": 8}, {"spec.decode.replicas": 5}, {"spec.prefill.replicas": 0}]
)
def test_cutting_and_counting_do_not_change_compat(
    changed: Changed, deployment: DisaggDeployment, fields: dict[str, Any]
) -> None:
    before, _ = plan_deployment(deployment.spec, {})
    after, _ = plan_deployment(parse_deployment(changed(fields)).spec, {})
    assert before.compat.digest == after.compat.digest


def test_cut_geometry_keeps_elements_of_every_size(changed: Changed) -> None:
    parts = [
        {"name": "k", "units": 2, "sharding": "split", "elements": 3, "dtype": "int8"},
        {"name": "v", "units": 2, "sharding": "split", "elements": 5, "dtype": "float32"},
    ]
    fields = {"spec.model.geometry": {"groups": [{"name": "odd", "layers": "0-3", "parts": parts}]}}
    spec = parse_deployment(changed(fields)).spec
    whole = deployment_geometry(spec, {})
    assert whole.bytes_per_token == 4 * 2 * (3 + 20)
    cut = spec.model.model_copy(update={"geometry": geometry_spec(whole.first_layers(2))})
    assert deployment_geometry(spec.model_copy(update={"model": cut}), {}) == whole.first_layers(2)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (5, "template is a number"),
        ([], "template is a list"),
        ({"spec": []}, "template.spec is a list"),
        ({"spec": {"containers": 5}}, "template.spec.containers is a number"),
        ({"spec": {"containers": [None]}}, "containers[0] is null"),
        ({"spec": {"containers": ["engine"]}}, "containers[0] is a string"),
        ({"spec": {"containers": [{"name": "engine"}, {"image": "x"}]}}, "containers[1] has the name None"),
        ({"spec": {"containers": [{"name": "engine"}, {"name": "engine"}]}}, "'engine' twice"),
        ({"spec": {"containers": [{"name": "engine", "env": {"A": "b"}}]}}, "env is an object, not a list"),
        ({"spec": {"containers": [{"name": "engine", "env": [{"value": "b"}]}]}}, "env[0] has no name"),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": 1}]}]}},
            "env[A].value is a number",
        ),
        (
            {"spec": {"containers": [{"name": "engine", "env": [{"name": "A", "value": "x\0"}]}]}},
            "no environment can hold",
        ),
        ({"spec": {"containers": [{"name": "engine", "args": ["--x", 5]}]}}, "args is not a list of strings"),
        ({"spec": {"containers": [{"name": "engine", "volumeMounts": [{"name": "m"}]}]}}, "has no mountPath"),
        (
            {"spec": {"containers": [{"name": "engine", "volumeMounts": [{"name": "m", "mountPath": "/m"}]}]}},
            "names volume 'm', which is not declared",
        ),
        ({"spec": {"containers": [{"name": "engine"}], "volumes": [{"name": "../x"}]}}, "has the name '../x'"),
        ({"spec": {"containers": [{"name": "engine"}], "volumes": [{"name": "disagg-run"}]}}, "'disagg-run' is ours"),
        ({"spec": {"containers": [{"name": "engine"}], "initContainers": [{"name": "disagg-agent"}]}}, "is ours"),
        ({"metadata": [], "spec": {"containers": [{"name": "engine"}]}}, "template.metadata is a list"),
        (
            {"metadata": {"annotations": {"a": 1}}, "spec": {"containers": [{"name": "engine"}]}},
            "annotations.a is a number",
        ),
        ({1: 2, "spec": {"containers": [{"name": "engine"}]}}, "the key 1, which is not a string"),
        ({"spec": {"containers": [{"name": "engine", "x": {1, 2}}]}}, "is a set, which no Kubernetes object holds"),
    ],
)
def test_a_template_that_cannot_be_rendered_from_is_refused_with_its_path(
    changed: Changed, template: Any, said: str
) -> None:
    with pytest.raises(Refusal) as refused:
        parse_deployment(changed({"spec.prefill.template": template}))
    assert (refused.value.code, refused.value.field) == ("InvalidSpec", "spec.prefill.template")
    assert said in refused.value.message


def test_nulls_in_a_template_are_as_good_as_absent(changed: Changed) -> None:
    container = {"name": "engine", "env": None, "args": None, "volumeMounts": None, "image": "x"}
    template = {"metadata": None, "spec": {"containers": [container], "initContainers": None, "volumes": None}}
    cleaned = parse_deployment(changed({"spec.prefill.template": template})).spec.prefill.template
    assert cleaned == {"spec": {"containers": [{"name": "engine", "image": "x"}]}}


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_key_value_heads", "hidden_size"])
@pytest.mark.parametrize("value", [10**30, 10**9, 0, -1, "8", 1.5, True])
def test_numbers_that_no_model_has_are_refused(changed: Changed, field: str, value: Any) -> None:
    with pytest.raises(Refusal) as refused:
        plan_deployment(parse_deployment(changed({f"spec.model.config.{field}": value})).spec, {})
    assert (refused.value.code, refused.value.field) == ("MissingConfigField", f"spec.model.config.{field}")
