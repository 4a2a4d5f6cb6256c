"""Tables, charts and quotes of a check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.coherence.judge import Judgement
from assay.coherence.record import CheckRecord, GradedReply, ProbeResult, Reference, ToolLevel
from assay.coherence.rules.rule import Rule, Ruling
from assay.coherence.speed import summary
from assay.coherence.tools import against
from assay.stats import wilson
from assay.verdict import Block, Chart, Point, Quote, Series, Table

_STATE_WORDS = {"good": "ok", "bad": "fail", "unclear": "unclear", "not_examined": "not examined"}
_STATE_ORDER = ("bad", "unclear", "good", "not_examined")
_CELL = 62
"""Characters of a cell on the first screen; the whole sentence stands with the details."""


def rule_words(rule: str) -> str:
    """The name of a rule as words."""
    return rule.replace("_", " ")


def blocks_of(
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
            [_short_row(r) for r in rulings if r.rule is not Rule.ANSWERS or r.state == "bad"],
        )
    )
    full = [(rule_words(r.rule), _STATE_WORDS[r.state], r.says) for r in rulings]
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
    return rule_words(ruling.rule), _STATE_WORDS[ruling.state], says


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
        "Bits per byte of fixed texts by their depth in the context",
        "scatter",
        all_series,
        x_label="tokens before the text",
        y_label="bits per byte",
    )


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


def _shown_onset(sample: GradedReply) -> int | None:
    """The onset where the part of the text that is shown contains it; the note tells it in
    any case.
    """
    inside = sample.onset_char is not None and sample.onset_char < len(sample.text_head)
    return sample.onset_char if inside else None


def _quote_note(sample: GradedReply) -> str:
    parts = [f"seed {sample.seed}" if sample.seed is not None else "greedy"]
    if sample.completion_tokens is not None:
        parts.append(f"{sample.completion_tokens} tokens")
    parts.append(f"{sample.text_chars} characters")
    if sample.finish_reason:
        parts.append(f"finish_reason {sample.finish_reason}")
    if sample.kind:
        parts.append(f"{sample.kind} from character {sample.onset_char}")
    return ", ".join(parts)
