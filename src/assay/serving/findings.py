"""The findings of a doctor: guilty settings, a failing baseline, what stayed undecided."""

from __future__ import annotations

from collections.abc import Iterator

from assay.serving.command import UNKNOWN, table_notice
from assay.serving.conclusion import FAULTS, best_of, fault_of
from assay.serving.diagnosis import Diagnosis
from assay.serving.search import starts_needed
from assay.verdict import Finding, Report, Severity, Verdict


def findings_of(found: Diagnosis, verdict: Verdict) -> Iterator[Finding]:
    """Each guilty set, what could not run, a failing baseline, what is undecided, notices."""
    command = found.command
    yield from _guilty_findings(found)
    if found.baseline is not None and found.baseline.state == "bad":
        yield from _checkpoint_findings(found)
    for name, said in found.cannot_run.items():
        yield Finding(
            "server.cannot_run",
            Severity.WARNING,
            f"{name} cannot run here, so it is not judged: {said[:200]}",
            remedies=("try it on a machine with more memory, or read what the engine says",),
            evidence={"said": said},
        )
    for setting in command.settings:
        seen = found.engaged.get(setting.name)
        if seen is not None and seen.yes is False and not setting.implicit:
            yield Finding(
                "server.no_effect",
                Severity.WARNING,
                f"{setting.name} is set and had no effect: {seen.evidence}",
                remedies=("leave it out, or find out why the engine does not take it",),
                evidence={"setting": setting.name},
            )
    given, asked = found.of(found.all), found.options.symptom
    timed = (
        given is None
        or given.observation.speed is not None
        or (bool(asked) and "speed" not in asked)
    )
    if verdict is Verdict.PASS and found.all and not timed:
        title = (
            f"speed was not compared: {found.options.seconds:g} s of questions left no time to time"
            " the given command"
        )
        yield Finding(
            "server.not_examined", Severity.INFO, title, remedies=("give more --seconds",)
        )
    if found.failed:
        severity = Severity.ERROR if verdict is Verdict.ERROR else Severity.WARNING
        yield Finding(
            "server.start_failed" if verdict is Verdict.ERROR else "server.cut_off",
            severity,
            found.failed,
            remedies=("read its log, or raise --start-timeout",),
        )
    yield from found.notices
    yield from _unfinished_findings(found, verdict)
    if notice := table_notice(command, None):
        yield Finding("server.no_table", Severity.INFO, notice)


def _guilty_findings(found: Diagnosis) -> Iterator[Finding]:
    """One for each guilty set."""
    for names in found.guilty:
        accused = [found.setting(n) for n in names]
        shown = " with ".join(f"{s.name} {s.value or ''}".strip() for s in accused)
        says = "; ".join(found.given.bad.values()) if found.given else ""
        slow = found.rules <= {"slower"} and bool(found.rules)
        alone = next(
            (s for s in found.starts if s.configuration == frozenset(names) and s.seen.bad), None
        )
        shows = "; ".join(alone.seen.bad.values()) if alone else ""
        yield Finding(
            "throughput.guilty_setting" if slow else "server.guilty_setting",
            Severity.ERROR,
            f"{shown} breaks it: {says}"[:400],
            detail=f"alone: {shows}"[:400] if shows and shows != says else "",
            evidence={"settings": names, "proven": found.proven, "symptoms": sorted(found.rules)},
            causes=[s.safe.reason for s in accused if s.safe is not UNKNOWN],
            remedies=(f"use now: {_command_without(found)}",),
        )


def _unfinished_findings(found: Diagnosis, verdict: Verdict) -> Iterator[Finding]:
    """What the budget or unclear starts left open."""
    if verdict is Verdict.INCONCLUSIVE:
        yield _undecided(found)
    elif found.out_of_time:
        title = (
            f"the budget of {found.options.budget:g} min is spent: what was not decided is marked"
        )
        yield Finding(
            "server.out_of_time",
            Severity.WARNING,
            title,
            remedies=("run it again: it goes on from here",),
        )
    if found.guilty and not found.proven:
        title = (
            "a smaller set could not be decided: some configurations did not run or stayed unclear"
        )
        yield Finding(
            "server.not_minimal",
            Severity.WARNING,
            title,
            remedies=("run it again with more --budget",),
        )


def _undecided(found: Diagnosis) -> Finding:
    starts = [s for s in found.starts if s.configuration == found.all]
    good, needed = (
        sum(s.seen.state == "good" for s in starts),
        starts_needed(found.options.fault_rate),
    )
    why = (
        f"the given command held in {good} of the {needed} starts that a fault in"
        f" {found.options.fault_rate:.0%} of them asks for"
    )
    if any(s.seen.state == "bad" for s in starts):
        bad = sum(s.seen.state == "bad" for s in starts)
        why = f"the given command was bad in {bad} of {len(starts)} starts, which may be chance"
    elif found.cannot_run:
        why = "settings that cannot run here could not be judged"
    elif not starts:
        failed = next((s.observation.said for s in found.starts if s.observation.failed), "")
        why = (
            f"the baseline did not come up: {failed[:200]}"
            if failed
            else "the given command was not measured"
        )
    reason = "the budget is spent: " if found.out_of_time else ""
    return Finding(
        "server.undecided",
        Severity.WARNING,
        f"undecided: {reason}{why}",
        remedies=(
            "run it again with more --budget: it goes on from here",
            "--fault-rate 1 looks for faults of every start only",
        ),
    )


def _checkpoint_findings(found: Diagnosis) -> Iterator[Finding]:
    says = "; ".join(found.baseline.bad.values()) if found.baseline else ""
    bad = [r for r in found.checkpoint if r.verdict is Verdict.FAIL]
    fault = fault_of(found)
    looked = [_looked(r) for r in found.checkpoint] or ["the checkpoint is not a path here"]
    yield Finding(
        "server.baseline_fails",
        Severity.ERROR,
        f"the baseline itself fails ({says[:200]}): {FAULTS[fault]}",
        detail="; ".join(looked),
        evidence={"examined": [r.command for r in found.checkpoint], "fault": fault or None},
        remedies=(
            (
                "fetch the checkpoint again, and hold its config.json and tokenizer beside the"
                " publisher's"
                if fault == "checkpoint"
                else "see whether the checkpoint is whole: `assay verify CHECKPOINT --values`"
            ),
            (
                "see whether the engine computes what transformers does: `assay compare"
                " hf:CHECKPOINT URL`"
            ),
        ),
    )
    for report in bad:
        if report.command != "compare" or fault != "checkpoint":
            yield from (f for f in report.findings if f.severity is Severity.ERROR)


def _looked(report: Report) -> str:
    """One examination of a failing baseline, in a few words."""
    if report.command != "compare" or "grade" not in report.results:
        return f"assay {report.command}: {report.verdict.value}"
    loss = report.results.get("dppl_pct") or {}
    said = f", perplexity {loss['value']:+.2g} %" if loss.get("value") is not None else ""
    return f"assay compare with transformers: {report.results['grade']}{said}"


def _command_without(found: Diagnosis) -> str:
    best = best_of(found)
    if best is not None:
        return str(best["command"])
    return found.command.text(found.all - {n for names in found.guilty for n in names})
