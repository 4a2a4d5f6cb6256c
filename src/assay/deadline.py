"""The hard end of a budget: what is measured then is cut off as by Ctrl-C, and judged as it is.

Stages plan by the time that is left, and look at the clock between two pieces of work. A piece may
take longer than any plan: a server that stalls, an engine that another program slows down. On the
command line `limit` then ends it. A process that uses assay as a library keeps its signals: nothing
is cut off there.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from assay.signals import is_listening
from assay.verdict import Finding, Report, Severity

OVERRUN = 0.03
"""Share of a budget by which measuring may overrun it before it is cut off; the report takes more.
"""
_SOONEST_S = 1e-3


class _State:
    ran_out = False
    """Whether a limit has cut off what was measured, since the last report."""


def _cut_off(sign: int, frame: FrameType | None) -> None:
    _State.ran_out = True
    raise KeyboardInterrupt


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Cut off what runs inside after `seconds`, by a KeyboardInterrupt; of two limits the sooner.

    Nothing is cut off in a process that does not listen to signals (`assay.signals.listen`), nor in
    another thread than its main one.
    """
    if not math.isfinite(seconds) or not is_listening():
        yield
        return
    before = signal.signal(signal.SIGALRM, _cut_off)
    began = time.monotonic()
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, max(_SOONEST_S, min(seconds, left or math.inf)))
    try:
        yield
    finally:
        rest = max(_SOONEST_S, left - (time.monotonic() - began)) if left else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, rest)


def settled(report: Report) -> Report:
    """The report of a run that a limit cut off: its time was up, no user interrupted it."""
    ran_out, _State.ran_out = _State.ran_out, False
    if not (ran_out and report.interrupted):
        return report
    area = next((f.id.partition(".")[0] for f in report.findings), "server")
    finding = Finding(
        f"{area}.out_of_time",
        Severity.WARNING,
        "the time was up in the middle of a stage: the verdict is about what was measured by then",
        remedies=("give it more time: --budget MINUTES",),
    )
    kept = (f for f in report.findings if not f.id.endswith(".interrupted"))
    return replace(report, interrupted=False, findings=(finding, *kept))
