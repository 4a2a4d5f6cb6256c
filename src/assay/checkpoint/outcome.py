"""Everything that one verification finds, and the verdict that follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from assay.checkpoint.gguf.reader import Gguf
from assay.checkpoint.integrity import FileResult
from assay.checkpoint.mtp.examine import MtpReport
from assay.checkpoint.opening import Opened
from assay.checkpoint.options import Options
from assay.checkpoint.quantization.declared import Declared
from assay.checkpoint.quantization.kv import KvCache
from assay.errors import AssayError
from assay.verdict import Finding, Severity, Verdict

NO_HEAD = MtpReport("none", "", 0, 0, None, None)


@dataclass
class Outcome:
    """What the stages have found so far; `report.build` turns it into a Report."""

    source: str
    opened: Opened
    options: Options
    files: list[FileResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unreachable: list[AssayError] = field(default_factory=list)
    mtp: MtpReport | None = None
    declared: Declared | None = None
    cache: KvCache = field(default_factory=lambda: KvCache(None, False, frozenset()))
    ggufs: list[Gguf] = field(default_factory=list)
    expected_from: str | None = None
    tensors: int = 0
    repo: str | None = None
    revision: str | None = None
    hashed_bytes: int = 0
    cached_bytes: int = 0
    scanned_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    advice: dict[str, object] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def head(self) -> MtpReport:
        """The draft head, or the report that there is none."""
        return self.mtp or NO_HEAD

    def add(self, findings: Iterable[Finding]) -> None:
        """More findings."""
        self.findings.extend(findings)

    def verdict(self) -> Verdict:
        """Fail for what does not hold, then error for what could not be examined, then inconclusive."""
        errors = [f for f in self.findings if f.severity is Severity.ERROR]
        if any(f.id != "checkpoint.not_examined" for f in errors):
            return Verdict.FAIL
        if errors or any(e.verdict is Verdict.ERROR for e in self.unreachable):
            return Verdict.ERROR
        if self.unreachable or self.interrupted:
            return Verdict.INCONCLUSIVE
        statuses = {f.status for f in self.files}
        strangers = "extra" in statuses and "verified" not in statuses
        loose = "unverified" in statuses or strangers
        return Verdict.INCONCLUSIVE if loose and not self.options.allow_unverified else Verdict.PASS
