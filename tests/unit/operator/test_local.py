"""Local mode's pure parts: what is sent, how much fits, how paths translate, how an account adds up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg_operator.documents import UsageError, read_deployments
from disagg_operator.local.drive import Account, Outcome, Workload, percentile
from disagg_operator.local.processes import _translate
from disagg_operator.local.sizing import page_bytes
from disagg_operator.local.up import UpOptions, prepare
from disagg_operator.quantities import parse_bytes
from disagg_operator.reconcile import Snapshot
from disagg_operator.types import DisaggDeployment, parse_deployment
from disagg_plan.errors import Refusal

Changed = Callable[[dict[str, Any]], dict[str, Any]]


def options(max_memory: int, longest: int = 1024, layers: int | None = None) -> UpOptions:
    return UpOptions(
        requests=1,
        longest=longest,
        concurrency=1,
        max_memory=max_memory,
        layers=layers,
        seed=0,
        state=Path("unused"),
        keep=False,
    )


@pytest.mark.parametrize(
    ("memory", "layers"), [(1 << 30, 32), (300 << 20, 16), (150 << 20, 8), (40 << 20, 2), (20 << 20, 1)]
)
def test_the_model_is_cut_to_the_layers_that_fit(deployment: DisaggDeployment, memory: int, layers: int) -> None:
    desired, sizes = prepare(Snapshot(deployment), options(memory))
    assert (sizes.layers, sizes.all_layers) == (layers, 32)
    assert sum(sizes.bytes.values()) <= memory
    assert desired.plan is not None
    assert desired.plan.summary.bytes_per_token == layers * 4096
    assert page_bytes(desired.plan.source) == layers * 16 * 4096
    # Two of the longest requests, 64 blocks each, fit on either side.
    assert min(sizes.pages.values()) >= 128


def test_chosen_layers_are_kept_or_refused(deployment: DisaggDeployment) -> None:
    _, sizes = prepare(Snapshot(deployment), options(1 << 30, layers=5))
    assert sizes.layers == 5
    with pytest.raises(Refusal) as refused:
        prepare(Snapshot(deployment), options(20 << 20, layers=32))
    assert (refused.value.code, refused.value.field) == ("NotEnoughMemory", "--max-memory")


def test_listed_stages_are_cut_with_the_model(changed: Changed) -> None:
    fields = {"spec.decode.parallelism": {"tensor": 4, "pipeline": 2, "pipelineLayers": ["0-3", "4-31"]}}
    desired, sizes = prepare(Snapshot(parse_deployment(changed(fields))), options(1 << 30, layers=6))
    assert sizes.layers == 6
    assert desired.plan is not None
    assert [desired.plan.destination.ranks[rank].layers["attention"] for rank in (0, 4)] == ["0-3", "4-5"]


def test_a_workload_is_reproducible_and_holds_the_edges() -> None:
    workload = Workload(requests=60, longest=1000, block=16, seed=3)
    prompts = workload.prompts()
    assert prompts == workload.prompts()
    assert prompts != Workload(60, 1000, 16, seed=4).prompts()
    lengths = [tokens for tokens, _ in prompts]
    assert len(prompts) == 60
    assert {1, 15, 16, 17, 32, 1000} <= set(lengths)
    assert all(1 <= tokens <= 1000 for tokens in lengths)
    hits = [(tokens, cached) for tokens, cached in prompts if cached]
    assert all(cached == tokens or (cached % 16 == 0 and cached < tokens) for tokens, cached in hits)
    assert any(cached == tokens for tokens, cached in hits)


def test_an_account_is_good_only_if_everything_is() -> None:
    served = Outcome("a", 10, 0, moved_bytes=100, verified_bytes=100, transfer_seconds=1e-6)
    assert Account([served], seconds=1.0).good
    assert not Account([served, Outcome("b", 1, 0, error="PeerLost: gone")]).good
    assert not Account([Outcome("c", 1, 0, wrong_bytes=1)]).good
    assert not Account([served], stray_bytes=1).good
    assert not Account([served], problems=["PodDied: x"]).good
    document = Account([served, Outcome("b", 1, 0, error="PeerLost: gone")], seconds=2.0).document()
    assert (document["requests"], document["failedRequests"]) == (2, 1)
    assert document["failureReasons"] == {"PeerLost": 1}
    assert (document["movedBytes"], document["verifiedBytes"], document["wrongBytes"]) == (100, 100, 0)
    assert document["gigabytesPerSecond"]["transferP50"] == 0.1


@pytest.mark.parametrize(
    ("values", "rank", "expected"),
    [([], 50, 0.0), ([3.0], 99, 3.0), ([4, 1, 3, 2], 50, 2), ([4, 1, 3, 2], 99, 4), (range(1, 101), 99, 99)],
)
def test_percentile_is_by_nearest_rank(values: Any, rank: float, expected: float) -> None:
    assert percentile(list(values), rank) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/run/disagg/agent.sock", "/tmp/x/agent.sock"),
        ("/run/disagg", "/tmp/x"),
        ("unix:/run/disagg/http.sock", "unix:/tmp/x/http.sock"),
        ("/run/disagg-other/agent.sock", "/run/disagg-other/agent.sock"),
        ("see /run/disagg", "see /run/disagg"),
    ],
)
def test_paths_under_a_mount_are_translated(text: str, expected: str) -> None:
    assert _translate(text, {"/run/disagg": "/tmp/x"}) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("1", 1), ("512Mi", 512 << 20), ("2Gi", 2 << 30), ("1.5Gi", 3 << 29), ("4G", 4 * 10**9)]
)
def test_quantities(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-1", "2GB", "Gi", "1e3", "two"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity|memory"):
        parse_bytes(text)


def test_files_may_hold_several_documents(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    document = "kind: DisaggDeployment\nmetadata: {name: %s}\n"
    config_map = "kind: ConfigMap\nmetadata: {name: m}\ndata: {c: '{}'}\n"
    path.write_text("---\n".join([document % "a", config_map, document % "b", "kind: Service\n"]))
    file = read_deployments(path)
    assert len(file.deployments) == 2
    assert file.config_maps == {"m": {"c": "{}"}}
    with pytest.raises(UsageError, match="a, b: choose one with --name"):
        file.snapshot(None)
    with pytest.raises(UsageError, match="no deployment 'c'"):
        file.snapshot("c")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kind: Service\n",
        "{",
        "- 1\n",
        "\x00",
        "[" * 20000,
        "kind: DisaggDeployment\nx: " + "9" * 5000,
        "kind: DisaggDeployment\nmetadata: {name: a}\nspec: {}\nspec: {}\n",
        "kind: DisaggDeployment\nmetadata: {name: a}\n---\nkind: DisaggDeployment\nmetadata: {name: a}\n",
        "kind: DisaggDeployment\n---\nkind: ConfigMap\nmetadata: [c]\ndata: [1]\n",
    ],
    ids=lambda text: repr(text[:24]),
)
def test_a_file_without_a_deployment_is_a_usage_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_deployments(path)


def test_dates_in_files_are_text(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("kind: DisaggDeployment\nmetadata: {name: 2024-13-45}\n")
    assert read_deployments(path).deployments[0]["metadata"] == {"name": "2024-13-45"}
