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
from assay.options import Options, option
from assay.speculation.benefit import (
    ASSUMED_COST,
    Benefit,
    Comparison,
    Cost,
    Measured,
    Prediction,
    benefit,
    compare,
    doubts,
    measured_cost,
    median,
    predict,
    quotient,
    read_change,
    to_json,
)
from assay.speculation.benefit import table as prediction_table
from assay.speculation.findings import HeadFile, Judged, examine_head, findings, quoted
from assay.speculation.health import (
    WORTH,
    Assessment,
    Health,
    Rate,
    assess,
    head_evidence,
    proportion,
    sampled_share,
    with_words,
)
from assay.speculation.read import Reading
from assay.speculation.record import Evidence, Observation, combine
from assay.speculation.sources import grow, in_time_order, open_source
from assay.verdict import Band, Block, Chart, Finding, Metric, Point, Report, Series, Table, Verdict

_VERDICTS = {
    Health.HEALTHY: Verdict.PASS,
    Health.DEGRADED: Verdict.FAIL,
    Health.BROKEN: Verdict.FAIL,
}
MAX_INTERVAL = 86_400.0
"""Longest time between two scrapes, in seconds."""
ROUND_TRIP = 16
"""Requests sent to each server where a baseline is a server and --requests is not given."""
SAY_SECONDS = 10.0
"""A line is printed whenever the health changes, and otherwise at most this often."""
SERVER, LOSSLESS = "Running server", "Losslessness"


@dataclass(frozen=True)
class SpecOptions(Options):
    """What is asked for beside the sources."""

    VERB, AREA = "spec", "speculation"

    baseline: tuple[str, ...] = option(
        (),
        "A source of the same kind to compare with, or a server for a real A/B run.",
        metavar="SOURCE",
    )
    follow: bool = option(False, "Keep reading a log as it grows.")
    seconds: float | None = option(None, "Stop following after this many seconds.", flag="for")
    model: str | None = option(
        None, "The checkpoint: its head is examined as `assay verify` does.", metavar="CHECKPOINT"
    )
    num_speculative_tokens: int | None = option(
        None,
        "Number of speculative tokens that was asked for; the source is checked against it.",
        lo=1,
        hi=1000,
    )
    temperature: float | None = option(
        None,
        "Temperature of the traffic: a head is accepted less often where text is sampled.",
        lo=0,
        hi=100,
    )
    cost_ratio: float | None = option(
        None, "Cost of one draft token in target steps (default: measured, or 0.1).", lo=0, hi=100
    )
    predict: str | None = option(
        None,
        "Result of `assay compare` (or a total variation): predict acceptance beside that changed"
        " target.",
        metavar="FILE|TV",
    )
    interval: float = option(
        10.0, "Seconds between the two scrapes.", lo=0, hi=MAX_INTERVAL, panel=SERVER
    )
    requests: int = option(
        0, "Requests of our own to send between the scrapes.", lo=0, panel=SERVER
    )
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
        own = [w.generation_throughput for w in self.evidence.windows if w.generation_throughput]
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
        from assay.speculation.live import check_lossless

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
        headline=_headline(judged),
        blocks=[
            *([prediction_table(prediction, positions)] if prediction else ()),
            *_blocks(judged),
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


# Figures, tables and pictures of a judged source, for `report/` to draw; the table that decides
# comes first.

PROSE = Band("usual for prose", 0.4, 0.7)
"""The band of acceptance that the field quotes, as context (dense code: 0.2 to 0.5); nothing is
judged by it.
"""
_POINTS = 120
_ENGINES = 6


def _headline(judged: Judged) -> list[Metric]:
    """The few figures that are read first."""
    a, record, b = judged.assessment, judged.record, judged.benefit
    metrics = [Metric("health", a.health.value, note=a.reason)]
    if a.pooled is not None:
        note = "of all draft tokens; prose 40–70 %, code 20–50 %"
        metrics.append(Metric("acceptance", a.pooled.percent(), note=note))
    elif record.acceptance_rate is not None:
        metrics.append(
            Metric(
                "acceptance", f"{100 * record.acceptance_rate:.1f} %", note="printed, no interval"
            )
        )
    if record.tokens_per_step is not None:
        metrics.append(_tokens_per_step(judged, record.tokens_per_step))
    if b is not None and a.judged:
        metrics += _multiplier(b)
    if judged.advice:
        metrics.append(Metric("advice", judged.advice))
    return metrics


def _blocks(judged: Judged) -> list[Block]:
    """Tables and charts, where there is something to show."""
    bad = judged.assessment.health.bad
    tables = [_baseline(judged), _positions(judged), _engines(judged), _implementations(judged)]
    if judged.assessment.dead_engines:
        tables.insert(0, tables.pop(2))
    charts = [
        _position_chart(judged),
        _over_time(judged),
        _multiplier_chart(judged.benefit) if judged.benefit and not bad else None,
    ]
    return [b for b in (*tables, *charts) if b is not None]


def _tokens_per_step(judged: Judged, length: float) -> Metric:
    """Over all steps, where the source counts those without a draft too: that is what is paid for."""
    steps = judged.evidence.steps
    if steps.coverage is None or steps.coverage > 0.98 or steps.overall is None:
        return Metric("tokens per step", f"{length:.2f}", note="bonus token included")
    drafted = steps.tokens_per_step or length
    note = f"over all steps; {drafted:.2f} at the {100 * steps.coverage:.3g} % that drafted"
    return Metric("tokens per step", f"{steps.overall:.2f}", note=note)


def _multiplier(b: Benefit) -> list[Metric]:
    if b.measured_multiplier is not None:
        return [
            Metric(
                "net multiplier", str(b.measured_multiplier), note="measured against the baseline"
            )
        ]
    if b.multiplier is None:
        return []
    span = "" if b.interval is None else f" [{b.interval[0]:.2f}, {b.interval[1]:.2f}]"
    note = f"predicted over all steps, {b.cost.source} draft cost {b.cost}"
    return [Metric("net multiplier", f"{b.multiplier:.2f}{span}", note=note)]


def _positions(judged: Judged) -> Table | None:
    a = judged.assessment
    rows = []
    before: int | None = None
    for i, ((accepted, drafts), rate) in enumerate(
        zip(judged.record.positions or (), a.positions, strict=False)
    ):
        given = "" if not before else f"{100 * min(1.0, accepted / before):.1f} %"
        rows.append((str(i), f"{accepted:,}", f"{drafts:,}", rate.percent(), given))
        before = accepted
    columns = ("position", "accepted", "drafts", "rate [95 %]", "given the one before")
    note = "" if a.design_effect == 1 else f"design effect {a.design_effect:.1f}"
    return Table("Draft positions", columns, rows, frozenset(range(5)), note=note) if rows else None


def _position_chart(judged: Judged) -> Chart | None:
    rates = judged.assessment.positions
    points = [Point(f"position {i}", r.value, r.lo, r.hi) for i, r in enumerate(rates)]
    series = [Series("acceptance", points)]
    return (
        Chart("Acceptance per draft position", "bar", series, "", "rate")
        if len(rates) > 1
        else None
    )


def _over_time(judged: Judged) -> Chart | None:
    """Acceptance over the run: each engine of several, or position 0 and everything of one."""
    counted = [w for w in judged.evidence.windows if w.drafted and w.accepted is not None]
    engines = list(dict.fromkeys(w.replica for w in counted))
    if 1 < len(engines) <= _ENGINES:
        series = [
            _series(f"engine {e}", [w for w in counted if w.replica == e], _pooled) for e in engines
        ]
    else:
        series = [_series("all draft tokens", counted, _pooled)]
        if all(w.accepted_per_position and w.drafts for w in counted):
            series.insert(0, _series("position 0", counted, _first))
    if max((len(s.points) for s in series), default=0) < 2:
        return None
    first, last = counted[0].time, counted[-1].time
    note = f"{first} to {last}" if first and last else ""
    return Chart("Acceptance over time", "line", series, "window", "rate", [PROSE], note=note)


def _series(
    name: str, windows: Sequence[Observation], rate: Callable[[Sequence[Observation]], Rate]
) -> Series:
    """The rate in each window; long runs are summed into at most 120 points."""
    size = max(1, -(-len(windows) // _POINTS))
    points = []
    for start in range(0, len(windows), size):
        own = rate(windows[start : start + size])
        points.append(Point(float(1 + start), own.value, own.lo, own.hi))
    return Series(name, points)


def _pooled(group: Sequence[Observation]) -> Rate:
    return proportion(sum(w.accepted or 0 for w in group), sum(w.drafted or 0 for w in group))


def _first(group: Sequence[Observation]) -> Rate:
    return proportion(
        sum((w.accepted_per_position or (0,))[0] for w in group), sum(w.drafts or 0 for w in group)
    )


def _multiplier_chart(b: Benefit) -> Chart:
    known = max(b.measured_depth, b.depth or 0)
    points = [Point(float(n), m) for n, m in enumerate(b.multipliers[: known + 4], 1)]
    series = [Series("measured positions", points[:known])]
    if known < len(points):
        series.append(Series("extrapolated", points[known - 1 :]))
    bands = [Band("costs more than it earns", 0.0, 1.0), Band("hardly worth it", 1.0, WORTH)]
    note = f"a draft token costs {b.cost} target steps ({b.cost.source})"
    title = "Predicted net multiplier"
    return Chart(title, "line", series, "speculative tokens", "times as fast", bands, note=note)


def _engines(judged: Judged) -> Table | None:
    rows = []
    for name, a in judged.assessment.per_engine.items():
        record = judged.evidence.per_engine[name]
        length = "" if record.tokens_per_step is None else f"{record.tokens_per_step:.2f}"
        counts = f"{_count(record.accepted)} / {_count(record.drafted)}"
        rows.append((name, a.health.value, counts, a.rate.percent() if a.rate else "", length))
    columns = ("engine", "health", "accepted / drafted", "judged rate [95 %]", "tokens per step")
    return Table("Engines", columns, rows, frozenset({2, 3, 4})) if rows else None


def _implementations(judged: Judged) -> Table | None:
    rows = []
    for name, c in judged.record.per_implementation.items():
        rate = proportion(c["accepted"] or 0, c["drafted"]).percent() if c["drafted"] else ""
        rows.append((name, *(_count(c[key]) for key in ("drafts", "drafted", "accepted")), rate))
    columns = ("method", "drafts", "drafted", "accepted", "acceptance [95 %]")
    note = "lifetime statistics; not added to the request lines"
    title = "Drafting methods since start"
    return Table(title, columns, rows, frozenset({1, 2, 3, 4}), note=note) if rows else None


def _count(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _baseline(judged: Judged) -> Table | None:
    c = judged.comparison
    if c is None:
        return None
    rows = []
    if c.acceptance is not None:
        rows.append(("all draft tokens", _points(c.acceptance)))
    rows += [(f"position {i}", _points(d)) for i, d in enumerate(c.per_position)]
    if c.tokens_per_step is not None:
        rows.append(
            ("tokens per step", f"{c.tokens_per_step[0]:.2f} against {c.tokens_per_step[1]:.2f}")
        )
    if c.speeds is not None:
        rows.append(("tokens per second", f"{c.speeds[0]:.1f} against {c.speeds[1]:.1f}"))
    return Table(
        "Against the baseline", ("", "difference [95 %]"), rows, frozenset({1}), note=c.reading
    )


def _points(difference: Rate) -> str:
    return (
        f"{100 * difference.value:+.1f} points [{100 * difference.lo:+.1f},"
        f" {100 * difference.hi:+.1f}]"
    )
