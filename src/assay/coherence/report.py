"""The report of a check: results in the JSON of schema assay/1, and what a person sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from assay.coherence.diagnosis import Judgement, Subject, diagnose, rollback_command
from assay.coherence.measure import Plan, aggregate_tokens_per_s, summary
from assay.coherence.record import CheckRecord, ProbeResult, Reference, Sample
from assay.stats.intervals import wilson
from assay.verdict import Block, Chart, Metric, Point, Quote, Report, Series, Table, jsonable

_STATE_WORDS = {"good": "ok", "bad": "fail", "unclear": "unclear"}


def build_report(
    subject: Mapping[str, Any],
    plan: Plan,
    record: CheckRecord,
    reference: Reference | None,
    judgement: Judgement,
) -> Report:
    """Put record, reference and judgement together into the report of `assay check`."""
    server = subject.get("server") or {}
    known = Subject(
        model=str(subject.get("model_root") or subject.get("model")),
        kv_cache_dtype=server.get("kv_cache_dtype"),
        max_model_len=subject.get("max_model_len"),
        kind=server.get("kind"),
    )
    return Report(
        command="check",
        verdict=judgement.verdict,
        subject=subject,
        findings=diagnose(judgement, record, known),
        results=results_json(record, plan, reference, judgement) | {"rollback": rollback_command(known)},
        headline=_headline(record, reference, judgement),
        blocks=_blocks(record, reference, judgement),
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
        {"rule": ruling.rule, "state": ruling.state, "says": ruling.says} for ruling in judgement.rulings
    ]
    results["plan"] = plan.facts()
    results["sampling"] = {"temperature": 0.7, "top_p": 0.9, "penalties": "neutral", "greedy_samples": 1}
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
            "mean": fmean([p.bits_per_byte for p in record.passages]) if record.passages else None,
            "skipped": record.passages_skipped,
            "unfinished": record.passages_failed,
            "passages": [jsonable(p) | {"bits_per_byte": p.bits_per_byte} for p in record.passages],
        },
        "counters": dict(record.counters),
    }


def _probe_json(probe: ProbeResult) -> dict[str, Any]:
    out: dict[str, Any] = {"name": probe.name, "title": probe.title, "status": probe.status}
    if probe.skipped is not None:
        out["reason"] = probe.skipped
    if probe.failed is not None:
        out["unfinished"] = probe.failed
    out["samples"] = jsonable(probe.samples)
    if probe.samples:
        rate = wilson(sum(s.degenerate for s in probe.samples), len(probe.samples))
        out["degenerate_rate"] = {"value": rate.value, "lo": rate.lo, "hi": rate.hi}
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
        "bits_per_byte": fmean([p.bits_per_byte for p in record.passages]) if record.passages else None,
        "timed_degenerate": sum(text.degenerate for text in record.timed),
        "timed": len(record.timed),
    }


def _headline(record: CheckRecord, reference: Reference | None, judgement: Judgement) -> tuple[Metric, ...]:
    metrics: list[Metric] = []
    speed = summary([text.decode_tokens_per_s for text in record.timed])
    if speed["median"] is not None:
        valid = judgement.throughput_valid
        metrics.append(
            Metric("decode", f"{_spread(speed, 1)} tok/s", valid, "" if valid else "the text is not coherent")
        )
        useful = summary([text.useful_tokens_per_s for text in record.timed])
        reason = "tokens before the onset" if valid else "the text is not coherent"
        metrics.append(Metric("useful", f"{_spread(useful, 1)} tok/s", valid, reason))
        ttft = summary([text.ttft_s for text in record.timed])
        metrics.append(
            Metric(
                "time to first token",
                f"{_spread(ttft, 3)} s",
                valid,
                "" if valid else "the text is not coherent",
            )
        )
    if record.concurrency > 1 and (total := aggregate_tokens_per_s(record.timed)) is not None:
        metrics.append(
            Metric(f"all {record.concurrency} streams", f"{total:.1f} tok/s", judgement.throughput_valid)
        )
    if record.prefill_tokens_per_s is not None:
        metrics.append(
            Metric("prefill", f"{record.prefill_tokens_per_s:.0f} tok/s", judgement.throughput_valid)
        )
    texts = record.samples
    if texts:
        rate = wilson(sum(s.degenerate for s in texts), len(texts))
        bad = sum(s.degenerate for s in texts)
        metrics.append(
            Metric(
                "degenerate texts",
                f"{bad} of {len(texts)} ({rate.lo:.0%} to {rate.hi:.0%})",
                note="95 % interval",
            )
        )
    if record.passages:
        bits = fmean([p.bits_per_byte for p in record.passages])
        theirs = reference.record.passages if reference else ()
        against = f", reference {fmean([p.bits_per_byte for p in theirs]):.3f}" if theirs else ""
        metrics.append(Metric("plain English", f"{bits:.3f} bits per byte{against}"))
    return tuple(metrics)


def _blocks(record: CheckRecord, reference: Reference | None, judgement: Judgement) -> tuple[Block, ...]:
    blocks: list[Block] = [_probe_table(record, reference)]
    blocks.append(
        Table(
            "Rules",
            ("rule", "state", "measured"),
            [(ruling.rule, _STATE_WORDS[ruling.state], ruling.says) for ruling in judgement.rulings],
        )
    )
    if any(probe.samples for probe in record.probes):
        blocks.append(_rate_chart(record, reference))
    if record.timed:
        blocks.append(_speed_table(record, judgement.throughput_valid))
    elif reason := record.timed_skipped or record.timed_failed:
        blocks.append(Table("Speed", ("not measured",), [(reason,)]))
    if record.passages:
        blocks.append(_bits_chart(record, reference))
    elif reason := record.passages_skipped or record.passages_failed:
        blocks.append(Table("Fixed texts", ("not scored",), [(reason,)]))
    blocks += _quotes(record)
    return tuple(blocks)


def _probe_table(record: CheckRecord, reference: Reference | None) -> Table:
    columns = [
        "probe",
        "texts",
        "ok",
        "degenerate",
        "empty",
        "truncated",
        "onset",
        "right",
        "reference degenerate",
    ]
    rows = []
    for probe in record.probes:
        if probe.skipped is not None:
            rows.append((probe.title, "skipped", *[""] * 5, probe.skipped, ""))
            continue
        labels = [s.label for s in probe.samples]
        onsets = sorted(s.onset_char for s in probe.samples if s.degenerate and s.onset_char is not None)
        checks = [check.passed for s in probe.samples for check in s.checks]
        theirs = reference.record.probe(probe.name) if reference else None
        rows.append(
            (
                probe.title,
                str(len(labels)),
                *(str(labels.count(label)) for label in ("ok", "degenerate", "empty", "truncated_reasoning")),
                str(onsets[len(onsets) // 2]) if onsets else "",
                f"{sum(checks)}/{len(checks)}" if checks else "",
                f"{sum(s.degenerate for s in theirs.samples)}/{len(theirs.samples)}" if theirs else "",
            )
        )
    if reference is None:
        columns.pop()
        rows = [row[:-1] for row in rows]
    return Table(
        "Probes", columns, rows, numeric=frozenset({1, 2, 3, 4, 5, 6}),
        note="onset: median character at which degenerate texts went wrong; right: answer checks passed",
    )  # fmt: skip


def _rate_chart(record: CheckRecord, reference: Reference | None) -> Chart:
    def series(name: str, probes: Sequence[ProbeResult]) -> Series:
        points = []
        for probe in probes:
            if probe.samples:
                rate = wilson(sum(s.degenerate for s in probe.samples), len(probe.samples))
                points.append(Point(probe.name, rate.value, rate.lo, rate.hi))
        return Series(name, points)

    all_series = [series("server", record.probes)]
    if reference is not None:
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
        f"{len(record.timed)} texts over {record.concurrency} stream(s) after a warm-up round; tokens from the "
        f"server's usage; tokens of the first chunk: {', '.join(how)}"
    )
    title = "Speed" if valid else "Speed (invalid: the text that was timed, or the server, is not coherent)"
    return Table(
        title, ("figure", "median", "min", "max", "unit"), rows, numeric=frozenset({1, 2, 3}), note=note
    )


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
