"""Which workloads and plans go: exact cases, and laws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg_operator.observed import PublishedPlan, Workload
from disagg_operator.rollout import KEPT_PLANS, is_ready, leaving_plans, leaving_workloads


def workload(
    role: str, revision: str, ready: int = 0, desired: int = 1, created: str = "1", current: bool = True
) -> Workload:
    return Workload(
        f"{role}-{revision}", role, revision, f"plan-{revision}", desired, ready, current, "", created, None
    )


def pair(revision: str, prefill: int, decode: int, created: str) -> list[Workload]:
    return [
        workload("prefill", revision, prefill, created=created),
        workload("decode", revision, decode, created=created),
    ]


@pytest.mark.parametrize(
    ("workloads", "leaving"),
    [
        # (workloads, names that go) with current revision "c"
        ([], ()),
        (pair("c", 0, 0, "2"), ()),
        ([*pair("a", 1, 1, "1"), *pair("c", 0, 0, "2")], ()),
        ([*pair("a", 1, 1, "1"), *pair("c", 1, 0, "2")], ()),
        ([*pair("a", 1, 1, "1"), *pair("c", 1, 1, "2")], ("decode-a", "prefill-a")),
        # A revision that never served goes at once, one that serves stays.
        ([*pair("a", 1, 1, "1"), *pair("b", 1, 0, "2"), *pair("c", 0, 0, "3")], ("decode-b", "prefill-b")),
        # Of two that serve the newer stays.
        ([*pair("a", 1, 1, "1"), *pair("b", 1, 1, "2"), *pair("c", 0, 0, "3")], ("decode-a", "prefill-a")),
        # The current revision has one role only as yet: it is not ready, whatever that role's replicas are.
        ([*pair("a", 1, 1, "1"), workload("prefill", "c", 1)], ()),
        # Its controller has not seen the last change: what it says is of before.
        ([*pair("a", 1, 1, "1"), workload("prefill", "c", 1), workload("decode", "c", 1, current=False)], ()),
    ],
)
def test_leaving_workloads(workloads: list[Workload], leaving: tuple[str, ...]) -> None:
    assert leaving_workloads(workloads, "c") == leaving


workloads = st.lists(
    st.builds(
        workload,
        role=st.sampled_from(["prefill", "decode"]),
        revision=st.sampled_from("abcd"),
        ready=st.integers(0, 3),
        desired=st.integers(0, 3),
        created=st.sampled_from("123"),
        current=st.booleans(),
    ),
    unique_by=lambda one: one.name,
)


@given(workloads)
def test_the_current_revision_never_goes_and_what_serves_never_goes_for_nothing(found: list[Workload]) -> None:
    leaving = set(leaving_workloads(found, "c"))
    left = [one for one in found if one.name not in leaving]
    assert all(one in left for one in found if one.revision == "c")
    current = [one for one in found if one.revision == "c"]
    serving = {one.revision for one in found if one.revision != "c"} - {
        one.revision for one in left if one.revision != "c"
    }
    if serving and not is_ready(current):
        # Something old went although the new is not ready: then either it did not serve, or another that does stays.
        for revision in serving:
            roles = {one.role for one in found if one.revision == revision and one.ready > 0}
            assert roles != {"prefill", "decode"} or any(one.revision != "c" for one in left)
    assert set(leaving_workloads(left, "c")) == set(), "deciding again takes nothing more"


def plans(count: int) -> list[PublishedPlan]:
    return [PublishedPlan(f"plan-{index}", "", "", f"2026-01-0{index}") for index in range(1, count + 1)]


@pytest.mark.parametrize(
    ("count", "used", "leaving"),
    [
        (3, {"plan-3"}, ()),
        (5, {"plan-5"}, ("plan-1", "plan-2")),
        (5, {"plan-1", "plan-5"}, ("plan-2", "plan-3")),
        (5, {"plan-1", "plan-2", "plan-3", "plan-5"}, ("plan-4",)),
        (4, {"plan-9"}, ("plan-1", "plan-2")),
    ],
)
def test_leaving_plans(count: int, used: set[str], leaving: tuple[str, ...]) -> None:
    assert leaving_plans(plans(count), used) == leaving


@given(st.integers(0, 9), st.sets(st.integers(1, 9)))
def test_no_used_plan_goes(count: int, used: set[int]) -> None:
    names = {f"plan-{index}" for index in used}
    leaving = set(leaving_plans(plans(count), names))
    assert not leaving & names
    assert len({plan.name for plan in plans(count)} - leaving) <= max(KEPT_PLANS, len(names))
