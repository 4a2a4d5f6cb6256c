"""The one family of errors that a user may see.

Each carries the finding it becomes: an id, one clear line (what was wrong, where), and what to do.
Everything else that escapes a verb is a bug in assay (exit code 70).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.verdict import Finding, Severity, Verdict


class AssayError(Exception):
    """The subject could not be examined; the verb ends with the verdict `error` (exit code 2).

    `message` is one line: what was wrong and where. `remedy` says what to do about it.
    """

    verdict = Verdict.ERROR

    def __init__(
        self,
        message: str,
        *,
        finding_id: str,
        remedy: str = "",
        evidence: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.finding_id = finding_id
        self.remedy = remedy
        self.evidence = dict(evidence or {})

    def to_finding(self) -> Finding:
        """The finding that a report shows for this error."""
        return Finding(
            id=self.finding_id,
            severity=Severity.ERROR if self.verdict is Verdict.ERROR else Severity.WARNING,
            title=self.message,
            evidence=self.evidence,
            remedies=(self.remedy,) if self.remedy else (),
        )


class UsageError(AssayError):
    """The command line or a plan asks for something that makes no sense."""

    def __init__(self, message: str, *, remedy: str = "", finding_id: str = "server.usage") -> None:
        super().__init__(message, finding_id=finding_id, remedy=remedy)


class InconclusiveError(AssayError):
    """The subject was examined, but the evidence is too thin to judge (exit code 3)."""

    verdict = Verdict.INCONCLUSIVE
