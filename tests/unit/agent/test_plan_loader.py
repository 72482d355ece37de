"""A pod executes exactly the plan that it was rendered with, and only if that plan is proven."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disagg_agent.errors import PlanRefused
from disagg_agent.plan_loader import check_plan, load_plan
from disagg_plan import canonical, wire


@pytest.fixture
def plan(build: Any) -> wire.Plan:
    return build.deployment(build.heads(4, layers=2), 2, 4).plan()


@pytest.fixture
def written(plan: wire.Plan, tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_bytes(wire.encode(plan))
    return path


def refusal(call: Callable[[], object]) -> PlanRefused:
    with pytest.raises(PlanRefused) as caught:
        call()
    return caught.value


def test_a_plan_is_loaded_with_its_exact_bytes(plan: wire.Plan, written: Path) -> None:
    for digest in (None, plan.digest):
        found = load_plan(written, digest)
        assert found.plan == plan
        assert found.text == written.read_bytes()


def test_sources_and_tells_of_a_plan(build: Any) -> None:
    found = check_plan(wire.encode(build.deployment(build.heads(4), 2, 4).plan()), None)
    assert found.sources == ((0,), (0,), (1,), (1,))
    assert found.tells == found.sources
    assert found.side("prefill") is found.plan.source
    assert found.side("decode") is found.plan.destination


def test_unread_sources_are_told_by_one_rank(build: Any) -> None:
    # One KV head on every one of four ranks: decode's two ranks cannot need more than two of them.
    found = check_plan(wire.encode(build.deployment(build.heads(1, layers=1), 4, 2).plan()), None)
    read = {source for sources in found.sources for source in sources}
    told = [source for sources in found.tells for source in sources]
    assert len(read) == 2
    assert sorted(told) == [0, 1, 2, 3]
    for rank, sources in enumerate(found.sources):
        assert set(sources) <= set(found.tells[rank])


def test_factors_that_a_rank_must_report(build: Any) -> None:
    deployment = build.deployment(build.heads(4), 1, 1, prefill_options={"block": 32}, decode_options={"layout": "NHD"})
    found = check_plan(wire.encode(deployment.plan()), None)
    assert found.expected_factors("prefill") == {
        "model": "test",
        "blockTokens": 32,
        "profile": "synthetic/JOINT",
        "layout": "HND",
    }
    assert found.expected_factors("decode") == {
        "model": "test",
        "blockTokens": 16,
        "profile": "synthetic/JOINT",
        "layout": "NHD",
    }


def test_a_missing_plan(tmp_path: Path) -> None:
    error = refusal(lambda: load_plan(tmp_path / "plan.json", None))
    assert error.code == "PlanMissing"
    assert str(tmp_path / "plan.json") in error.message
    assert refusal(lambda: load_plan(tmp_path, None)).code == "PlanMissing"


def test_another_plan_at_the_same_path(plan: wire.Plan, written: Path) -> None:
    wanted = "sha256:" + "0" * 64
    error = refusal(lambda: load_plan(written, wanted))
    assert error.code == "WrongPlan"
    assert wanted in error.message
    assert plan.digest in error.message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", "NotJson"),
        (b"\xff\xfe", "NotJson"),
        (b'{"schema": "disagg.dev/transfer-plan/v1"', "NotJson"),
        (b"[]", "BadSchema"),
        (b"{}", "BadSchema"),
        (b'{"bytes": 1.5}', "NotCanonical"),
    ],
)
def test_what_is_no_plan(tmp_path: Path, text: bytes, code: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(text)
    assert refusal(lambda: load_plan(path, None)).code == code


def test_a_changed_plan_with_its_old_digest(plan: wire.Plan) -> None:
    document = wire.document(plan)
    document["shapes"][0][0]["dst"] += 8
    error = refusal(lambda: check_plan(canonical.dumps(document), None))
    assert error.code == "BadDigest"
    assert plan.digest in error.message


def drop_edge(document: dict[str, Any]) -> None:
    document["edges"].pop()


def shift_copy(document: dict[str, Any]) -> None:
    document["shapes"][0][0]["src"] += 8


def forget_completion(document: dict[str, Any]) -> None:
    document["completions"]["0"].pop()


@pytest.mark.parametrize("damage", [drop_edge, shift_copy, forget_completion])
def test_an_unproven_plan_is_refused_although_its_digest_is_right(
    plan: wire.Plan, reseal: Callable[[dict[str, Any]], bytes], damage: Callable[[dict[str, Any]], None]
) -> None:
    document = wire.document(plan)
    damage(document)
    sealed = reseal(document)
    assert wire.decode(sealed).digest != plan.digest, "the damage must be well-formed"
    assert refusal(lambda: check_plan(sealed, None)).code == "ProofFailed"
