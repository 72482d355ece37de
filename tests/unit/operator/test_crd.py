"""The CustomResourceDefinition: what an API server takes, and that it agrees with what is parsed and planned."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from disagg_operator.children import CLUSTER
from disagg_operator.cli import app
from disagg_operator.crd import crd_yaml, custom_resource_definition
from disagg_operator.planning import plan_deployment
from disagg_operator.reconcile import Snapshot, reconcile
from disagg_operator.status_types import Condition, PlanStatus, RolesStatus, RoleStatus, Status, TransferStatus
from disagg_operator.types import DisaggDeployment, parse_deployment
from disagg_plan.errors import Refusal

Changed = Callable[[dict[str, Any]], dict[str, Any]]

ROOT = Path(__file__).parents[3]
FILE = ROOT / "crds" / "disaggdeployments.disagg.dev.yaml"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PRESERVE = "x-kubernetes-preserve-unknown-fields"
RULES = "x-kubernetes-validations"
HALF_OF_CLIENT_SIDE_APPLY = 262144 // 2
KEYWORDS = {
    *("type", "description", "default", "enum", "format", "pattern", "required", "properties", "items"),
    *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
    *(PRESERVE, RULES, "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
}


def version() -> dict[str, Any]:
    (only,) = custom_resource_definition()["spec"]["versions"]
    return dict(only)


def root() -> dict[str, Any]:
    return dict(version()["schema"]["openAPIV3Schema"])


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


def unknown(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Fields of a document that a schema does not know."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from unknown(item, schema["items"], f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name)
            if inner is not None:
                yield from unknown(item, inner, f"{path}.{name}")
            elif PRESERVE not in schema:
                yield f"{path}.{name}"


def defaulted(value: Any, schema: dict[str, Any]) -> Any:
    """A document as an API server fills it in: the default of an absent field, then the defaults inside it."""
    if isinstance(value, list):
        return [defaulted(item, schema["items"]) for item in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, inner in schema.get("properties", {}).items():
        if name not in filled and "default" in inner:
            filled[name] = copy.deepcopy(inner["default"])
        if name in filled:
            filled[name] = defaulted(filled[name], inner)
    return filled


def test_the_file_is_what_the_types_say() -> None:
    assert FILE.read_text() == crd_yaml(), "run make crds"
    assert yaml.safe_load(crd_yaml()) == custom_resource_definition()
    assert FILE.name == f"{custom_resource_definition()['metadata']['name']}.yaml"


def test_the_command_prints_the_file() -> None:
    printed = CliRunner().invoke(app, ["crds"])
    assert (printed.exit_code, printed.stdout) == (0, FILE.read_text())
    printed = CliRunner().invoke(app, ["crds", "-o", "json"])
    assert json.loads(printed.stdout) == custom_resource_definition()


def test_names() -> None:
    crd = custom_resource_definition()
    names = crd["spec"]["names"]
    assert crd["metadata"]["name"] == f"{names['plural']}.{crd['spec']['group']}" == "disaggdeployments.disagg.dev"
    assert names == {
        "kind": "DisaggDeployment",
        "listKind": "DisaggDeploymentList",
        "plural": "disaggdeployments",
        "singular": "disaggdeployment",
        "shortNames": ["dd"],
    }
    assert crd["spec"]["scope"] == "Namespaced"
    assert (version()["name"], version()["served"], version()["storage"]) == ("v1alpha1", True, True)
    assert version()["subresources"] == {"status": {}}


def test_it_is_far_smaller_than_what_client_side_apply_takes() -> None:
    assert len(crd_yaml()) < HALF_OF_CLIENT_SIDE_APPLY
    assert len(json.dumps(custom_resource_definition())) < HALF_OF_CLIENT_SIDE_APPLY


def test_the_root_restricts_nothing_but_the_name() -> None:
    assert set(root()) == {"type", "description", "required", "properties"}
    assert root()["required"] == ["spec"]
    assert list(root()["properties"]) == ["metadata", "spec", "status"]
    assert root()["properties"]["metadata"] == {
        "type": "object",
        "properties": {
            "name": {
                "type": "string",
                "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
                "minLength": 1,
                "maxLength": 63,
            }
        },
    }


def test_every_node_is_structural_and_bounded() -> None:
    for path, node in nodes(root()):
        assert set(node) <= KEYWORDS, path
        kind = node["type"]
        assert kind in ("object", "array", "string", "integer", "boolean"), path
        if kind == "string":
            assert "maxLength" in node or "enum" in node, path
        if kind == "array":
            assert "maxItems" in node, path
        if kind == "object":
            assert "properties" in node or node[PRESERVE] is True, path


def test_only_what_is_not_ours_is_kept_unseen() -> None:
    free = {re.sub(r"prefill|decode", "role", path) for path, node in nodes(root()) if PRESERVE in node}
    template = "spec.role.template"
    lists = {f"{template}.spec.{name}[]" for name in ("containers", "initContainers", "volumes")}
    assert free == {"spec.model.config", template, f"{template}.spec", *lists}


def test_a_report_is_never_filled_in() -> None:
    assert not [path for path, node in nodes(root()["properties"]["status"]) if "default" in node]


def test_defaults_are_stated() -> None:
    spec = root()["properties"]["spec"]["properties"]
    assert spec["transport"]["default"] == {"protocol": "Auto", "leaseSeconds": 30, "deadlineSeconds": 30}
    assert spec["kvCache"]["default"] == {"dtype": "bfloat16", "blockSize": 16}
    assert spec["decode"]["properties"]["parallelism"]["default"] == {"tensor": 1, "pipeline": 1, "decodeContext": 1}
    assert spec["decode"]["properties"]["replicas"]["default"] == 1


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_have_only_known_fields_and_are_filled_in_as_parsing_does(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    known = root()
    known["properties"] |= {"apiVersion": {}, "kind": {}}
    assert list(unknown(document, known)) == []
    parsed = parse_deployment(document).spec.model_dump(by_alias=True, exclude_none=True)
    assert defaulted(document, root())["spec"] == parsed


@pytest.mark.parametrize("fields", [{"spec.transport": {}}, {"spec.transport": {"leaseSeconds": 5}, "spec.agent": {}}])
def test_what_is_half_stated_is_filled_in_too(changed: Changed, fields: dict[str, Any]) -> None:
    document = changed(fields)
    parsed = parse_deployment(document).spec.model_dump(by_alias=True, exclude_none=True)
    assert defaulted(document, root())["spec"] == parsed


GEOMETRY = [
    {
        "name": "a",
        "layers": "0-31",
        "parts": [
            {"name": "k", "units": 6, "sharding": "split", "elements": 8},
            {"name": "v", "units": 6, "sharding": "split", "elements": 8},
        ],
    }
]
PREFILL_TENSOR, DECODE_TENSOR = (f"spec.{role}.parallelism.tensor" for role in ("prefill", "decode"))
SPLIT = {"spec.model.geometry": {"groups": GEOMETRY}}
TWICE = [{**GEOMETRY[0], "parts": [GEOMETRY[0]["parts"][0]] * 2}]
ENGINE = {"name": "engine"}


def template(*containers: str, **more: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": name} for name in containers], **more}}


REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    ("spec", 0, {"spec.prefill.kvCache": {"dtype": "float16"}}, "DtypeMismatch"),
    ("spec", 0, {"spec.decode.kvCache": {"dtype": "float16"}}, "DtypeMismatch"),
    ("spec", 1, SPLIT | {PREFILL_TENSOR: 4, DECODE_TENSOR: 2}, "IndivisibleUnits"),
    ("spec", 2, SPLIT | {PREFILL_TENSOR: 2, DECODE_TENSOR: 4}, "IndivisibleUnits"),
    ("spec.model", 0, {"spec.model.configFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}}, "InvalidSpec"),
    ("spec.model", 1, {"spec.model.config": None}, "InvalidSpec"),
    ("spec.model.geometry.groups[]", 0, {"spec.model.geometry": {"groups": TWICE}, DECODE_TENSOR: 2}, "BadGeometry"),
]
for role in ("prefill", "decode"):
    parallelism, pods = f"spec.{role}.parallelism", f"spec.{role}.template"
    REFUSED += [
        (parallelism, 0, {parallelism: {"pipeline": 2, "pipelineLayers": ["0-31"]}}, "BadStages"),
        (parallelism, 0, {f"{parallelism}.pipelineLayers": []}, "BadStages"),
        (parallelism, 1, {f"{parallelism}.decodeContext": 2}, "UnsupportedTopology"),
        (pods, 0, {pods: template()}, "InvalidSpec"),
        (pods, 0, {pods: template("main", "side")}, "InvalidSpec"),
        (pods, 1, {pods: template("engine", "disagg-agent")}, "InvalidSpec"),
        (pods, 1, {pods: template("engine", initContainers=[{"name": "disagg-agent"}])}, "InvalidSpec"),
        (pods, 2, {pods: template("engine", volumes=[{"name": "disagg-run"}])}, "InvalidSpec"),
        (pods, 2, {pods: template("engine", volumes=[{"name": "disagg-plan"}])}, "InvalidSpec"),
    ]


@pytest.mark.parametrize(("where", "index", "fields", "code"), REFUSED)
def test_what_a_rule_refuses_is_refused_without_an_api_server(
    changed: Changed, where: str, index: int, fields: dict[str, Any], code: str
) -> None:
    rules = dict(nodes(root()))[where][RULES]
    assert rules[index]["rule"]
    with pytest.raises(Refusal) as refused:
        plan_deployment(parse_deployment(changed(fields)).spec, {})
    assert refused.value.code == code


def test_every_rule_is_in_the_table_above_and_says_what_to_do() -> None:
    rules = {(path, index) for path, node in nodes(root()) for index in range(len(node.get(RULES, ())))}
    assert rules == {(where, index) for where, index, _, _ in REFUSED}
    for path, node in nodes(root()):
        for rule in node.get(RULES, ()):
            assert rule.get("message") or rule.get("messageExpression"), path
            # An API server takes its result as text without end, and refuses what is joined to it for its cost.
            assert "string(" not in rule.get("messageExpression", ""), path


@pytest.mark.parametrize(
    ("where", "fields", "code"),
    [
        ("spec.model.geometry.groups", {"spec.model.geometry": {"groups": GEOMETRY * 2}}, "BadGeometry"),
        ("spec.decode.template.spec.containers", {"spec.decode.template": template("engine", "engine")}, "InvalidSpec"),
        (
            "spec.decode.template.spec.volumes",
            {"spec.decode.template": template("engine", volumes=[{"name": "v"}, {"name": "v"}])},
            "InvalidSpec",
        ),
    ],
)
def test_names_that_must_be_unique_are_keys(changed: Changed, where: str, fields: dict[str, Any], code: str) -> None:
    node = dict(nodes(root()))[where]
    assert (node["x-kubernetes-list-type"], node["x-kubernetes-list-map-keys"]) == ("map", ["name"])
    with pytest.raises(Refusal) as refused:
        plan_deployment(parse_deployment(changed(fields)).spec, {})
    assert refused.value.code == code


@pytest.mark.parametrize("key", ["containers", "initContainers", "volumes"])
def test_bounds_of_a_template_are_those_of_parsing(changed: Changed, key: str) -> None:
    bound = dict(nodes(root()))[f"spec.decode.template.spec.{key}"]["maxItems"]
    lists: dict[str, Any] = {"containers": [ENGINE]}
    lists[key] = [*lists.get(key, []), *({"name": f"n{index}"} for index in range(bound))][:bound]
    parse_deployment(changed({"spec.decode.template": {"spec": lists}}))
    lists[key] = [*lists[key], {"name": "more"}]
    with pytest.raises(Refusal, match=f"{bound + 1} entries, at most {bound}"):
        parse_deployment(changed({"spec.decode.template": {"spec": lists}}))


def test_printer_columns_show_what_the_status_has() -> None:
    columns = version()["additionalPrinterColumns"]
    assert [column["name"].upper() for column in columns] == [
        *("PREFILL", "DECODE", "TP", "TRANSPORT", "PLAN", "READY", "REASON", "AGE")
    ]
    known = dict(nodes(root()))
    for column in columns[:-1]:
        path = re.sub(r"\[\?\(@\.type==\"Ready\"\)\]", "[]", column["jsonPath"]).removeprefix(".")
        assert known[path]["type"] == column["type"] == "string", path
    assert columns[-1] == {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


DIGEST = f"sha256:{'0123456789abcdef' * 4}"
CONDITION = {
    "type": "Ready",
    "status": "False",
    "reason": "ImagePull",
    "message": "",
    "lastTransitionTime": "2026-12-02T00:00:00Z",
}


def test_a_whole_status_reads_as_designed() -> None:
    side = RoleStatus(desired=2, ready=1, updated=1, on_current_plan=1, summary="1/2")
    status = Status(
        observed_generation=3,
        summary="2P -> 2D",
        plan=PlanStatus(
            digest=DIGEST,
            compat_digest=DIGEST,
            config_maps=["a-plan-0123456789"],
            edges=4,
            bytes_per_token=131072,
            copies_per_block=256,
        ),
        roles=RolesStatus(prefill=side, decode=side),
        parallelism="2->4",
        transfer=TransferStatus(protocol_requested="Auto", pairs_verified=0, pairs_expected=4),
        conditions=[Condition.model_validate(CONDITION)],
    )
    written = status.model_dump(by_alias=True, exclude_none=True)
    sides = {"desired": 2, "ready": 1, "updated": 1, "onCurrentPlan": 1, "summary": "1/2"}
    assert written == {
        "observedGeneration": 3,
        "summary": "2P -> 2D",
        "plan": {
            "digest": DIGEST,
            "shortDigest": "0123456789",
            "compatDigest": DIGEST,
            "configMaps": ["a-plan-0123456789"],
            "edges": 4,
            "bytesPerToken": 131072,
            "copiesPerBlock": 256,
        },
        "roles": {"prefill": sides, "decode": sides},
        "parallelism": "2->4",
        "transfer": {"protocolRequested": "Auto", "pairsVerified": 0, "pairsExpected": 4},
        "conditions": [CONDITION],
    }
    assert list(unknown(written, root()["properties"]["status"])) == []
    assert Status.model_validate(written) == status


@pytest.mark.parametrize("fields", [{}, {"spec.decode.parallelism.tensor": 3}])
def test_what_is_decided_fits_the_schema(changed: Changed, fields: dict[str, Any]) -> None:
    status = reconcile(Snapshot(parse_deployment(changed(fields))), CLUSTER).status
    assert list(unknown(status, root()["properties"]["status"])) == []


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("type", ["Ready", "disagg.dev/Ready"], ["", "-Ready", "T" * 317]),
        ("status", ["True", "False", "Unknown"], ["true", ""]),
        ("reason", ["A", "NoPlan", "A_b:c,d"], ["", "no plan", "R" * 1025]),
        ("message", ["", "m" * 32768], ["m" * 32769]),
        ("lastTransitionTime", ["2026-12-02T19:00:00Z"], ["", "2026-12-02", "2026-12-02T19:00:00.5Z"]),
        ("observedGeneration", [0, 7], [-1]),
    ],
)
def test_conditions_have_the_bounds_of_metav1(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        Condition.model_validate({**CONDITION, field: value})
    for value in bad:
        with pytest.raises(ValidationError, match=field):
            Condition.model_validate({**CONDITION, field: value})


def test_the_type_of_the_status_is_not_needed_to_read_an_object(deployment: DisaggDeployment) -> None:
    # An older operator's status must not keep a deployment from being read.
    document = deployment.model_dump(by_alias=True, exclude_none=True) | {"status": {"unheard": 1}}
    assert parse_deployment(document).spec == deployment.spec
