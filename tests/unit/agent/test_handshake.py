"""What two agents compare before they exchange a byte."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg_agent.cards import RankCard
from disagg_agent.errors import PeerRefused
from disagg_agent.handshake import Address, check_cards, check_hello
from disagg_agent.messages import PROTOCOL, Hello
from disagg_agent.plan_loader import LoadedPlan

replace = msgspec.structs.replace


@pytest.fixture
def ours(kit: Any, loaded: LoadedPlan) -> Hello:
    return kit.hello(loaded, "decode")


@pytest.fixture
def theirs(kit: Any, loaded: LoadedPlan) -> Hello:
    return kit.hello(loaded, "prefill")


def refusal(loaded: LoadedPlan, cards: list[RankCard], own: list[RankCard]) -> PeerRefused:
    with pytest.raises(PeerRefused) as caught:
        check_cards(loaded, "prefill", cards, own)
    return caught.value


def test_equal_greetings_agree_both_ways(ours: Hello, theirs: Hello) -> None:
    check_hello(ours, theirs)
    check_hello(theirs, ours)


def test_replica_pod_and_life_are_free(ours: Hello, theirs: Hello) -> None:
    check_hello(ours, replace(theirs, replica="other", pod="other", incarnation="other"))


@pytest.mark.parametrize(
    ("field", "value", "code", "what"),
    [
        ("protocol", PROTOCOL + 1, "ProtocolMismatch", "protocol"),
        ("plan", "sha256:" + "1" * 64, "PlanMismatch", "plan"),
        ("compat", "sha256:" + "2" * 64, "CompatMismatch", "compat digest"),
    ],
)
def test_a_difference_is_named_with_both_values(
    ours: Hello, theirs: Hello, field: str, value: Any, code: str, what: str
) -> None:
    with pytest.raises(PeerRefused) as caught:
        check_hello(ours, replace(theirs, **{field: value}))
    assert caught.value.code == code
    assert f"has {what} {value}" in caught.value.message
    assert f"has {getattr(ours, field)}" in caught.value.message
    assert "pod-prefill" in caught.value.message
    assert "pod-decode" in caught.value.message


def test_the_protocol_is_compared_before_anything_that_it_defines(ours: Hello, theirs: Hello) -> None:
    with pytest.raises(PeerRefused) as caught:
        check_hello(ours, replace(theirs, protocol=7, plan="x", compat="y", role="decode"))
    assert caught.value.code == "ProtocolMismatch"


def test_either_side_knows_who_was_meant(ours: Hello, theirs: Hello) -> None:
    check_hello(replace(ours, expects=theirs.replica), theirs)
    check_hello(ours, replace(theirs, expects=ours.replica))
    for first, second, actual in (
        (replace(ours, expects="other"), theirs, theirs.replica),
        (ours, replace(theirs, expects="other"), ours.replica),
    ):
        with pytest.raises(PeerRefused) as caught:
            check_hello(first, second)
        assert caught.value.code == "WrongReplica"
        assert f"is of replica {actual}, other was expected" in caught.value.message


def test_equal_roles_refuse_each_other(ours: Hello, theirs: Hello) -> None:
    for first, second in ((ours, replace(ours, pod="other")), (theirs, theirs)):
        with pytest.raises(PeerRefused) as caught:
            check_hello(first, second)
        assert caught.value.code == "RoleMismatch"
        assert first.role in caught.value.message


def test_right_cards(kit: Any, loaded: LoadedPlan) -> None:
    cards = [kit.card(loaded, "prefill", rank, pages=9) for rank in (0, 1)]
    own = [kit.card(loaded, "decode", rank, pages=5) for rank in range(4)]
    check_cards(loaded, "prefill", cards, own)
    check_cards(loaded, "prefill", [], own)
    check_cards(loaded, "prefill", cards, [])


def test_a_card_is_compared_with_the_plan(kit: Any, loaded: LoadedPlan) -> None:
    card = kit.card(loaded, "prefill", 1)
    error = refusal(loaded, [replace(card, factors={**card.factors, "model": "other"})], [])
    assert error.code == "CompatMismatch"
    assert "prefill rank 1: model is 'other', the plan has 'test'" in error.message
    assert refusal(loaded, [replace(card, rank=2)], []).code == "UnknownRank"


def test_cards_are_compared_with_each_other(kit: Any, loaded: LoadedPlan) -> None:
    error = refusal(loaded, [kit.card(loaded, "prefill", 0, pages=8), kit.card(loaded, "prefill", 1, pages=9)], [])
    assert error.code == "UnequalPools"
    assert "rank 1 has 9 pages in table attention" in error.message
    assert "8" in error.message


def test_a_rank_is_presented_once(kit: Any, loaded: LoadedPlan) -> None:
    error = refusal(loaded, [kit.card(loaded, "prefill", 0), kit.card(loaded, "prefill", 0)], [])
    assert error.code == "DoubledRank"
    assert "rank 0" in error.message


def test_reported_factors_are_compared_with_our_own_ranks(kit: Any, loaded: LoadedPlan) -> None:
    """Factors that no plan knows, such as a kernel version, matter as soon as both sides report them."""
    card, mine = kit.card(loaded, "prefill", 0), kit.card(loaded, "decode", 2)
    same = replace(card, factors={**card.factors, "kernel": "a"})
    check_cards(loaded, "prefill", [same], [replace(mine, factors={**mine.factors, "kernel": "a"})])
    check_cards(loaded, "prefill", [same], [mine])
    check_cards(loaded, "prefill", [card], [replace(mine, factors={**mine.factors, "kernel": "b"})])
    error = refusal(loaded, [same], [mine, replace(mine, rank=3, factors={**mine.factors, "kernel": "b"})])
    assert error.code == "CompatMismatch"
    assert "prefill rank 0: kernel is 'a', our rank 3 has 'b'" in error.message


def test_factors_of_a_side_may_differ_between_sides(kit: Any, build: Any) -> None:
    plan = kit.load(
        build.deployment(build.heads(2), 1, 1, prefill_options={"block": 32}, decode_options={"layout": "NHD"}).plan()
    )
    check_cards(plan, "prefill", [kit.card(plan, "prefill")], [kit.card(plan, "decode")])


def test_pools_of_stages_with_different_tables_do_not_meet(kit: Any, build: Any, two_tables: Any) -> None:
    plan = kit.load(build.deployment(two_tables, (1, 2), 1).plan())
    cards = [kit.card(plan, "prefill", 0, pages={"full": 3}), kit.card(plan, "prefill", 1, pages={"window": 8})]
    check_cards(plan, "prefill", cards, [])


@pytest.mark.parametrize(
    ("host", "text"), [("10.0.0.1", "10.0.0.1:7"), ("fd00::1", "[fd00::1]:7"), ("pod.svc", "pod.svc:7")]
)
def test_addresses_as_text(host: str, text: str) -> None:
    assert str(Address(host, 7)) == text
