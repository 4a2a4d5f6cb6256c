"""The time of a comparison: how much of the plan fits, what each stage took, what was left out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from assay.deadline import OVERRUN, limit
from assay.errors import AssayError
from assay.progress import Progress, span
from assay.stats.resolution import MIN_WINDOWS
from assay.verdict import Finding, Severity, Verdict

LEAST_LENGTH = 128
"""Tokens of a passage: a shorter one shows next to nothing of a context."""


WANTED_WINDOWS = 16
"""Passages are shortened before there are fewer of them than this."""


RESERVE = 0.1
"""Share of the budget that is kept for the statistics and the report, and for what takes longer
than expected.
"""


@dataclass
class Budget:
    """A clock over the stages of one run. `seconds` is None where the time is not limited."""

    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)
    expected: dict[str, float] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)
    """What was not measured: `what`, and what the verdict can therefore not say (`unknown`)."""
    too_small: bool = False
    """Whether nothing could be measured in the time."""
    _piece_ended: float | None = None

    @classmethod
    def of(cls, minutes: float | None, quick: bool, quick_minutes: float) -> Budget:
        """The budget that the options `--budget` and `--quick` name."""
        minutes = minutes if minutes is not None else quick_minutes if quick else None
        return cls(None if minutes is None else 60 * minutes)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def left(self) -> float:
        """Seconds that may still be measured in; infinite without a limit."""
        return float("inf") if self.seconds is None else self.seconds * (1 - RESERVE) - self.spent

    def ends_before_next(self) -> bool:
        """Whether no time is left for one more piece of work that takes as long as the last one.

        To be asked after every piece.
        """
        now, before = time.monotonic(), self._piece_ended
        self._piece_ended = now
        if self.seconds is None:
            return False
        last = 0.0 if before is None else now - before
        return self.left() <= 0 or self.spent + last > self.seconds * (1 + OVERRUN)

    def limit(self) -> AbstractContextManager[None]:
        """Around what measures: it is cut off when the budget is overrun."""
        if self.seconds is None:
            return nullcontext()
        return limit(self.seconds * (1 + OVERRUN) - self.spent)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of what is done inside as that of a stage."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.took[name] = self.took.get(name, 0.0) + time.monotonic() - began

    def leave_out(self, what: str, unknown: str) -> None:
        """Note what is not measured, once."""
        if all(item["what"] != what for item in self.left_out):
            self.left_out.append({"what": what, "unknown": unknown})

    def nothing_fits(self, needed: str) -> OutOfTime:
        """The error for a budget in which nothing can be answered; `needed` says what the least
        would take.
        """
        self.too_small = True
        self.leave_out(needed, "anything: nothing was compared")
        return OutOfTime(
            self.findings()[0].title,
            finding_id="fidelity.budget",
            remedy="give it more time: --budget MINUTES",
        )

    def size(
        self,
        a_token: float,
        windows: int,
        length: int,
        *,
        opening: float = 0.0,
        share: float = 1.0,
        least: int = LEAST_LENGTH,
    ) -> tuple[int, int]:
        """(windows, length) of what fits, where a token costs `a_token` seconds on all sides
        together.

        `opening` are the seconds in which further engines are opened, `share` is that of the time,
        `least` the shortest passage. OutOfTime where not even the least fits.
        """
        found = size_for(share * (self.left() - opening), a_token, windows, length, least)
        if found is None:
            few, short = min(MIN_WINDOWS, windows), min(length, least)
            needed, there = (
                span(opening + a_token * short * few),
                span(max(0.0, share * (self.left() - opening) + opening)),
            )
            raise self.nothing_fits(
                f"{few} passages of {short} tokens take about {needed} on all sides, and {there}"
                " are left for them"
            )
        return found

    def together(self, window_seconds: float) -> int:
        """How many windows run together, so that the clock is looked at often enough: 8 at most."""
        return max(1, min(8, int(0.06 * (self.seconds or 0) / max(window_seconds, 1e-9))))

    def note_size(self, wanted: tuple[int, int], fitting: tuple[int, int]) -> None:
        """Note that (windows, length) were cut to what fits."""
        (windows, length), (some, short) = wanted, fitting
        if short < length:
            self.leave_out(
                f"contexts beyond {short:,} tokens",
                f"what happens in contexts of more than {short:,} tokens",
            )
        if some < windows:
            self.leave_out(
                f"{windows - some} of {windows} passages",
                "differences that fewer passages cannot resolve",
            )

    def tell(self, expected: Mapping[str, float], progress: Progress) -> None:
        """Print the expected time of every stage and of all, and what is left out."""
        self.expected = dict(expected)
        stages = ", ".join(f"{name} {span(seconds)}" for name, seconds in self.expected.items())
        without = (
            "; left out: " + ", ".join(item["what"] for item in self.left_out)
            if self.left_out
            else ""
        )
        total = self.spent + sum(self.expected.values())
        with progress(f"expected: about {span(total)} in all ({stages}){without}", 0):
            pass

    def affords(self, what: str, unknown: str, seconds: float) -> bool:
        """Whether there is time for something that takes so many seconds; what is not afforded is
        noted.
        """
        if seconds <= self.left():
            return True
        self.leave_out(what, unknown)
        return False

    def findings(self) -> list[Finding]:
        """What the budget left out, and what the verdict can therefore not say."""
        if not self.left_out or self.seconds is None:
            return []
        what = ", ".join(item["what"] for item in self.left_out)
        if self.too_small:
            title = f"a budget of {span(self.seconds)} is too small for any answer: {what}"
        else:
            title = f"the budget of {span(self.seconds)} left out {what}"
        unknown = "; ".join(dict.fromkeys(item["unknown"] for item in self.left_out))
        return [
            Finding(
                "fidelity.budget",
                Severity.WARNING if self.too_small else Severity.INFO,
                title,
                f"The verdict does not say: {unknown}.",
                evidence={
                    "budget_s": self.seconds,
                    "left_out": [item["what"] for item in self.left_out],
                },
                remedies=("give it more time: --budget MINUTES",),
            )
        ]

    def results(self) -> dict[str, Any]:
        """`results.times`, where the time is limited: other runs give the same results again."""
        return {} if self.seconds is None else {"times": self.to_json()}

    def to_json(self) -> dict[str, Any]:
        """What was expected, what it took, and what was left out."""
        return {
            "seconds": self.spent,
            "budget_s": self.seconds,
            "expected_s": self.expected,
            "stages_s": self.took,
            "left_out": self.left_out,
        }


def size_for(
    seconds: float, a_token: float, windows: int, length: int, least: int = LEAST_LENGTH
) -> tuple[int, int] | None:
    """(windows, length) of what fits into `seconds` where one token of a window costs `a_token` on
    all sides together.

    Passages are halved while fewer than 16 of them fit. None where 8 of the shortest do not fit.
    """
    shortest = min(length, least)
    while True:
        fit = min(windows, int(seconds / (a_token * length))) if seconds > 0 else 0
        if fit >= min(windows, WANTED_WINDOWS) or length // 2 < shortest:
            return (fit, length) if fit >= min(MIN_WINDOWS, windows) else None
        length //= 2


class OutOfTime(AssayError):
    """The budget is too small for any answer."""

    verdict = Verdict.INCONCLUSIVE

    def to_finding(self) -> Finding:
        """A warning: nothing is wrong with the subject."""
        return replace(super().to_finding(), severity=Severity.WARNING)
