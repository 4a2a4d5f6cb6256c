"""What a diagnosis comes to: the role of each setting, the fault of a baseline, the verdict, the
best command.
"""

from __future__ import annotations

from typing import Any

from assay.serving.command import Setting
from assay.serving.diagnosis import Diagnosis
from assay.verdict import Verdict


def role_of(found: Diagnosis, setting: Setting) -> str:
    """`guilty`, `cannot_run`, `no_effect`, `innocent` or `undecided`."""
    name = setting.name
    if any(name in names for names in found.guilty):
        return "guilty"
    if name in found.cannot_run:
        return "cannot_run"
    seen = found.engaged.get(name)
    if seen is not None and seen.yes is False and not setting.implicit:
        return "no_effect"
    return "innocent" if name in found.acquitted else "undecided"


FAULTS = {
    "checkpoint": "the checkpoint is at fault, not a setting and not the engine",
    "engine": (
        "the engine is at fault, not a setting: transformers computes something else from the same"
        " files"
    ),
    "": "the checkpoint, or the engine, is at fault, not a setting",
}


def fault_of(found: Diagnosis) -> str:
    """What a failing baseline speaks against: `checkpoint`, `engine`, or "" where nothing tells the
    two apart.

    Files that do not hold are the fault. Of files that hold, numbers that transformers computes too
    are the checkpoint's.
    """
    reports = {r.command: r for r in found.checkpoint}
    if "verify" in reports and reports["verify"].verdict is Verdict.FAIL:
        return "checkpoint"
    numbers = reports.get("compare")
    if numbers is None or not found.compared_itself:
        return ""
    grade = numbers.results.get("grade")
    if grade == "INCONCLUSIVE":  # a few windows tell a broken engine from rounding
        grade = numbers.results.get("grade_point")
    return {"ACCEPT": "checkpoint", "MARGINAL": "checkpoint", "REJECT": "engine"}.get(
        str(grade), ""
    )


def verdict_of(found: Diagnosis) -> Verdict:
    """Exit codes: 0 as good as the baseline, 1 a guilty set or a failing baseline, 2 nothing
    launched, 3 undecided.
    """
    if found.guilty or (found.baseline is not None and found.baseline.state == "bad"):
        return Verdict.FAIL
    if found.failed and found.baseline is None:
        return Verdict.ERROR
    if found.given_state == "good" and not found.cannot_run:
        return Verdict.PASS
    return Verdict.INCONCLUSIVE


def best_of(found: Diagnosis) -> dict[str, Any] | None:
    """The rung with most settings, or one that is faster beyond doubt and by more than `--slower`.

    One stream is timed: settings for many streams at once gain nothing there, and are not dropped
    for a trifle.
    """
    if not found.rungs:
        return None
    rungs = [(c, o.speed) for c, o in found.rungs]
    configuration, speed = max(rungs, key=lambda r: len(r[0]))
    for other, theirs in rungs:
        if (
            theirs
            and speed
            and theirs.lo > speed.hi
            and (1 - found.options.slower) * theirs.value > speed.value
        ):
            configuration, speed = other, theirs
    return {
        "command": found.command.text(configuration),
        "settings": sorted(configuration),
        "tokens_per_s": (
            None if speed is None else {"value": speed.value, "lo": speed.lo, "hi": speed.hi}
        ),
    }
