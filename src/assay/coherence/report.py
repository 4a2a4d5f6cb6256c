"""The report of a check: results in the JSON of schema assay/1, and what a person sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from assay.coherence.diagnosis import Judgement, Subject, diagnose, rollback_command
from assay.coherence.measure import Plan, aggregate_tokens_per_s, summary
from assay.coherence.record import CheckRecord, ProbeResult, Reference, Sample, ToolLevel
from assay.coherence.rules import Ruling
from assay.coherence.tools import against, checked_answers, paired, standing
from assay.progress import span
from assay.stats import interval_json, wilson
from assay.verdict import (
    Block,
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
    jsonable,
)

_STATE_WORDS = {"good": "ok", "bad": "fail", "unclear": "unclear", "not_examined": "not examined"}
_STATE_ORDER = ("bad", "unclear", "good", "not_examined")
_CELL = 62
"""Characters of a cell on the first screen; the whole sentence stands with the details."""


def build_report(
    subject: Mapping[str, Any],
    plan: Plan,
    record: CheckRecord,
    reference: Reference | None,
    judgement: Judgement,
    times: Mapping[str, Any],
    changed: Sequence[Finding] = (),
) -> Report:
    """Put record, reference and judgement together into the report of `assay check`.

    `times` says what the run took and left out; `changed` holds a finding for each setting that
    differs from the reference's.
    """
    server = subject.get("server") or {}
    known = Subject(
        model=str(subject.get("model_root") or subject.get("model")),
        kv_cache_dtype=server.get("kv_cache_dtype"),
        max_model_len=subject.get("max_model_len"),
        kind=server.get("kind"),
    )
    results = results_json(record, plan, reference, judgement)
    return Report(
        command="check",
        verdict=judgement.verdict,
        subject=subject,
        findings=(
            *diagnose(judgement, record, known),
            *changed,
            *_slower(times),
            *_left_out(times),
        ),
        results=results | {"time": dict(times), "rollback": rollback_command(known)},
        headline=_headline(record, reference, judgement),
        blocks=_blocks(record, reference, judgement, times, plan.margin_answers),
        summary=_summary(record, reference, judgement),
    )


def _summary(record: CheckRecord, reference: Reference | None, judgement: Judgement) -> str:
    """The sentence of a pass: what holds, and what was not examined."""
    if judgement.verdict is not Verdict.PASS:
        return ""
    suite = sum(len(level.answers) for level in record.tools)
    what = (
        f"{len(record.samples)} texts are sane"
        if record.samples
        else f"{suite} tool calls and objects hold"
    )
    answered = reference is not None and (reference.record.samples or reference.record.tools)
    against = ", as those of the reference" if answered else ""
    if reference is not None and not answered:
        against = (
            " by themselves, and fixed texts are as easy as for the reference, which wrote none"
        )
    names = ", ".join(_words(r.rule) for r in judgement.rulings if r.state == "not_examined")
    return f"{what}{against}; not examined: {names}." if names else f"{what}{against}."


def _words(rule: str) -> str:
    return rule.replace("_", " ")


def _slower(times: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Whether the server slowed down while it was checked."""
    if not (slow := times.get("slower")):
        return ()
    return (
        Finding(
            id="server.slower",
            severity=Severity.WARNING,
            title=(
                f"the server slowed down while it was checked: {slow['tokens_per_s']:.3g} tokens/s"
                f" in the {slow['stage']}, {slow['tokens_per_s_before']:.3g} before"
            ),
            evidence=dict(slow),
            causes=(
                "other requests at the same time",
                "a throttled or overheated machine",
                "a full KV cache",
            ),
            remedies=("check it again when it is idle",),
        ),
    )


def _left_out(times: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What a budget left out, and what the verdict can therefore not say."""
    left = [item for item in times["left_out"] if "budget" in item["why"]]
    if not left:
        return ()
    unknown = "; ".join(dict.fromkeys(item["unknown"] for item in left))
    return (
        Finding(
            id="coherence.left_out",
            severity=Severity.INFO,
            title=(
                f"the budget of {span(times['budget_s'])} left out"
                f" {', '.join(item['stage'] for item in left)}"
            ),
            detail=f"The verdict does not say, or only coarsely: {unknown}.",
            evidence={"stages": [item["stage"] for item in left]},
            remedies=("give it more time: --budget MINUTES",),
        ),
    )


def results_json(
    record: CheckRecord, plan: Plan, reference: Reference | None, judgement: Judgement
) -> dict[str, Any]:
    """The machine-readable answer; `CheckRecord.from_json` reads the record back from it."""
    results = record_json(record)
    results["throughput"] |= {
        "valid": judgement.throughput_valid,
        "useful_tokens_per_s": summary([text.useful_tokens_per_s for text in record.timed]),
    }
    results["rules"] = [
        {"rule": ruling.rule, "state": ruling.state, "says": ruling.says}
        for ruling in judgement.rulings
    ]
    theirs = reference.record.tools[0] if reference and reference.record.tools else None
    for level, out in zip(record.tools, results["tools"], strict=True):
        out["reference"] = theirs.count("right") if theirs else None
        out["p_value"] = paired(level, theirs)[2] if theirs else None
        out["paired"] = against(level, theirs, plan.margin_answers) if theirs else {}
        for key in ("decision", "questions_needed"):
            out[key] = out["paired"]["right"][key] if out["paired"] else None
    ours, known = checked_answers(record), checked_answers(reference.record) if reference else {}
    if both := [(ours[question], known[question]) for question in ours if question in known]:
        results["answers"] = standing(both, plan.margin_answers)
    results["plan"] = plan.facts()
    results["sampling"] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "penalties": "neutral",
        "greedy_samples": 1,
    }
    if reference is not None:
        results["reference"] = {"origin": dict(reference.origin), **_compact(reference.record)}
    return results


def record_json(record: CheckRecord) -> dict[str, Any]:
    """A record as plain JSON types."""
    timed = record.timed
    throughput = {
        "samples": len(timed),
        "decode_tokens_per_s": summary([text.decode_tokens_per_s for text in timed]),
        "ttft_s": summary([text.ttft_s for text in timed]),
        "itl_s": summary([text.itl_s for text in timed]),
        "e2e_s": summary([text.e2e_s for text in timed]),
        "total_tokens_per_s": aggregate_tokens_per_s(timed),
        "prefill_tokens_per_s": record.prefill_tokens_per_s,
        "concurrency": record.concurrency,
        "skipped": record.timed_skipped,
        "unfinished": record.timed_failed,
        "texts": jsonable(timed),
    }
    return {
        "probes": [_probe_json(probe) for probe in record.probes],
        "throughput": throughput,
        "bits_per_byte": {
            "mean": _mean_bits(record),
            "skipped": record.passages_skipped,
            "unfinished": record.passages_failed,
            "passages": [jsonable(p) | {"bits_per_byte": p.bits_per_byte} for p in record.passages],
        },
        "counters": dict(record.counters),
        "tools": [_level_json(level) for level in record.tools],
        "tools_skipped": record.tools_skipped,
    }


def _mean_bits(record: CheckRecord) -> float | None:
    """Bits per byte of the fixed texts, each by itself."""
    values = [p.bits_per_byte for p in record.passages if not p.depth]
    return fmean(values) if values else None


def _level_json(level: ToolLevel) -> dict[str, Any]:
    counts = {name: level.count(name) for name in ("parsed", "schema_valid", "right")}
    rates = {
        f"{name}_rate": interval_json(wilson(k, len(level.answers))) for name, k in counts.items()
    }
    asked = {"concurrency": level.concurrency, "asked": len(level.answers), **counts}
    return (
        asked
        | rates
        | {"failed": level.failed, "error": level.error, "answers": jsonable(level.answers)}
    )


def _probe_json(probe: ProbeResult) -> dict[str, Any]:
    out: dict[str, Any] = {"name": probe.name, "title": probe.title, "status": probe.status}
    if probe.skipped is not None:
        out["reason"] = probe.skipped
    if probe.failed is not None:
        out["unfinished"] = probe.failed
    out["samples"] = jsonable(probe.samples)
    if probe.samples:
        rate = wilson(sum(s.degenerate for s in probe.samples), len(probe.samples))
        out["degenerate_rate"] = interval_json(rate)
    return out


def _compact(record: CheckRecord) -> dict[str, Any]:
    """The numbers of a reference, without its texts."""
    return {
        "probes": {
            probe.name: {
                "samples": len(probe.samples),
                "degenerate": sum(s.degenerate for s in probe.samples),
            }
            for probe in record.probes
        },
        "bits_per_byte": _mean_bits(record),
        "timed_degenerate": sum(text.degenerate for text in record.timed),
        "timed": len(record.timed),
    }


def _headline(
    record: CheckRecord, reference: Reference | None, judgement: Judgement
) -> tuple[Metric, ...]:
    """The figures that a person reads first; those of speed are invalid where the text is not sane."""
    valid = judgement.throughput_valid
    metrics: list[Metric] = []

    def speed(name: str, text: str, note: str = "") -> None:
        metrics.append(Metric(name, text, valid, note if valid else "the text is not coherent"))

    decode, useful, ttft = (
        summary([getattr(text, name) for text in record.timed])
        for name in ("decode_tokens_per_s", "useful_tokens_per_s", "ttft_s")
    )
    if decode["median"] is not None:
        speed("decode", f"{_spread(decode, 1)} tok/s")
        speed("useful", f"{_spread(useful, 1)} tok/s", "tokens before the onset")
        speed("time to first token", f"{_spread(ttft, 3)} s")
    if record.concurrency > 1 and (total := aggregate_tokens_per_s(record.timed)) is not None:
        speed(f"all {record.concurrency} streams", f"{total:.1f} tok/s")
    if record.prefill_tokens_per_s is not None:
        speed("prefill", f"{record.prefill_tokens_per_s:.0f} tok/s")
    if n := len(record.samples):
        bad = sum(s.degenerate for s in record.samples)
        rate = wilson(bad, n)
        text = f"{bad} of {n} ({rate.lo:.0%} to {rate.hi:.0%})"
        metrics.append(Metric("degenerate texts", text, note="95 % interval"))
    if (bits := _mean_bits(record)) is not None:
        theirs = _mean_bits(reference.record) if reference else None
        against = "" if theirs is None else f", reference {theirs:.3f}"
        metrics.append(Metric("plain English", f"{bits:.3f} bits per byte{against}"))
    return tuple(metrics)


def _blocks(
    record: CheckRecord,
    reference: Reference | None,
    judgement: Judgement,
    times: Mapping[str, Any],
    margin: float,
) -> tuple[Block, ...]:
    """The table that decides first; all else is detail."""
    rulings = sorted(judgement.rulings, key=lambda ruling: _STATE_ORDER.index(ruling.state))
    columns = ("rule", "state", "measured")
    blocks: list[Block] = [_tools_table(record, reference, margin)] if record.tools else []
    blocks.append(
        Table(
            "What decides",
            columns,
            [_short_row(r) for r in rulings if r.rule != "answers" or r.state == "bad"],
        )
    )
    full = [(_words(r.rule), _STATE_WORDS[r.state], r.says) for r in rulings]
    blocks.append(Table("All rules", columns, full, detail=True))
    if record.probes:
        blocks.append(_probe_table(record, reference))
    if any(probe.samples for probe in record.probes):
        blocks.append(_rate_chart(record, reference))
    if record.timed:
        blocks.append(_speed_table(record, judgement.throughput_valid))
    if record.passages:
        blocks.append(_bits_chart(record, reference))
    blocks.append(_time_table(times))
    blocks += _quotes(record)
    return tuple(blocks)


def _short_row(ruling: Ruling) -> tuple[str, str, str]:
    says = ruling.says if len(ruling.says) <= _CELL else f"{ruling.says[: _CELL - 1]}…"
    return _words(ruling.rule), _STATE_WORDS[ruling.state], says


def _tools_table(record: CheckRecord, reference: Reference | None, margin: float) -> Table:
    theirs = reference.record.tools[0] if reference and reference.record.tools else None
    rows = []
    for level in record.tools:
        n = len(level.answers)
        rate = wilson(level.count("right"), n)
        counts = (f"{level.count(name)}" for name in ("parsed", "schema_valid", "right"))
        row = (str(level.concurrency), str(n), *counts, f"{rate.lo:.0%} to {rate.hi:.0%}")
        pair = _against(level, theirs, margin) if theirs else ("", "")
        rows.append((*row, *pair))
    return Table(
        "Tool calls and JSON objects by requests at once",
        (
            "at once",
            "asked",
            "parsed",
            "valid",
            "right",
            "95 % interval",
            "reference right",
            "against it",
        ),
        rows,
        numeric=frozenset(range(7)),
        note=(
            f"no worse: right answers paired by question, no more than {margin:.3g} of them lost at"
            " 97.5 %"
            if theirs
            else ""
        ),
    )


def _against(level: ToolLevel, theirs: ToolLevel, margin: float) -> tuple[str, str]:
    """Right answers of the reference, and how the level stands against them."""
    found = against(level, theirs, margin).get("right")
    if found is None:
        return "0", "no case in common"
    decides = (
        f" ({found['questions_needed']:,} questions decide)" if found["questions_needed"] else ""
    )
    return f"{found['reference']}", f"{found['decision'].replace('_', ' ')}{decides}"


def _time_table(times: Mapping[str, Any]) -> Table:
    rows = [
        (name, f"{seconds:.1f}", _seconds(times["expected_s"].get(name)))
        for name, seconds in times["stages_s"].items()
    ]
    rows += [(item["stage"], "", f"left out: {item['why']}") for item in times["left_out"]]
    return Table(
        "Time", ("stage", "seconds", "expected"), rows, numeric=frozenset({1}), detail=True
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _probe_table(record: CheckRecord, reference: Reference | None) -> Table:
    columns = (
        "probe",
        "texts",
        "ok",
        "degenerate",
        "empty",
        "truncated",
        "onset",
        "right",
        "reference degenerate",
    )
    rows = []
    for probe in record.probes:
        if probe.skipped is not None:
            rows.append((probe.title, "skipped", *[""] * 5, probe.skipped, ""))
            continue
        labels = [s.label for s in probe.samples]
        onsets = sorted(
            s.onset_char for s in probe.samples if s.degenerate and s.onset_char is not None
        )
        checks = [check.passed for s in probe.samples for check in s.checks]
        theirs = reference.record.probe(probe.name) if reference else None
        rows.append(
            (
                probe.title,
                str(len(labels)),
                *(
                    str(labels.count(label))
                    for label in ("ok", "degenerate", "empty", "truncated_reasoning")
                ),
                str(onsets[len(onsets) // 2]) if onsets else "",
                f"{sum(checks)}/{len(checks)}" if checks else "",
                (
                    f"{sum(s.degenerate for s in theirs.samples)}/{len(theirs.samples)}"
                    if theirs
                    else ""
                ),
            )
        )
    return Table(
        "Probes",
        columns,
        rows,
        numeric=frozenset({1, 2, 3, 4, 5, 6}),
        detail=True,
        note=(
            "onset: median character at which degenerate texts went wrong; right: answer checks"
            " passed"
        ),
    )


def _rate_chart(record: CheckRecord, reference: Reference | None) -> Chart:
    def series(name: str, probes: Sequence[ProbeResult]) -> Series:
        points = []
        for probe in probes:
            if probe.samples:
                rate = wilson(sum(s.degenerate for s in probe.samples), len(probe.samples))
                points.append(Point(probe.name, rate.value, rate.lo, rate.hi))
        return Series(name, points)

    all_series = [series("server", record.probes)]
    if reference is not None and reference.record.samples:
        all_series.append(series("reference", reference.record.probes))
    return Chart(
        "Share of degenerate texts by probe, 95 % Wilson intervals",
        "forest",
        all_series,
        x_label="probe",
        y_label="share",
    )


def _speed_table(record: CheckRecord, valid: bool) -> Table:
    rows = []
    for name, unit, digits, values in (
        ("decode, one stream", "tok/s", 1, [t.decode_tokens_per_s for t in record.timed]),
        ("useful, one stream", "tok/s", 1, [t.useful_tokens_per_s for t in record.timed]),
        ("time to first token", "s", 3, [t.ttft_s for t in record.timed]),
        ("inter-token latency", "s", 4, [t.itl_s for t in record.timed]),
        ("end to end", "s", 2, [t.e2e_s for t in record.timed]),
    ):
        figures = summary(values)
        if figures["median"] is not None:
            cells = (f"{figures[key]:.{digits}f}" for key in ("median", "min", "max"))
            rows.append((name, *cells, unit))
    how = sorted({text.first_chunk_source for text in record.timed})
    note = (
        f"{len(record.timed)} texts over {record.concurrency} stream(s) after a warm-up round;"
        f" tokens from the server's usage; tokens of the first chunk: {', '.join(how)}"
    )
    title = (
        "Speed"
        if valid
        else "Speed (invalid: the text that was timed, or the server, is not coherent)"
    )
    columns = ("figure", "median", "min", "max", "unit")
    return Table(title, columns, rows, numeric=frozenset({1, 2, 3}), note=note, detail=True)


def _bits_chart(record: CheckRecord, reference: Reference | None) -> Chart:
    def series(name: str, scores: CheckRecord) -> Series:
        ordered = sorted(scores.passages, key=lambda p: p.depth)
        return Series(name, [Point(float(p.depth), p.bits_per_byte) for p in ordered])

    all_series = [series("server", record)]
    if reference is not None and reference.record.passages:
        all_series.append(series("reference", reference.record))
    return Chart(
        "Bits per byte of fixed texts by their depth in the context", "scatter", all_series,
        x_label="tokens before the text", y_label="bits per byte",
    )  # fmt: skip


def _quotes(record: CheckRecord) -> list[Quote]:
    """One text a probe: a bad one where there is one, else the first."""
    quotes = []
    for probe in record.probes:
        if not probe.samples:
            continue
        sample = min(probe.samples, key=lambda s: not s.degenerate)
        quotes.append(
            Quote(
                title=f"{probe.title}{f' ({sample.variant})' if sample.variant else ''}",
                text=sample.text_head,
                status=sample.label,
                onset=_shown_onset(sample),
                note=_quote_note(sample),
            )
        )
    return quotes


def _shown_onset(sample: Sample) -> int | None:
    """The onset where it lies in the part of the text that is shown; the note tells it in any case."""
    inside = sample.onset_char is not None and sample.onset_char < len(sample.text_head)
    return sample.onset_char if inside else None


def _quote_note(sample: Sample) -> str:
    parts = [f"seed {sample.seed}" if sample.seed is not None else "greedy"]
    if sample.completion_tokens is not None:
        parts.append(f"{sample.completion_tokens} tokens")
    parts.append(f"{sample.text_chars} characters")
    if sample.finish_reason:
        parts.append(f"finish_reason {sample.finish_reason}")
    if sample.kind:
        parts.append(f"{sample.kind} from character {sample.onset_char}")
    return ", ".join(parts)


def _spread(figures: Mapping[str, float | None], digits: int) -> str:
    median, lo, hi = figures["median"], figures["min"], figures["max"]
    if median is None or lo is None or hi is None:
        return "unknown"
    return f"{median:.{digits}f} ({lo:.{digits}f} to {hi:.{digits}f})"
