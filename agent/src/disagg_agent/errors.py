"""Typed failures of the agent.

Each carries a stable `code`: it is what metrics count by, what a peer or an engine receives, and what tests compare.
"""

from __future__ import annotations

MAX_TEXT = 4096
"""Longest message of an error: it must fit into a frame, whatever a peer made us quote."""


class AgentError(Exception):
    """Base of every error that the agent raises on purpose; `code` is CamelCase and stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message[:MAX_TEXT])
        self.code = code
        self.message = message[:MAX_TEXT]

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class PlanRefused(AgentError):
    """The plan file is missing, malformed, unproven, or not the one that was asked for."""


class RegistrationRefused(AgentError):
    """What an engine rank registers differs from the plan."""


class PeerRefused(AgentError):
    """A peer speaks another protocol, follows another plan, or reported other compatibility factors."""


class FrameError(AgentError):
    """Bytes on a socket are not a frame of the protocol."""


class MoverError(AgentError):
    """NIXL could not do what a mover asked of it."""
