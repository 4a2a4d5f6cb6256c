"""The results of a check in the JSON of schema assay/1."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from assay.coherence.judge import Judgement
from assay.coherence.options import Plan
from assay.coherence.record import CheckRecord, ProbeResult, Reference, ToolLevel
from assay.coherence.speed import aggregate_tokens_per_s, summary
from assay.coherence.tools import against, checked_answers, paired, standing
from assay.stats import interval_json, wilson
from assay.verdict import jsonable


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
            "mean": mean_bits(record),
            "skipped": record.passages_skipped,
            "unfinished": record.passages_failed,
            "passages": [jsonable(p) | {"bits_per_byte": p.bits_per_byte} for p in record.passages],
        },
        "counters": dict(record.counters),
        "tools": [_level_json(level) for level in record.tools],
        "tools_skipped": record.tools_skipped,
        "needs": jsonable(record.needs),
        "streaming": {"checks": jsonable(record.streams), "skipped": record.streams_skipped},
    }


def mean_bits(record: CheckRecord) -> float | None:
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
        "bits_per_byte": mean_bits(record),
        "timed_degenerate": sum(text.degenerate for text in record.timed),
        "timed": len(record.timed),
    }
