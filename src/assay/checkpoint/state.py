"""What the stages of one verification have found so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from assay.checkpoint.declared import Declared
from assay.checkpoint.gguf.header import Gguf
from assay.checkpoint.kv_cache import KvCache
from assay.checkpoint.mtp import MtpReport
from assay.checkpoint.opening import Opened
from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.trusted import FileResult
from assay.errors import AssayError
from assay.verdict import Finding, Severity, Verdict

NO_HEAD = MtpReport("none", "", 0, 0, None, None)


@dataclass
class CheckedFiles:
    """What became of the files, and the revision that they were compared with."""

    results: list[FileResult] = field(default_factory=list)
    repo: str | None = None
    revision: str | None = None
    written: int = 0
    """Files in the manifest that was written."""
    hashed_bytes: int = 0
    cached_bytes: int = 0


@dataclass
class StoredTensors:
    """What headers and declarations say of the tensors."""

    mtp: MtpReport | None = None
    declared: Declared | None = None
    cache: KvCache = field(default_factory=lambda: KvCache(None, False, frozenset()))
    ggufs: list[Gguf] = field(default_factory=list)
    expected_from: str | None = None
    """Source of the list of promised tensors, None without a list."""
    count: int = 0

    @property
    def head(self) -> MtpReport:
        """The draft head, or the report that there is none."""
        return self.mtp or NO_HEAD


@dataclass
class VerifyState:
    """What the stages have found so far; `report.build_report` turns it into a Report."""

    source: str
    opened: Opened
    options: VerifyOptions
    findings: list[Finding] = field(default_factory=list)
    unreachable: list[AssayError] = field(default_factory=list)
    files: CheckedFiles = field(default_factory=CheckedFiles)
    stored: StoredTensors = field(default_factory=StoredTensors)
    scanned_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    advice: dict[str, object] = field(default_factory=dict)
    interrupted: bool = False

    def add(self, findings: Iterable[Finding]) -> None:
        """More findings."""
        self.findings.extend(findings)

    def verdict(self) -> Verdict:
        """Fail for what does not hold, then error for what could not be examined, then
        inconclusive.
        """
        errors = [f for f in self.findings if f.severity is Severity.ERROR]
        if any(f.id != "checkpoint.not_examined" for f in errors):
            return Verdict.FAIL
        if errors or any(e.verdict is Verdict.ERROR for e in self.unreachable):
            return Verdict.ERROR
        if self.unreachable or self.interrupted:
            return Verdict.INCONCLUSIVE
        if any(f.evidence.get("decisive") for f in self.findings):
            return Verdict.INCONCLUSIVE  # what was not compared with anything cannot pass
        if self.options.allow_unverified:
            return Verdict.PASS
        if any(f.evidence.get("unexamined") for f in self.findings):
            return Verdict.INCONCLUSIVE
        statuses = {f.status for f in self.files.results}
        strangers = "extra" in statuses and "verified" not in statuses
        return (
            Verdict.INCONCLUSIVE
            if held(self.options) and ("unverified" in statuses or strangers)
            else Verdict.PASS
        )


def held(options: VerifyOptions) -> bool:
    """Whether files are compared with digests: a run that only writes a manifest compares none."""
    return bool(options.repo or options.manifest or not options.write_manifest)
