"""What two agents compare before they exchange a byte: pure functions over their first messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from disagg_agent.cards import RankCard
from disagg_agent.errors import PeerRefused, RegistrationRefused
from disagg_agent.messages import Hello
from disagg_agent.plan_loader import LoadedPlan
from disagg_agent.registry import check_card, check_factors


@dataclass(frozen=True)
class Address:
    """Where an agent's side channel listens. IPv6 literals are written bare here and bracketed in text."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def check_hello(ours: Hello, theirs: Hello) -> None:
    """Compare greetings.

    Raises:
        PeerRefused: `ProtocolMismatch`, `PlanMismatch`, `CompatMismatch`, `RoleMismatch` or `WrongReplica`, with both
            values.
    """
    who = f"{theirs.role} pod {theirs.pod}"
    for code, what, own, other in (
        ("ProtocolMismatch", "protocol", ours.protocol, theirs.protocol),
        ("PlanMismatch", "plan", ours.plan, theirs.plan),
        ("CompatMismatch", "compat digest", ours.compat, theirs.compat),
    ):
        if own != other:
            raise PeerRefused(code, f"{who} has {what} {other}, this {ours.role} pod {ours.pod} has {own}")
    if ours.role == theirs.role:
        raise PeerRefused("RoleMismatch", f"{who} is {theirs.role}, and so is this pod")
    # Judged by both sides: a connection that was never meant for us must not replace one that was.
    for expected, replica, whose in ((ours.expects, theirs.replica, who), (theirs.expects, ours.replica, "this pod")):
        if expected and expected != replica:
            raise PeerRefused("WrongReplica", f"{whose} is of replica {replica}, {expected} was expected")


def check_cards(loaded: LoadedPlan, role: str, cards: list[RankCard], own: list[RankCard]) -> None:
    """Judge the ranks that a peer presents: against the plan, against each other, and against our own ranks.

    The plan's factors say what was declared; the reported ones say what runs. Both sides' reports are compared directly
    too, for factors that the plan does not know.

    Raises:
        PeerRefused: with the code and both values of the first difference.
    """
    shared = set(loaded.expected_factors("prefill")) - {"blockTokens", "profile", "layout"}
    pools: dict[str, int] = {}
    for rank, count in Counter(card.rank for card in cards).items():
        if count > 1:
            raise PeerRefused("DoubledRank", f"{role} rank {rank} is presented {count} times")
    try:
        for card in cards:
            pool = check_card(loaded, role, card)
            for table, pages in pool.pages.items():
                if pools.setdefault(table, pages) != pages:
                    raise RegistrationRefused(
                        "UnequalPools",
                        f"{role} rank {card.rank} has {pages} pages in table {table}, another rank of its "
                        f"replica {pools[table]}",
                    )
            for mine in own:
                ours = {name: mine.factors[name] for name in sorted(set(mine.factors) & (shared | set(card.factors)))}
                for side_specific in ("blockTokens", "profile", "layout"):
                    ours.pop(side_specific, None)
                check_factors(ours, card.factors, f"{role} rank {card.rank}", f"our rank {mine.rank}")
    except RegistrationRefused as error:
        raise PeerRefused(error.code, error.message) from error
