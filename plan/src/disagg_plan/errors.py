"""Typed failures of the plan room.

Every error carries a stable `code` for machines and, for people, a message that holds the numbers. A
`Refusal` additionally names the field of the declared deployment and the way out of it.
"""

from __future__ import annotations


class PlanError(Exception):
    """Base of every error that `disagg_plan` raises on purpose.

    Args:
        code: stable CamelCase name, usable as a Kubernetes condition reason.
        message: one sentence with the offending values.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Refusal(PlanError):
    """The declared deployment cannot work; no plan exists for it.

    Args:
        field: path of the field that is wrong, as written in the custom resource.
        remedy: what to change, with values that would work.
    """

    def __init__(self, code: str, field: str, message: str, remedy: str) -> None:
        super().__init__(code, message)
        self.field = field
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field}: {self.message}. {self.remedy}"


class FormatError(PlanError):
    """A document is not a `disagg.dev/transfer-plan/v1` plan, or its digest does not match its content."""


class ProofError(PlanError):
    """A well-formed plan would move wrong bytes, miss bytes, or leave a rank waiting.

    Args:
        findings: every violation found, first one first; bounded by the prover.
    """

    def __init__(self, findings: list[str]) -> None:
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        super().__init__("ProofFailed", f"{findings[0]}{more}")
        self.findings = findings


class RequestError(PlanError):
    """A request's pages or tokens cannot be paired under the plan; nothing may be moved for it."""
