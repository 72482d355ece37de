"""Violations found while a plan is proven, bounded, and the one way in which proving ends early."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from disagg_plan.errors import ProofError

_MOST = 50


@dataclass
class Findings:
    """Violations in the order in which they were found."""

    messages: list[str] = field(default_factory=list)

    def add(self, message: str) -> None:
        """One more; ends the proof when there are enough to show.

        Raises:
            ProofError: the bound is reached.
        """
        self.messages.append(message)
        if len(self.messages) >= _MOST:
            raise ProofError(self.messages)

    def fatal(self, message: str) -> NoReturn:
        """One that leaves nothing to go on with.

        Raises:
            ProofError: always.
        """
        self.messages.append(message)
        raise ProofError(self.messages)

    def stop_if_any(self) -> None:
        """End the proof if later checks would only stumble over what was found.

        Raises:
            ProofError: there are findings.
        """
        if self.messages:
            raise ProofError(self.messages)
