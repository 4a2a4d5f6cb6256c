"""Run a doctor from a command line to its report: what it needs is there, it is alone, and its
report says what it found.
"""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.environment import VERSION, describe
from assay.errors import AssayError, UsageError
from assay.options import DoctorOptions
from assay.progress import NO_PROGRESS, Progress
from assay.serving.command import UNKNOWN, ServeCommand, Setting, read_command, table_notice
from assay.serving.launch import gpus
from assay.serving.search import exhaustive, starts_needed
from assay.verdict import (
    Chart,
    Finding,
    Metric,
    Point,
    Quote,
    Report,
    Series,
    Severity,
    Table,
    Verdict,
)

if TYPE_CHECKING:  # reading a command needs nothing that asks a server
    from assay.serving.doctor import Diagnosis, Doctor, Start


@contextmanager
def _interruptible() -> Iterator[None]:
    """A request to end is an interrupt, so that servers are stopped (the command line sets this by
    itself).
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_doctor(
    words: Sequence[str],
    options: DoctorOptions,
    progress: Progress = NO_PROGRESS,
    watch: Callable[[Doctor], AbstractContextManager[object]] = nullcontext,
) -> Report:
    """Find the guilty settings of a serve command; with `lint`, read it only.

    `watch` opens what shows the doctor while it runs. Raises AssayError where nothing can be
    launched.
    """
    command = read_command(words, options.command_template)
    if options.lint:
        return run_lint(command, options.engine_version)
    # What asks a server is not needed to read a command.
    from assay.serving.bundle import write_bundle
    from assay.serving.doctor import Doctor
    from assay.serving.launch import alone, require_disk, require_program

    if options.bundle is not None and not options.bundle.expanduser().absolute().parent.is_dir():
        raise UsageError(
            f"--bundle {options.bundle}: its folder does not exist", remedy="make it first"
        )
    require_program(command)
    doctor = Doctor(command, options, progress)
    require_disk(doctor.folder)
    with ExitStack() as stack:
        stack.enter_context(_interruptible())
        stack.enter_context(alone(30 * options.budget, doctor.say))
        if options.ray:
            from assay.serving.elsewhere import Starts

            doctor.cluster = stack.enter_context(
                Starts(options.ray, options.workers, progress, command, options.api_key_env)
            )
        with watch(doctor):
            diagnosis = doctor.run()
        report = build_report(diagnosis)
        if doctor.cluster:
            environment = {**report.environment, "cluster": doctor.cluster.facts()}
            report = replace(
                report,
                environment=environment,
                findings=(*report.findings, *doctor.cluster.findings()),
            )
    if options.bundle is not None:
        written = write_bundle(options.bundle, report, diagnosis)
        doctor.say(f"evidence written to {written}")
    return report


# `assay doctor --lint`: what is known to break about a command line and its checkpoint, without a
# launch.


def serve_arguments(command: ServeCommand) -> str:
    """The options of a `vllm serve` command as `assay verify --serve-args` takes them."""
    words = [*command.fixed, *(w for s in command.settings for w in s.words)]
    variables = [
        f"{n}={shlex.quote(v)}"
        for n, v in command.variables([s.name for s in command.settings]).items()
    ]
    return " ".join([*variables, shlex.join(words)])


def serving_rules(command: ServeCommand, version: str | None) -> list[Finding]:
    """What verify's serving rules say of the command; nothing for other engines, or where the model
    is not here.
    """
    model = Path(command.model).expanduser() if command.model else None
    if command.engine != "vllm" or model is None or not model.exists():
        return []
    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify

    options = VerifyOptions(
        hashing="none",
        serve_args=serve_arguments(command),
        engine_version=version,
        allow_unverified=True,
    )
    return [f for f in verify(str(model), options).findings if f.severity is not Severity.INFO]


def run_lint(command: ServeCommand, version: str | None) -> Report:
    """The report of `--lint`: pass, or fail where the rules find an error; inconclusive where there
    is no table.
    """
    number = version.partition("==")[2] if version else None
    notice = table_notice(command, number)
    findings: list[Finding] = []
    try:
        findings += serving_rules(command, version)
    except AssayError as error:
        findings.append(error.to_finding())
    if notice:
        findings.append(Finding("server.no_table", Severity.WARNING, notice))
    model = Path(command.model).expanduser() if command.model else None
    if command.engine == "vllm" and (model is None or not model.exists()):
        findings.append(
            Finding(
                "server.not_examined",
                Severity.INFO,
                f"the checkpoint {command.model or ''} is not a folder here: only the command was"
                " read",
                remedies=("name a folder, or run assay verify hub:ORG/NAME --serve-args '…'",),
            )
        )
    rows = [(s.name, s.value or "", s.safe_value, s.safe.reason) for s in command.settings]
    examined = command.engine == "vllm" and model is not None and model.exists()
    bad = any(f.severity is Severity.ERROR for f in findings)
    verdict = Verdict.FAIL if bad else Verdict.PASS if examined else Verdict.INCONCLUSIVE
    settings = [
        {
            "name": s.name,
            "value": s.value,
            "safe_value": s.safe_value,
            "role": "undecided",
            "engaged": None,
            "evidence": s.safe.reason,
        }
        for s in command.settings
    ]
    return Report(
        command="doctor",
        verdict=verdict,
        subject={"command": command.text(frozenset(s.name for s in command.settings))},
        findings=findings,
        results={
            "lint": True,
            "engine": command.engine,
            "settings": settings,
            "guilty": [],
            "launches": 0,
            "minutes": 0.0,
            "baseline": {"command": command.text(frozenset()), "verdict": None},
            "given": {
                "command": command.text(frozenset(s.name for s in command.settings)),
                "verdict": None,
            },
            "best": None,
        },
        blocks=(
            Table(
                "Settings that differ from the baseline",
                ("setting", "value", "baseline", "why"),
                rows,
            ),
        ),
        summary=(
            ""
            if bad or not examined
            else "No rule knows a fault of this command with this checkpoint."
        ),
    )


# The report of a doctor: the guilty set, each setting's role, the ladder, and a bug report to hand
# over.


_ROLE_ORDER = ("guilty", "cannot_run", "no_effect", "undecided", "innocent")


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


def build_report(found: Diagnosis) -> Report:
    """The report of a diagnosis."""
    verdict = verdict_of(found)
    command, everything = found.command, found.all | frozenset(found.cannot_run)
    settings = [_setting_json(found, s) for s in command.settings]
    best = _best(found)
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
        findings=tuple(_findings(found, verdict)),
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


def _best(found: Diagnosis) -> dict[str, Any] | None:
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


def _summary(found: Diagnosis, verdict: Verdict) -> str:
    if found.guilty:
        sets = "; and ".join(" with ".join(names) for names in found.guilty)
        return (
            f"{sets}: the command is as bad with it as whole, and as good as the baseline without."
            if found.proven
            else (f"{sets}: guilty as far as it was decided.")
        )
    if verdict is Verdict.FAIL:
        return f"The baseline itself fails: {_FAULTS[fault_of(found)]}."
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


def _findings(found: Diagnosis, verdict: Verdict) -> Iterator[Finding]:
    command = found.command
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
            "throughput.guilty_setting" if slow else "server.guilty_setting", Severity.ERROR,
            f"{shown} breaks it: {says}"[:400],
            detail=f"alone: {shows}"[:400] if shows and shows != says else "",
            evidence={"settings": names, "proven": found.proven, "symptoms": sorted(found.rules)},
            causes=[s.safe.reason for s in accused if s.safe is not UNKNOWN],
            remedies=(f"use now: {_command_without(found)}",),
        )  # fmt: skip
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
    if notice := table_notice(command, None):
        yield Finding("server.no_table", Severity.INFO, notice)


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


_FAULTS = {
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


def _checkpoint_findings(found: Diagnosis) -> Iterator[Finding]:
    says = "; ".join(found.baseline.bad.values()) if found.baseline else ""
    bad = [r for r in found.checkpoint if r.verdict is Verdict.FAIL]
    fault = fault_of(found)
    looked = [_looked(r) for r in found.checkpoint] or ["the checkpoint is not a path here"]
    yield Finding(
        "server.baseline_fails",
        Severity.ERROR,
        f"the baseline itself fails ({says[:200]}): {_FAULTS[fault]}",
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
    best = _best(found)
    if best is not None:
        return str(best["command"])
    return found.command.text(found.all - {n for names in found.guilty for n in names})


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
    best = _best(found)
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


def issue_text(found: Diagnosis) -> str:
    """A bug report in the form that engines ask for: environment, minimal command, what happens,
    what should.
    """
    facts, gpu = describe(), (gpus() or "none").replace("\n", "; ")
    minimal = {n for names in found.guilty for n in names} or found.all
    start = found.of(frozenset(minimal)) or found.of(found.all)
    says = (
        "\n".join(f"- {rule}: {text}" for rule, text in (start.seen.bad if start else {}).items())
        or "- nothing was found bad"
    )
    texts = [
        s.text_head
        for p in (start.observation.record.probes if start else ())
        for s in p.samples
        if s.degenerate
    ][:2]
    server = start.observation.facts if start else {}
    return "\n".join(
        [
            "### Your current environment",
            "",
            f"- {facts['platform']}, {facts['cpu']}, GPU: {gpu}",
            f"- engine: {found.command.engine} {server.get('version') or ''}".rstrip(),
            f"- Python {facts['python']}, "
            + ", ".join(f"{n} {v}" for n, v in facts["packages"].items()),
            "",
            "### Minimal command that fails",
            "",
            "```",
            found.command.text(frozenset(minimal)),
            "```",
            "",
            "### Command that works",
            "",
            "```",
            found.command.text(found.all - minimal),
            "```",
            "",
            "### What happens",
            "",
            says,
            *(["", "```text", *texts, "```"] if texts else []),
            "",
            (
                f"Found by assay {VERSION} doctor in {found.launches} launches; declared error rate"
                " of each decision 5 %."
            ),
        ]
    )
