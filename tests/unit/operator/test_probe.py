"""What a probe prints, and what becomes of it in a deployment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg_operator.documents import UsageError
from disagg_operator.engine_flags import engine_args, probe_args, shape_args
from disagg_operator.planning import plan_deployment
from disagg_operator.probe_report import make_report, read_rank_files
from disagg_operator.types import DisaggDeployment, parse_deployment
from disagg_plan import wire
from disagg_plan.errors import FormatError, Refusal
from disagg_plan.probe_facts import decode_facts

Changed = Callable[[dict[str, Any]], dict[str, Any]]
Make = Callable[..., dict[str, dict[str, Any]]]

LLAMA_8B = {"heads": 8, "head_sizes": (128, 128), "stages": [tuple(range(32))], "block": 16, "dtype": "bfloat16"}


def report_of(documents: dict[str, dict[str, Any]]) -> Any:
    return make_report(
        {file: decode_facts(json.dumps(document).encode(), file) for file, document in documents.items()}
    )


def pasted(changed: Changed, spec: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "spec.model": spec["model"],
        "spec.engine": spec["engine"],
        "spec.kvCache": spec["kvCache"],
    }
    return changed(fields)


def carried(plan: wire.Plan) -> list[Any]:
    """Who sends what to whom."""
    return [(edge.source, edge.destination, plan.shapes[edge.shape]) for edge in plan.edges]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_what_is_pasted_plans_as_the_config_does(
    probe_files: Make, changed: Changed, example: dict[str, Any], layout: str
) -> None:
    example["spec"]["kvCache"]["layout"] = layout
    by_config, _ = plan_deployment(parse_deployment(example).spec, {})
    report = report_of(probe_files(tensor=2, backend="FLASH_ATTN", layout=layout, **LLAMA_8B))
    printed = yaml.safe_load(report.text())
    assert printed == report.spec
    assert "pages" not in printed["engine"]
    by_probe, _ = plan_deployment(parse_deployment(pasted(changed, printed)).spec, {})
    assert carried(by_probe) == carried(by_config)


def test_a_backend_without_a_profile_is_served_by_what_is_printed(probe_files: Make, changed: Changed) -> None:
    printed = yaml.safe_load(report_of(probe_files(backend="NEW_ATTN", **LLAMA_8B)).text())
    assert printed["engine"] == {"name": "vllm", "version": "0.32.0", "backend": "NEW_ATTN", "pages": "opaque"}
    plan, _ = plan_deployment(parse_deployment(pasted(changed, printed)).spec, {})
    assert plan.compat.factors["prefill"]["profile"] == "vllm/NEW_ATTN"
    # Eight heads of 16 tokens, K and V of 128 elements in two bytes: one run a head.
    assert {copy.bytes for shape in plan.shapes for copy in shape} == {2 * 16 * 2 * 128 * 2}


def test_uneven_stages_are_printed_to_declare(probe_files: Make) -> None:
    report = report_of(probe_files(stages=[(0,), (1, 2, 3)]))
    assert report.document()["pipelineLayers"] == ["0", "1-3"]
    assert '# parallelism: {pipeline: 2, pipelineLayers: ["0", "1-3"]}' in report.text().splitlines()


def test_elements_of_another_size_are_given_in_bytes(probe_files: Make) -> None:
    documents = probe_files(dtype="bfloat16", head_sizes=(5, 0))
    for layer in documents["rank-0.json"]["layers"]:
        layer["tensors"][0]["element"] = 1
    (group,) = report_of(documents).spec["model"]["geometry"]["groups"]
    assert group["parts"] == [{"name": "kv", "units": 4, "sharding": "split", "elements": 5, "dtype": "uint8"}]


@pytest.mark.parametrize(
    ("fields", "profile"),
    [
        ({"spec.engine.pages": "opaque"}, "opaque"),
        ({"spec.engine.backend": "NEW", "spec.engine.pages": "joint"}, "joint"),
        ({"spec.engine.version": "0.1", "spec.engine.pages": "separate"}, "separate"),
        ({"spec.engine.name": "other", "spec.engine.pages": "joint"}, "joint"),
    ],
)
def test_stated_pages_win_over_the_profile(changed: Changed, fields: dict[str, Any], profile: str) -> None:
    plan, _ = plan_deployment(parse_deployment(changed(fields)).spec, {})
    parts = {"opaque": ["kv"], "joint": ["k", "v"], "separate": ["k", "v"]}[profile]
    page = plan.source.pages[0]
    assert [part.name for part in page.parts] == parts
    assert len(page.regions) == (2 if profile == "separate" else 1)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"spec.engine.pages": "sideways"}, "InvalidSpec"),
        # Pages are stated for the backend beside them, and say nothing about another one.
        ({"spec.engine.pages": "joint", "spec.decode.engine": {"backend": "NEW"}}, "UnknownProfile"),
        ({"spec.decode.engine": {"backend": "FLASH_ATTN", "pages": "opaque"}}, "LayoutMismatch"),
        ({"spec.engine.pages": "opaque", "spec.decode.kvCache": {"blockSize": 32}}, "OpaqueBlockSize"),
        ({"spec.engine.pages": "opaque", "spec.kvCache.layout": "NHD"}, "UnknownLayout"),
    ],
)
def test_stated_pages_are_judged_like_known_ones(changed: Changed, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(Refusal) as refused:
        plan_deployment(parse_deployment(changed(fields)).spec, {})
    assert refused.value.code == code


def test_a_role_may_state_pages_of_its_own_backend(changed: Changed) -> None:
    fields = {"spec.decode.engine": {"backend": "NEW", "pages": "joint"}}
    plan, _ = plan_deployment(parse_deployment(changed(fields)).spec, {})
    assert plan.compat.factors["decode"]["profile"] == "vllm/NEW"


def test_an_unknown_profile_says_how_to_do_without(changed: Changed) -> None:
    with pytest.raises(Refusal) as refused:
        plan_deployment(parse_deployment(changed({"spec.engine.backend": "NEW"})).spec, {})
    assert "spec.engine.pages" in refused.value.remedy
    assert "disagg probe" in refused.value.remedy


def test_the_probe_takes_the_connectors_place_and_nothing_else(deployment: DisaggDeployment) -> None:
    arguments = engine_args(deployment.spec, "decode")
    assert arguments[:-2] == shape_args(deployment.spec, "decode")
    flag, transfer = probe_args("/out")
    assert flag == arguments[-2]
    assert json.loads(transfer) == {
        "kv_connector": "DisaggProbe",
        "kv_connector_module_path": "disagg_agent.engines.vllm.probe",
        "kv_connector_extra_config": {"output": "/out"},
        "kv_role": "kv_both",
    }


def test_files_of_a_folder(probe_files: Make, tmp_path: Path) -> None:
    for file, document in probe_files(tensor=2).items():
        (tmp_path / file).write_text(json.dumps(document))
    (tmp_path / ".rank-2.json.17").write_text("{")
    assert sorted(read_rank_files(tmp_path)) == ["rank-0.json", "rank-1.json"]
    (tmp_path / "rank-1.json").write_text("{")
    with pytest.raises(FormatError, match=r"rank-1\.json"):
        read_rank_files(tmp_path)
    (tmp_path / "rank-1.json").unlink()
    (tmp_path / "rank-1.json").mkdir()
    with pytest.raises(UsageError, match=r"rank-1\.json"):
        read_rank_files(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        read_rank_files(tmp_path / "nothing")
