"""`assay spec`: read the sources, judge what they show, compare with a baseline, and report."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.errors import UsageError
from assay.speculation.baseline import Comparison, compare
from assay.speculation.benefit import ASSUMED_COST, Benefit, Cost, benefit, measured_cost
from assay.speculation.combine import Evidence, combine
from assay.speculation.diagnosis import quoted
from assay.speculation.findings import findings
from assay.speculation.growing import grow
from assay.speculation.head_file import HeadFile, examine_head
from assay.speculation.head_state import head_evidence
from assay.speculation.health import Assessment, Health, assess, sampled_share, with_words
from assay.speculation.judged import Judged
from assay.speculation.measured import Measured, median, quotient
from assay.speculation.options import SpecOptions
from assay.speculation.prediction import Prediction, doubts, predict, read_change, to_json
from assay.speculation.prediction import table as prediction_table
from assay.speculation.read import Reading
from assay.speculation.sources import in_time_order, open_source
from assay.speculation.view import blocks, headline
from assay.verdict import Finding, Report, Verdict

_VERDICTS = {
    Health.HEALTHY: Verdict.PASS,
    Health.DEGRADED: Verdict.FAIL,
    Health.BROKEN: Verdict.FAIL,
}

ROUND_TRIP = 16
"""Requests sent to each server where a baseline is a server and --requests is not given."""

SAY_SECONDS = 10.0
"""A line is printed whenever the health changes, and otherwise at most this often."""


@dataclass(frozen=True)
class Examined:
    """One run as it was read: its evidence, and what came with it. `race` is the speed against the
    baseline's.
    """

    reading: Reading
    evidence: Evidence
    extra: Sequence[Finding] = ()
    results: dict[str, Any] = field(default_factory=dict)
    race: Measured | None = None

    @property
    def speed(self) -> Measured | None:
        """Generation throughput, tokens per second: of the speculative windows, or of a run without
        any.
        """
        own = [
            w.load.generation_throughput
            for w in self.evidence.windows
            if w.load.generation_throughput
        ]
        return median(own or self.reading.speeds)


def is_url(source: str) -> bool:
    """Whether a source is a running server."""
    return source.startswith(("http://", "https://"))


def examine(sources: Sequence[str], options: SpecOptions | None = None) -> Report:
    """Judge the run that the sources show. AssayError where a source cannot be read."""
    chosen = options or SpecOptions()
    if not sources:
        raise UsageError("no source given", finding_id="speculation.usage", remedy="assay spec LOG")
    _validate(chosen, sources)
    if chosen.follow:
        return follow(sources[0], chosen, chosen.seconds)
    base = None
    if chosen.baseline and not (is_url(sources[0]) and is_url(chosen.baseline[0])):
        base = _read(chosen.baseline, replace(chosen, requests=0, baseline=()))
    run = _read(sources, chosen)
    found = judge_run(run, list(sources), chosen, base)
    if chosen.lossless:
        from assay.speculation.lossless import check_lossless

        found = check_lossless(
            found, next(filter(is_url, sources)), chosen.lossless, chosen.prompts, chosen.samples,
            chosen.api_key_env, chosen.timeout,
        )  # fmt: skip
    return found


def _validate(options: SpecOptions, sources: Sequence[str]) -> None:
    """Refuse what makes no sense before anything is waited for."""
    urls = [s for s in sources if is_url(s)]

    def refuse(message: str, remedy: str = "") -> UsageError:
        return UsageError(message, finding_id="speculation.usage", remedy=remedy)

    if [*sources, *options.baseline].count("-") > 1:
        raise refuse(
            "standard input can be read once only, and it is named twice",
            "write one of them to a file",
        )
    for group in (sources, options.baseline):
        if len(group) > 1 and any(map(is_url, group)):
            raise refuse("a running server is examined by itself", "give one URL, or only files")
    if options.lossless and len(urls) != 1:
        raise refuse(
            "--lossless compares two running servers", "assay spec URL --lossless OTHER_URL"
        )
    if options.requests and not urls:
        raise refuse(
            "--requests are sent to a running server, and none is given",
            "assay spec URL --requests N",
        )
    if options.seconds is not None and not (options.follow and 0 < options.seconds < math.inf):
        raise refuse("--for takes the seconds that --follow lasts")
    if options.follow and (len(sources) != 1 or options.baseline or options.lossless):
        raise refuse("--follow takes one log and nothing to compare with")


def read_files(names: Sequence[str], reading: Reading | None = None) -> Reading:
    """Read files, or standard input, as one run."""
    result = reading or Reading()
    unique = {name if name == "-" else os.path.realpath(name): name for name in names}
    for name in in_time_order(list(unique.values())):
        result.add(open_source(name))
    return result


def _read(sources: Sequence[str], options: SpecOptions) -> Examined:
    if not is_url(sources[0]):
        reading = read_files(sources)
        return Examined(reading, combine(reading.settled()))
    from assay.speculation.live import watch

    rival = next(filter(is_url, options.baseline), None)
    requests = options.requests or (ROUND_TRIP if rival else 0)
    live = watch(
        sources[0], options.interval, requests, rival, options.api_key_env, options.timeout
    )
    return Examined(live.reading, live.evidence, live.findings, {"live": live.to_json()}, live.race)


def follow(
    name: str,
    options: SpecOptions,
    seconds: float | None = None,
    say: Callable[[str], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Read `name` (a file, or `-`) as it grows, until interrupted, until its end (`-`), or for
    `seconds`.
    """
    if is_url(name):
        raise UsageError(
            "--follow reads a log; a server is watched with --interval",
            finding_id="speculation.usage",
        )
    tell = say or (lambda text: print(text, file=sys.stderr, flush=True))
    reading, share = Reading(), sampled_share(options.temperature)
    interrupted = False
    health, told = None, -math.inf
    try:
        # What a file already holds is read first, at full speed.
        for batch in grow(
            name, reading.add, None if seconds is None else clock() + seconds, sleep, clock
        ):
            fresh = [o for raw in batch for o in reading.line(raw)]
            if not fresh:
                continue
            evidence = combine(reading.settled())
            now = assess(evidence, share)
            if now.health is not health or clock() - told >= SAY_SECONDS:
                health, told = now.health, clock()
                length = evidence.record.tokens_per_step
                tokens = "" if length is None else f", {length:.2f} tokens per step"
                when = fresh[-1].time or time.strftime("%H:%M:%S")
                tell(f"{when}  {now.health.value}: {now.reason}{tokens}")
    except KeyboardInterrupt:
        interrupted = True
    run = Examined(reading, combine(reading.settled()))
    return replace(judge_run(run, [name], options), interrupted=interrupted)


def judge_run(
    run: Examined, names: Sequence[str], options: SpecOptions, base: Examined | None = None
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
    verdict = _VERDICTS.get(assessment.health, Verdict.INCONCLUSIVE)
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
    run: Examined, assessment: Assessment, base: Examined | None, options: SpecOptions
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


def _compare(run: Examined, assessment: Assessment, base: Examined | None) -> Comparison | None:
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
