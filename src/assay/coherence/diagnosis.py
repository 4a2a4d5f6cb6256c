"""Why a server may be broken, in order of likelihood, and what to run next."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from assay.coherence.detection import Family
from assay.coherence.judge import Judgement
from assay.coherence.record import CheckRecord, GradedReply
from assay.verdict import Finding, Severity

ROLLBACK_CONTEXT = 8000
LATE_ONSET_CHARS = 300
"""A text that was sane for so long before it broke speaks of something that grows with the context.
"""
LEAST_WEIGHT = 0.15


@dataclass(frozen=True)
class Subject:
    """What is known of the server, for the diagnosis: names and settings it reports itself."""

    model: str
    kv_cache_dtype: str | None = None
    max_model_len: int | None = None
    kind: str | None = None


def diagnose(judgement: Judgement, record: CheckRecord, subject: Subject) -> tuple[Finding, ...]:
    """The findings of a judgement; failing ones get causes with their evidence, next steps and the
    rollback.
    """
    bad = [sample for sample in record.samples if sample.degenerate]
    causes = likely_causes(bad, record, subject) if bad else ()
    examples = {
        "onset_chars": sorted(s.onset_char for s in bad if s.onset_char is not None)[:20],
        "finish_reasons": dict(Counter(s.finish_reason or "none" for s in bad)),
    }
    return tuple(
        (
            replace(
                finding,
                causes=tuple(finding.causes) or causes,
                remedies=(*finding.remedies, *next_steps(subject)),
                evidence={
                    **finding.evidence,
                    **(examples if finding.id == "coherence.degenerate" and bad else {}),
                },
            )
            if finding.severity is Severity.ERROR
            else finding
        )
        for finding in judgement.findings
    )


def likely_causes(
    bad: Sequence[GradedReply], record: CheckRecord, subject: Subject
) -> tuple[str, ...]:
    """The causes that the bad texts support, the likeliest first, each with its evidence."""
    families = Counter(s.known_family for s in bad if s.label == "degenerate")

    def share(*wanted: str) -> float:
        """Share of the bad texts of some families."""
        return sum(families[family] for family in wanted) / len(bad)

    flood = share(Family.FLOOD, Family.TOKEN_FLOOD)
    moved = ", ".join(f"{name} +{value:g}" for name, value in record.counters.items() if value)
    # A flood of special tokens is what broken logits pick; a few that leak point to the template
    # instead.
    salad = share(Family.SALAD, Family.TOKEN_FLOOD, Family.BYTES)
    early = sum(not s.onset_char for s in bad) / len(bad)
    late = sum((s.onset_char or 0) >= LATE_ONSET_CHARS for s in bad) / len(bad)
    dtype = subject.kv_cache_dtype
    low = dtype is not None and dtype not in ("auto", "bfloat16", "float16", "half")
    eaten = sum(s.label == "empty" and (s.completion_tokens or 0) > 0 for s in bad)
    leaks = share(Family.LEAK, Family.TOKEN_FLOOD)
    loops = share(Family.LOOP)
    weighed = [
        (
            "NaN or infinity in the logits: overflow in float16, a faulty kernel, a corrupt tensor",
            0.9 * flood + (0.5 if moved else 0.0),
            moved or f"{flood:.0%} of the bad texts are floods of one character",
        ),
        (
            (
                "weights are not what the model was: corrupt shard, wrong quantisation flag or"
                " layout, wrong tokenizer"
            ),
            0.8 * salad + 0.2 * early,
            (
                f"{early:.0%} of the bad texts are bad from the first character, {salad:.0%} are no"
                " language"
            ),
        ),
        (
            (
                "the KV cache or the positions lose too much: KV dtype too aggressive, wrong"
                " rope_theta or rope_scaling"
            ),
            0.5 * late + (0.5 if low else 0.0),
            f"{late:.0%} of the bad texts began well"
            + (f"; the server runs kv_cache_dtype {dtype}" if dtype else ""),
        ),
        (
            "a reasoning or tool parser takes the text away, or special tokens are stripped",
            0.6 * eaten / len(bad),
            f"{eaten} answers were billed and came without text",
        ),
        (
            "chat template, tokenizer or end-of-text token do not belong to this model",
            0.9 * leaks,
            f"{leaks:.0%} of the bad texts leak template or special tokens",
        ),
        (
            "batching: CUDA graphs, attention kernel or scheduler mix up requests",
            float(_bad_only_in("burst", record)),
            "only the burst of concurrent requests is bad",
        ),
        (
            "prefix cache: what the first turn left there is read back wrong",
            float(_bad_only_in("second_turn", record)),
            "only the second turn is bad",
        ),
        (
            "the model itself: too small, a base model, or quantised too far",
            0.55 * loops,
            f"{loops:.0%} of the bad texts are loops, which small models write on their own",
        ),
    ]
    return _likeliest([*weighed, *_told_by_detectors(bad)])


def _told_by_detectors(bad: Sequence[GradedReply]) -> list[tuple[str, float, str]]:
    """The first cause that each detector names, weighed by the texts that it found."""
    counts = Counter(s.causes[0] for s in bad if s.causes)
    words = "of the bad texts, in the words of the detector"
    return [
        (cause, 0.9 * count / len(bad), f"{count / len(bad):.0%} {words}")
        for cause, count in counts.items()
    ]


def _likeliest(weighed: Sequence[tuple[str, float, str]]) -> tuple[str, ...]:
    """Causes with enough weight, the heaviest first."""
    ordered = sorted(weighed, key=lambda item: -item[1])
    return tuple(f"{text} ({why})" for text, weight, why in ordered if weight >= LEAST_WEIGHT)


def _bad_only_in(name: str, record: CheckRecord) -> bool:
    """Whether the probe `name` is bad and the others are not."""
    rates = {
        p.name: sum(s.degenerate for s in p.samples) / len(p.samples)
        for p in record.probes
        if p.samples
    }
    others = [rate for probe, rate in rates.items() if probe != name]
    return rates.get(name, 0.0) >= 0.5 and bool(others) and max(others) < 0.25


def next_steps(subject: Subject) -> tuple[str, ...]:
    """What to run next, and the rollback: the plainest configuration that is known to be
    coherent.
    """
    return (
        "assay verify CHECKPOINT    # is every byte and every tensor where it should be?",
        rollback_command(subject),
    )


def rollback_command(subject: Subject) -> str:
    """The known-coherent baseline as one command: no parallelism, no speculation, no KV
    compression, eager.
    """
    context = min(ROLLBACK_CONTEXT, subject.max_model_len or ROLLBACK_CONTEXT)
    # A report may be shown to others, so a folder of this machine stays in `subject` alone.
    local = subject.model.startswith(("/", "~", ".")) or "\\" in subject.model
    model = "CHECKPOINT" if local else shlex.quote(subject.model)
    return (
        f"vllm serve {model} --tensor-parallel-size 1 --pipeline-parallel-size 1 "
        f"--kv-cache-dtype auto --enforce-eager --max-model-len {context}"
    )
