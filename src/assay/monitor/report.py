"""The report of a watch."""

from __future__ import annotations

import time

from assay.errors import AssayError
from assay.monitor.canary import State
from assay.monitor.change import CALM, LEARN, MONTH_S
from assay.monitor.loop import Watch
from assay.monitor.status import status_of
from assay.verdict import Metric, Report, Severity, Table, Verdict

_SUMMARIES = {
    Verdict.PASS: "nothing changed while it was watched.",
    Verdict.INCONCLUSIVE: f"it answers; its baseline is not learnt yet ({LEARN} values an item).",
}


def report_of(watch: Watch, interrupted: bool = False) -> Report:
    """What the watch found, alarms of this process first."""
    status = status_of(watch)
    findings = watch.log.findings()
    verdict = Verdict.PASS
    if watch.met <= {State.DOWN}:
        verdict = Verdict.ERROR
        why = watch.last.reason or "it was never asked"
        findings = [AssayError(why, finding_id="server.unreachable").to_finding()]
    elif any(f.severity is Severity.ERROR for f in findings):
        verdict = Verdict.FAIL
    elif watch.learning:
        verdict = Verdict.INCONCLUSIVE
    findings += watch.kept.notices("server")
    load, finds = status["load"], status["finds_s"]
    rounds = ", ".join(f"{count} {name}" for name, count in watch.rounds.items())
    drift = f"found within {finds / 60:.0f} min" if finds else "not found by its answers yet"
    headline = (
        Metric("state", watch.state),
        Metric("rounds", rounds or "none"),
        Metric("load", "unknown" if load is None else f"{100 * load:.2f} % of one stream"),
        Metric("a drift of 0.01 bits per byte", drift),
    )
    rows = [
        (time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e["at"])), f"{e['kind']}: {e['text']}"[:72])
        for e in list(watch.log.events)[-12:]
    ]
    plan = watch.options.facts() | {
        "limit_rounds": watch.changes.limit if watch.changes else None,
        "month_s": MONTH_S,
        "calm_rounds": CALM,
    }
    return Report(
        command="watch",
        verdict=verdict,
        subject={
            "engine": "server",
            "url": watch.where,
            "model": watch.model,
            "server": watch.server,
        },
        findings=tuple(findings),
        results={"watch": status, "events": list(watch.log.events), "plan": plan},
        headline=headline,
        blocks=(Table("Latest events (UTC)", ("when", "what"), rows),) if rows else (),
        interrupted=interrupted,
        summary=_SUMMARIES.get(verdict, ""),
    )
