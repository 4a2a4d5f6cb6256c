"""The report of a doctor: the guilty set, each setting's role, the starts, the ladder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from assay.environment import describe
from assay.serving.command import Setting
from assay.serving.conclusion import FAULTS, best_of, fault_of, role_of, verdict_of
from assay.serving.diagnosis import Diagnosis, Start
from assay.serving.findings import findings_of
from assay.serving.issue import issue_text
from assay.serving.search import exhaustive
from assay.verdict import Chart, Metric, Point, Quote, Report, Series, Table, Verdict

_ROLE_ORDER = ("guilty", "cannot_run", "no_effect", "undecided", "innocent")


def build_report(found: Diagnosis) -> Report:
    """The report of a diagnosis."""
    verdict = verdict_of(found)
    command, everything = found.command, found.all | frozenset(found.cannot_run)
    settings = [_setting_json(found, s) for s in command.settings]
    best = best_of(found)
    results: dict[str, Any] = {
        "engine": command.engine,
        "baseline": {"command": command.text(frozenset()), "verdict": _side(found.baseline)},
        "given": {"command": command.text(everything), "verdict": _given(found, verdict)},
        "settings": settings,
        "guilty": [name for names in found.guilty for name in names],
        "guilty_sets": found.guilty,
        "proven": found.proven and bool(found.guilty),
        "symptoms": sorted(found.rules),
        "best": best,
        "ladder": [_rung(found, c, o) for c, o in found.rungs],
        "starts": [_start_json(s) for s in found.starts],
        "launches": found.launches,
        "launches_exhaustive": exhaustive(len(command.settings)),
        "minutes": found.seconds / 60,
        "fault": fault_of(found) or None,
        "out_of_time": found.out_of_time,
        "kept_in_baseline": found.kept_safe,
        "error_rate": 0.05,
        "fault_rate": found.options.fault_rate,
        "issue": issue_text(found),
    }
    return Report(
        command="doctor",
        verdict=verdict,
        subject={"command": command.text(everything)},
        findings=tuple(findings_of(found, verdict)),
        results=results,
        environment=describe(),
        headline=_headline(found, best),
        blocks=tuple(_blocks(found)),
        interrupted=found.interrupted,
        summary=_summary(found, verdict),
    )


def _side(seen: Any) -> str | None:
    return None if seen is None else {"good": "pass", "bad": "fail"}.get(seen.state, "inconclusive")


def _given(found: Diagnosis, verdict: Verdict) -> str | None:
    if found.given is None:
        return None
    return {"bad": "fail", "good": "pass"}.get(found.given_state, "inconclusive")


def _setting_json(found: Diagnosis, setting: Setting) -> dict[str, Any]:
    seen = found.engaged.get(setting.name)
    return {
        "name": setting.name,
        "value": setting.value,
        "safe_value": setting.safe_value,
        "role": role_of(found, setting),
        "engaged": seen.yes if seen else None,
        "evidence": found.cannot_run.get(setting.name) or (seen.evidence if seen else None),
        "reason": setting.safe.reason,
    }


def _rung(found: Diagnosis, configuration: Any, observation: Any) -> dict[str, Any]:
    speed = observation.speed
    return {
        "settings": sorted(configuration),
        "command": found.command.text(configuration),
        "tokens_per_s": (
            None if speed is None else {"value": speed.value, "lo": speed.lo, "hi": speed.hi}
        ),
    }


def _start_json(start: Start) -> dict[str, Any]:
    seen = start.observation
    return {
        "settings": sorted(start.configuration),
        "index": start.index,
        "state": start.seen.state,
        "bad": dict(start.seen.bad),
        "start_s": seen.start_s,
        "measure_s": seen.measure_s,
        "resumed": start.resumed,
        "failed": seen.failed or None,
        "said": seen.said or None,
    }


def _summary(found: Diagnosis, verdict: Verdict) -> str:
    if found.guilty:
        sets = "; and ".join(" with ".join(names) for names in found.guilty)
        return (
            f"{sets}: the command is as bad with it as whole, and as good as the baseline without."
            if found.proven
            else (f"{sets}: guilty as far as it was decided.")
        )
    if verdict is Verdict.FAIL:
        return f"The baseline itself fails: {FAULTS[fault_of(found)]}."
    if verdict is Verdict.PASS:
        good = sum(s.configuration == found.all and s.seen.state == "good" for s in found.starts)
        return (
            f"The given command is as good as the baseline, in {good} of {good} starts."
            if found.all
            else ("The given command is the baseline, and it holds.")
        )
    if found.cannot_run:
        return (
            f"{', '.join(found.cannot_run)} cannot run here; without it the command is"
            f" {_given(found, verdict) or 'not judged'}."
        )
    return ""


def _headline(found: Diagnosis, best: dict[str, Any] | None) -> list[Metric]:
    metrics = []
    if found.guilty:
        metrics.append(Metric("guilty", "; ".join(" + ".join(names) for names in found.guilty)))
    metrics.append(Metric("launches", f"{found.launches} in {found.seconds / 60:.1f} min"))
    if best and best["tokens_per_s"]:
        speed = best["tokens_per_s"]
        metrics.append(
            Metric("best", f"{speed['value']:.3g} tokens/s [{speed['lo']:.3g}, {speed['hi']:.3g}]")
        )
    return metrics


def _blocks(found: Diagnosis) -> Iterator[Table | Chart | Quote]:
    from assay.serving.symptoms import speed_interval

    ordered = sorted(found.command.settings, key=lambda s: _ROLE_ORDER.index(role_of(found, s)))
    rows = [
        (
            s.name,
            s.value or "on",
            s.safe_value,
            role_of(found, s).replace("_", " "),
            found.cannot_run.get(s.name)
            or (found.engaged[s.name].evidence if s.name in found.engaged else "not measured"),
        )
        for s in ordered
    ]
    yield Table("Settings", ("setting", "value", "baseline", "role", "did it engage?"), rows)
    best = best_of(found)
    if best is not None:
        yield Table("Use now", ("command",), [(best["command"],)], detail=not found.guilty)
    starts = [
        (
            _named(found, s),
            str(s.index + 1),
            s.seen.state.replace("_", " "),
            "; ".join(s.seen.bad.values())[:160],
            f"{s.observation.start_s:.0f}",
            f"{s.observation.measure_s:.0f}",
        )
        for s in found.starts
    ]
    yield Table(
        "Starts",
        ("configuration", "start", "state", "what was bad", "start s", "asked s"),
        starts,
        frozenset({1, 4, 5}),
        detail=True,
    )
    rungs = [(c, speed_interval(o.speeds)) for c, o in found.rungs]
    points = [
        Point(_rung_name(rungs[:i], c), s.value, s.lo, s.hi)
        for i, (c, s) in enumerate(rungs)
        if s is not None
    ]
    if points:
        yield Chart(
            "Ladder: from the baseline to the fastest that holds",
            "forest",
            (Series("tokens/s", points),),
            y_label="tokens/s",
        )
    if found.given is not None and found.given.state == "bad":
        start = found.of(found.all)
        for probe in start.observation.record.probes if start else ():
            for sample in [s for s in probe.samples if s.degenerate][:1]:
                yield Quote(
                    f"given command, {probe.title}",
                    sample.text_head,
                    sample.kind or sample.label,
                    sample.onset_char,
                )


def _named(found: Diagnosis, start: Start) -> str:
    if not start.configuration:
        return "baseline"
    if start.configuration >= found.all:
        more = sorted(start.configuration - found.all)
        return f"given{' with ' + ', '.join(more) if more else ''}"
    missing = found.all - start.configuration
    few = len(missing) < len(start.configuration)
    return (
        f"without {', '.join(sorted(missing))}"
        if few
        else f"only {', '.join(sorted(start.configuration))}"
    )


def _rung_name(before: Any, configuration: Any) -> str:
    if not configuration:
        return "baseline"
    known: Any = max((c for c, _ in before if c <= configuration), key=len, default=frozenset())
    return f"+ {', '.join(sorted(configuration - known))}"
