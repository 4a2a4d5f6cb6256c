"""The report of a check: its findings, headline and summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.coherence.blocks import blocks_of, rule_words
from assay.coherence.diagnosis import Subject, diagnose, rollback_command
from assay.coherence.judge import Judgement
from assay.coherence.options import Plan
from assay.coherence.record import CheckRecord, Reference
from assay.coherence.results import mean_bits, results_json
from assay.coherence.speed import aggregate_tokens_per_s, summary
from assay.progress import span
from assay.stats import wilson
from assay.verdict import Finding, Metric, Report, Severity, Verdict


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
        blocks=blocks_of(record, reference, judgement, times, plan.margin_answers),
        summary=_summary(record, reference, judgement),
    )


def _summary(record: CheckRecord, reference: Reference | None, judgement: Judgement) -> str:
    """The sentence of a pass: what holds, and what was not examined."""
    if judgement.verdict is not Verdict.PASS:
        return ""
    suite = sum(len(level.answers) for level in record.tools)
    what = _sane(record) if record.samples else f"{suite} tool calls and objects hold"
    answered = reference is not None and (reference.record.samples or reference.record.tools)
    against = ", as those of the reference" if answered else ""
    if reference is not None and not answered:
        against = (
            " by themselves, and fixed texts are as easy as for the reference, which wrote none"
        )
    names = ", ".join(rule_words(r.rule) for r in judgement.rulings if r.state == "not_examined")
    return f"{what}{against}; not examined: {names}." if names else f"{what}{against}."


def _sane(record: CheckRecord) -> str:
    """How many texts are sane, which is not said of those that are not."""
    n, bad = len(record.samples), sum(s.degenerate for s in record.samples)
    return f"{n} texts are sane" if not bad else f"{n - bad} of {n} texts are sane"


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


def _headline(
    record: CheckRecord, reference: Reference | None, judgement: Judgement
) -> tuple[Metric, ...]:
    """The figures that a person reads first; those of speed are invalid where the text is
    not sane.
    """
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
    if (bits := mean_bits(record)) is not None:
        theirs = mean_bits(reference.record) if reference else None
        against = "" if theirs is None else f", reference {theirs:.3f}"
        metrics.append(Metric("plain English", f"{bits:.3f} bits per byte{against}"))
    return tuple(metrics)


def _spread(figures: Mapping[str, float | None], digits: int) -> str:
    median, lo, hi = figures["median"], figures["min"], figures["max"]
    if median is None or lo is None or hi is None:
        return "unknown"
    return f"{median:.{digits}f} ({lo:.{digits}f} to {hi:.{digits}f})"
