"""From what was read of a run to its report: health, benefit, comparison with a baseline, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.options import Options, option
from assay.speculation import report
from assay.speculation.benefit import (
    ASSUMED_COST,
    Benefit,
    Comparison,
    Cost,
    Measured,
    benefit,
    compare,
    measured_cost,
    median,
    quotient,
)
from assay.speculation.findings import HeadFile, Judged, examine_head, findings, quoted
from assay.speculation.health import Assessment, Health, assess, head_evidence, with_words
from assay.speculation.read import Reading
from assay.speculation.record import Evidence
from assay.verdict import Finding, Report, Verdict

_VERDICTS = {
    Health.HEALTHY: Verdict.PASS,
    Health.DEGRADED: Verdict.FAIL,
    Health.BROKEN: Verdict.FAIL,
    Health.OFF: Verdict.INCONCLUSIVE,
    Health.INSUFFICIENT: Verdict.INCONCLUSIVE,
    Health.UNKNOWN: Verdict.INCONCLUSIVE,
}


MAX_INTERVAL = 86_400.0
"""Longest time between two scrapes, in seconds."""
SERVER, LOSSLESS = "Running server", "Losslessness"


@dataclass(frozen=True)
class SpecOptions(Options):
    """What is asked for beside the sources."""

    VERB, AREA = "spec", "speculation"

    baseline: tuple[str, ...] = option(
        (), "A source of the same kind to compare with. May be repeated.", metavar="SOURCE"
    )
    follow: bool = option(False, "Keep reading a log as it grows.")
    seconds: float | None = option(None, "Stop following after this many seconds.", flag="for")
    model: str | None = option(
        None, "The checkpoint: its head is examined as `assay verify` does.", metavar="CHECKPOINT"
    )
    num_speculative_tokens: int | None = option(
        None, "Number of speculative tokens that was asked for; the source is held against it.", lo=1, hi=1000
    )
    cost_ratio: float | None = option(
        None, "Cost of one draft token in target steps (default: measured, or 0.1).", lo=0, hi=100
    )
    interval: float = option(10.0, "Seconds between the two scrapes.", lo=0, hi=MAX_INTERVAL, panel=SERVER)
    requests: int = option(0, "Requests of our own to send between the scrapes.", lo=0, panel=SERVER)
    api_key_env: str | None = option(
        None, "Environment variable with the API key.", metavar="NAME", panel=SERVER
    )
    timeout: float = option(120.0, "Seconds for each request.", panel=SERVER)
    lossless: str | None = option(
        None,
        "The same model without speculation: is the text the same?",
        metavar="URL",
        panel=LOSSLESS,
    )
    prompts: int = option(6, "Greedy prompts.", lo=1, panel=LOSSLESS)
    samples: int = option(48, "Sampled texts from each server.", lo=0, panel=LOSSLESS)


@dataclass(frozen=True)
class Examined:
    """One run as it was read: its evidence, and what came with it."""

    reading: Reading
    evidence: Evidence
    extra: Sequence[Finding] = ()
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def speed(self) -> Measured | None:
        """Generation throughput, tokens per second: of the speculative windows, or of a run without any."""
        own = [w.generation_throughput for w in self.evidence.windows if w.generation_throughput]
        return median(own or self.reading.speeds)


def is_url(source: str) -> bool:
    """Whether a source is a running server."""
    return source.startswith(("http://", "https://"))


def judge_run(
    run: Examined, names: Sequence[str], options: SpecOptions, base: Examined | None = None
) -> Report:
    """The report of a run that was read, against a baseline where there is one."""
    clues, unread = run.reading.clues, run.reading.unread
    lines = sum(n for _, n in unread.values())
    assessment = with_words(assess(run.evidence), run.evidence.record, {c.id for c in clues}, lines)
    head_file = examine_head(options.model, clues) if options.model else None
    if head_file and not assessment.health.bad:
        head_file = head_file.softened()
    judged = Judged(
        run.evidence, assessment, clues, _benefit(run, assessment, base, options), _compare(run, assessment, base),
        head_file.findings if head_file else (), list(unread.values()), options.num_speculative_tokens,
    )  # fmt: skip
    found = [*findings(judged), *run.extra]
    verdict = _VERDICTS[assessment.health]
    if run.results.get("live", {}).get("counters_reset"):
        verdict = Verdict.INCONCLUSIVE if verdict is Verdict.PASS else verdict
    return Report(
        command="spec",
        verdict=verdict,
        subject={"sources": list(names), "kinds": run.reading.kinds, "engine": run.evidence.record.engine},
        findings=found,
        results={**_results(judged, head_file), **run.results},
        headline=report.headline(judged),
        blocks=report.blocks(judged),
    )


def _benefit(
    run: Examined, assessment: Assessment, base: Examined | None, options: SpecOptions
) -> Benefit | None:
    record, lifetime = run.evidence.record, run.evidence.lifetime
    depth, length = record.num_speculative_tokens, record.overall or record.tokens_per_step
    multiplier = None
    cost = Cost(ASSUMED_COST, "assumed")
    if base is not None and base.evidence.record.nothing_drafted and run.speed and base.speed:
        multiplier = quotient(run.speed, base.speed)
        if depth and length:
            found = measured_cost(length, depth, multiplier, record.coverage or 1.0)
            if found is None and record.steps_estimated:  # the speeds contradict the estimate
                record = replace(record, steps=None)
                found = measured_cost(record.tokens_per_step or length, depth, multiplier)
            cost = found or cost
    if options.cost_ratio is not None:
        cost = Cost(options.cost_ratio, "given")
    return benefit(record, cost, multiplier, assessment.pooled or assessment.rate, lifetime)


def _compare(run: Examined, assessment: Assessment, base: Examined | None) -> Comparison | None:
    if base is None:
        return None
    speeds = (run.speed.value, base.speed.value) if run.speed and base.speed else None
    return compare(assessment, assess(base.evidence), run.evidence.record, base.evidence.record, speeds)


def _results(judged: Judged, head_file: HeadFile | None) -> dict[str, Any]:
    a, record = judged.assessment, judged.record
    results: dict[str, Any] = {
        "health": a.health.value,
        "record": record,
        "evidence": a,
        "per_engine": {
            name: {
                "health": own.health.value,
                "reason": own.reason,
                **_counts(judged.evidence.per_engine[name].to_json()),
            }
            for name, own in a.per_engine.items()
        },
        "advice": judged.advice,
        "benefit": judged.benefit,
        "baseline": judged.comparison,
        "start_up": quoted(judged.clues),
        "unrecognised": [{"line": line, "count": n} for line, n in judged.unread[:20]],
        "collapse": a.collapse,
    }
    if a.health.bad:
        results["head"] = head_evidence(record)
    if head_file is not None:
        results["mtp_status"] = head_file.status
    return results


def _counts(record: dict[str, Any]) -> dict[str, Any]:
    names = ("accepted", "drafted", "drafts", "acceptance_rate", "mean_acceptance_length", "per_position")
    return {name: record[name] for name in names}
