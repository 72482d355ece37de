"""Loading the plan that this pod executes, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from disagg_agent.errors import PlanRefused
from disagg_plan import wire
from disagg_plan.errors import PlanError
from disagg_plan.proof import prove
from disagg_plan.wire import Plan


@dataclass(frozen=True)
class LoadedPlan:
    """A proven plan and its exact bytes.

    Attributes:
        text: what engines are given, byte for byte what was published.
        sources: for each decode rank, the prefill ranks that it reads, ascending.
        tells: for each decode rank, the prefill ranks that wait for its completion, ascending.
    """

    plan: Plan
    text: bytes
    sources: tuple[tuple[int, ...], ...]
    tells: tuple[tuple[int, ...], ...]

    def side(self, role: str) -> wire.Side:
        """The replica of a role."""
        return self.plan.source if role == "prefill" else self.plan.destination

    def expected_factors(self, role: str) -> dict[str, object]:
        """Compatibility factors that an engine rank of a role must report, flattened."""
        factors = {
            key: value for key, value in self.plan.compat.factors.items() if key not in ("prefill", "decode", "groups")
        }
        factors.pop("protocol", None)
        factors.update(self.plan.compat.factors.get(role, {}))
        return factors


def load_plan(path: Path, digest: str | None) -> LoadedPlan:
    """Read, check and prove a plan file.

    Args:
        digest: the digest that the pod was rendered with; another plan at the same path is refused.

    Raises:
        PlanRefused: `PlanMissing`, `WrongPlan`, or the code of what the plan room found.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PlanRefused("PlanMissing", f"cannot read the plan {path}: {error.strerror}") from error
    return check_plan(text, digest)


def check_plan(text: bytes, digest: str | None) -> LoadedPlan:
    """As `load_plan`, for bytes at hand."""
    try:
        plan = wire.decode(text)
        prove(plan)
    except PlanError as error:
        raise PlanRefused(error.code, error.message) from error
    if digest is not None and plan.digest != digest:
        raise PlanRefused("WrongPlan", f"the pod was rendered for plan {digest}, the file holds {plan.digest}")
    ranks = range(len(plan.destination.ranks))
    return LoadedPlan(
        plan=plan,
        text=text,
        sources=tuple(tuple(sorted(edge.source for edge in plan.edges if edge.destination == rank)) for rank in ranks),
        tells=tuple(
            tuple(sorted(int(source) for source, told in plan.completions.items() if rank in told)) for rank in ranks
        ),
    )
