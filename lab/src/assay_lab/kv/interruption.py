"""A command that was cut short, and what it can still say."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from assay.engines.threads import interrupt_run
from assay.errors import AssayError
from assay.fidelity.budget import Budget
from assay.verdict import Finding, Severity, Verdict


class Unfinished:
    """Whether a command was cut short: by Ctrl-C, or by an error once `measured` says that there is
    something to show.

    Used as a context manager around what measures; what is after it reports what there is.
    """

    def __init__(self, measured: Callable[[], Any], budget: Budget | None = None) -> None:
        """`budget` cuts off what measures when it is overrun."""
        self._measured = measured
        self._limit = (budget or Budget()).limit()
        self.interrupted = False
        self.error: AssayError | None = None

    def __enter__(self) -> Unfinished:
        self._limit.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        with suppress(BaseException):  # the limit itself raises what came through it
            self._limit.__exit__(kind, error, trace)
        if isinstance(error, KeyboardInterrupt):
            self.interrupted = True
        elif isinstance(error, AssayError) and self._measured():
            self.error = error
        if self:
            interrupt_run()
        return self.interrupted or self.error is not None

    def __bool__(self) -> bool:
        return self.interrupted or self.error is not None

    def verdict(self, whole: Verdict) -> Verdict:
        """The verdict of what there is: what was cut short cannot pass."""
        if self.error:
            return whole if whole is Verdict.FAIL else self.error.verdict
        return Verdict.INCONCLUSIVE if self.interrupted and whole is Verdict.PASS else whole

    def findings(self, area: str = "kv") -> list[Finding]:
        """Why there is no more."""
        if self.error:
            return [self.error.to_finding()]
        if not self.interrupted:
            return []
        text = "interrupted: what was scored is kept, the same command goes on from there"
        return [Finding(f"{area}.interrupted", Severity.INFO, text)]
