"""From what was read of a run to its report: health, benefit, comparison with a baseline, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
from assay.speculation.health import Assessment, Health, assess, head_evidence
from assay.speculation.read import Reading
from assay.speculation.record import Evidence
from assay.verdict import Finding, Report, Verdict

_VERDICTS = {
    Health.HEALTHY: Verdict.PASS,
    Health.DEGRADED: Verdict.FAIL,
    Health.BROKEN: Verdict.FAIL,
    Health.OFF: Verdict.INCONCLUSIVE,
    Health.INSUFFICIENT: Verdict.INCONCLUSIVE,
}


@dataclass(frozen=True)
class Options:
    """What the command line asks for beside the sources."""

    baseline: Sequence[str] = ()
    model: str | None = None
    cost_ratio: float | None = None
    interval: float = 10.0
    requests: int = 0
    lossless: str | None = None
    prompts: int = 6
    samples: int = 48
    api_key_env: str | None = None
    timeout: float = 120.0


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


def judge_run(run: Examined, names: Sequence[str], options: Options, base: Examined | None = None) -> Report:
    """The report of a run that was read, against a baseline where there is one."""
    assessment = assess(run.evidence)
    clues = run.reading.clues
    head_file = examine_head(options.model, clues) if options.model else None
    if head_file and not assessment.health.bad:
        head_file = head_file.softened()
    worth = _benefit(run, base, options)
    comparison = _compare(run, assessment, base)
    judged = Judged(
        run.evidence, assessment, clues, worth, comparison, head_file.findings if head_file else ()
    )
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


def _benefit(run: Examined, base: Examined | None, options: Options) -> Benefit | None:
    record = run.evidence.record
    depth, length = record.num_speculative_tokens, record.tokens_per_step
    multiplier = None
    cost = Cost(ASSUMED_COST, "assumed")
    if base is not None and base.evidence.record.nothing_drafted and run.speed and base.speed:
        multiplier = quotient(run.speed, base.speed)
        if depth and length:
            cost = measured_cost(length, depth, multiplier) or cost
    if options.cost_ratio is not None:
        cost = Cost(options.cost_ratio, "given")
    return benefit(record, cost, multiplier)


def _compare(run: Examined, assessment: Assessment, base: Examined | None) -> Comparison | None:
    if base is None:
        return None
    speeds = (run.speed.value, base.speed.value) if run.speed and base.speed else None
    return compare(assessment, assess(base.evidence), run.evidence.record, base.evidence.record, speeds)


def _results(judged: Judged, head_file: HeadFile | None) -> dict[str, Any]:
    a, record = judged.assessment, judged.record
    results: dict[str, Any] = {
        "health": a.health.value,
        "record": record.to_json(),
        "evidence": a.to_json(),
        "per_engine": {
            name: {
                "health": own.health.value,
                "reason": own.reason,
                **_counts(judged.evidence.per_engine[name].to_json()),
            }
            for name, own in a.per_engine.items()
        },
        "advice": judged.advice,
        "benefit": None if judged.benefit is None else judged.benefit.to_json(),
        "baseline": None if judged.comparison is None else judged.comparison.to_json(),
        "start_up": quoted(judged.clues),
        "collapse": a.collapse,
    }
    if a.health.bad:
        results["head"] = head_evidence(record).to_json()
    if head_file is not None:
        results["mtp_status"] = head_file.status
    return results


def _counts(record: dict[str, Any]) -> dict[str, Any]:
    names = ("accepted", "drafted", "drafts", "acceptance_rate", "mean_acceptance_length", "per_position")
    return {name: record[name] for name in names}
