"""`assay spec`: read the sources, judge what they show, compare with a baseline, and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from assay.errors import UsageError
from assay.speculation.baseline import Comparison, compare
from assay.speculation.benefit import ASSUMED_COST, Benefit, Cost, benefit, measured_cost
from assay.speculation.diagnosis import quoted
from assay.speculation.findings import findings
from assay.speculation.follow import follow
from assay.speculation.head_file import HeadFile, examine_head
from assay.speculation.head_state import head_evidence
from assay.speculation.headline import headline
from assay.speculation.health import Assessment, assess, sampled_share, with_words
from assay.speculation.judged import Judged
from assay.speculation.measured import quotient
from assay.speculation.options import SpecOptions
from assay.speculation.plan import resolve
from assay.speculation.prediction import Prediction, doubts, predict, read_change, to_json
from assay.speculation.prediction import table as prediction_table
from assay.speculation.run import Run, read_run
from assay.speculation.view import blocks
from assay.verdict import Report, Verdict


def examine(sources: Sequence[str], options: SpecOptions | None = None) -> Report:
    """Judge the run that the sources show.

    Args:
        sources: Log files, metrics pages, JSON responses, `-`, or one server's URL.
        options: What else `assay spec` was asked for.

    Raises:
        AssayError: A source cannot be read.
        UsageError: The sources and options do not go together.
    """
    chosen = options or SpecOptions()
    plan = resolve(sources, chosen)
    if chosen.follow:
        run, interrupted = follow(plan.names[0], chosen, chosen.seconds)
        return replace(judge_run(run, plan.names, chosen), interrupted=interrupted)
    base = read_run(plan.baseline, replace(chosen, requests=0)) if plan.baseline else None
    run = read_run(plan, chosen)
    found = judge_run(run, plan.names, chosen, base)
    if chosen.lossless and plan.url:
        from assay.speculation.lossless import check_lossless

        found = check_lossless(
            found,
            plan.url,
            chosen.lossless,
            chosen.prompts,
            chosen.samples,
            chosen.api_key_env,
            chosen.timeout,
        )
    return found


def judge_run(
    run: Run, names: Sequence[str], options: SpecOptions, base: Run | None = None
) -> Report:
    """The report of a run that was read, against a baseline where there is one."""
    clues, unread = run.reading.clues, run.reading.unread
    lines = sum(n for _, n in unread.values())
    share = sampled_share(options.temperature)
    assessment = with_words(
        assess(run.evidence, share), run.evidence.record, {c.id for c in clues}, lines
    )
    head_file = examine_head(options.model, clues) if options.model else None
    if head_file and not assessment.health.bad:
        head_file = head_file.softened()
    judged = Judged(
        run.evidence,
        assessment,
        clues,
        _benefit(run, assessment, base, options),
        _compare(run, assessment, base),
        head_file.findings if head_file else (),
        list(unread.values()),
        options.num_speculative_tokens,
        options.temperature,
    )
    positions = [rate.value for rate in assessment.positions]
    if options.predict is not None and not positions:
        raise UsageError(
            "--predict needs acceptance by position, and the source shows none",
            finding_id="speculation.usage",
            remedy="give vLLM's log or /metrics of the target that the head was trained on",
        )
    prediction = (
        predict(positions, read_change(options.predict)) if options.predict is not None else None
    )
    verdict = judged.verdict
    if run.results.get("live", {}).get("counters_reset") and verdict is Verdict.PASS:
        verdict = Verdict.INCONCLUSIVE
    return Report(
        command="spec",
        verdict=verdict,
        subject={
            "sources": list(names),
            "kinds": run.reading.kinds,
            "engine": run.evidence.record.engine,
        },
        findings=[*findings(judged), *(doubts(prediction) if prediction else ()), *run.extra],
        results={**_results(judged, head_file, prediction), **run.results},
        headline=headline(judged),
        blocks=[
            *([prediction_table(prediction, positions)] if prediction else ()),
            *blocks(judged),
        ],
    )


def _benefit(
    run: Run, assessment: Assessment, base: Run | None, options: SpecOptions
) -> Benefit | None:
    record, lifetime = run.evidence.record, run.evidence.lifetime
    depth, length = record.num_speculative_tokens, record.overall or record.tokens_per_step
    multiplier = run.race
    if base is not None and base.evidence.record.nothing_drafted and run.speed and base.speed:
        multiplier = quotient(run.speed, base.speed)
    cost = Cost(ASSUMED_COST, "assumed")
    if multiplier is not None and depth and length:
        found = measured_cost(length, depth, multiplier, record.coverage or 1.0)
        if found is None and record.steps_estimated:  # the speeds contradict the estimate
            record = replace(record, counts=replace(record.counts, steps=None))
            found = measured_cost(record.tokens_per_step or length, depth, multiplier)
        cost = found or cost
    if options.cost_ratio is not None:
        cost = Cost(options.cost_ratio, "given")
    return benefit(record, cost, multiplier, assessment.pooled or assessment.rate, lifetime)


def _compare(run: Run, assessment: Assessment, base: Run | None) -> Comparison | None:
    if base is None:
        return None
    speeds = (run.speed.value, base.speed.value) if run.speed and base.speed else None
    return compare(
        assessment, assess(base.evidence), run.evidence.record, base.evidence.record, speeds
    )


def _results(
    judged: Judged, head_file: HeadFile | None, prediction: Prediction | None
) -> dict[str, Any]:
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
        "temperature": judged.temperature,
    }
    if a.health.bad:
        results["head"] = head_evidence(record)
    if head_file is not None:
        results["mtp_status"] = head_file.status
    if prediction is not None:
        results["prediction"] = to_json(prediction)
    return results


def _counts(record: dict[str, Any]) -> dict[str, Any]:
    names = (
        "accepted",
        "drafted",
        "drafts",
        "acceptance_rate",
        "mean_acceptance_length",
        "per_position",
    )
    return {name: record[name] for name in names}
