"""From what was measured to a verdict: a pure function of one record and, where there is one, of a
reference record.

A weak model that is whole must not be called broken, and a subtle fault must not be called sane. So
nothing rests on one text: rates carry intervals, and every rule answers `good`, `bad` or `unclear`.
One bad rule fails the subject; otherwise one unclear rule makes it inconclusive.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from assay.coherence.grading import Grade, Label
from assay.coherence.record import CheckRecord, Sample
from assay.coherence.rules import (
    Ruling,
    answers,
    bits,
    counters,
    degenerate_rate,
    depth,
    hard_texts,
    hidden_tokens,
    is_loop,
    prompts,
    same_answers,
    stutter,
    think_tag,
    throughput,
    timed_too_bad,
    tool_form,
    tools,
    truncated,
    unfinished,
)
from assay.verdict import Finding, Severity, Verdict


@dataclass(frozen=True)
class Judgement:
    """The verdict on a record, and how it came about."""

    verdict: Verdict
    rulings: tuple[Ruling, ...]
    throughput_valid: bool
    findings: tuple[Finding, ...] = ()


def judge(
    record: CheckRecord, reference: CheckRecord | None = None, confidence: float = 0.95
) -> Judgement:
    """Judge `record`, against `reference` where there is one, by intervals of this confidence."""
    found = [
        prompts(record, reference),
        hard_texts(record, reference, confidence),
        degenerate_rate(record, reference, confidence),
        hidden_tokens(record, reference, confidence),
        bits(record, reference, confidence),
        depth(record, reference, confidence),
        counters(record),
        think_tag(record, reference),
        truncated(record),
        unfinished(record),
        stutter(record, reference, confidence),
        same_answers(record, reference),
        tool_form(record, reference, confidence),
        tools(record, reference),
        answers(record, reference),
        throughput(record, reference, confidence),
    ]
    rulings = [r for one in found if one for r in (one if isinstance(one, list) else [one])]
    states = {ruling.state for ruling in rulings}
    if "bad" in states:
        verdict = Verdict.FAIL
    elif "unclear" in states or not (
        record.samples or any(level.answers for level in record.tools)
    ):
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.PASS
    findings = tuple(finding for ruling in rulings for finding in ruling.findings)
    if verdict is Verdict.INCONCLUSIVE and not any(
        r.state == "unclear" and r.findings for r in rulings
    ):
        findings = (*findings, _too_little(record, rulings))
    valid = (
        verdict is not Verdict.FAIL and bool(record.timed) and not timed_too_bad(record, reference)
    )
    return Judgement(verdict, tuple(rulings), valid, findings)


def _too_little(record: CheckRecord, rulings: Sequence[Ruling]) -> Finding:
    """Why the verdict is open, where the rules that leave it open have nothing to report."""
    unclear = [ruling.says for ruling in rulings if ruling.state == "unclear"]
    reason = "; ".join(unclear) or record.tools_skipped or "no text was graded"
    return Finding(
        id="coherence.unclear",
        severity=Severity.WARNING,
        title=f"too little was measured for a verdict: {reason}",
        remedies=("run all probes, or more --samples",),
    )


# Why might it be broken, in order of likelihood, with the evidence; what to run next; the
# known-coherent way back.

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


def likely_causes(bad: Sequence[Sample], record: CheckRecord, subject: Subject) -> tuple[str, ...]:
    """The causes that the bad texts support, the likeliest first, each with its evidence."""
    kinds = Counter(sample.kind or sample.label for sample in bad)

    def share(*words: str) -> float:
        """Share of the bad texts whose kind holds one of the words."""
        return sum(
            count for kind, count in kinds.items() if any(word in kind for word in words)
        ) / len(bad)

    flood = share("flood", "exclamation", "single_char")
    moved = ", ".join(f"{name} +{value:g}" for name, value in record.counters.items() if value)
    # A flood of special tokens is what broken logits pick; a few that leak point to the template
    # instead.
    salad = share(
        "salad", "soup", "special_token_flood", "script", "replacement", "empty", "reserved"
    )
    early = sum(not s.onset_char for s in bad) / len(bad)
    late = sum((s.onset_char or 0) >= LATE_ONSET_CHARS for s in bad) / len(bad)
    dtype = subject.kv_cache_dtype
    low = dtype is not None and dtype not in ("auto", "bfloat16", "float16", "half")
    eaten = sum(s.label == "empty" and (s.completion_tokens or 0) > 0 for s in bad)
    leaks = share("template", "special", "tag")
    loops = sum(is_loop(s.kind) for s in bad) / len(bad)
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
    weighed.sort(key=lambda item: -item[1])
    return tuple(
        f"{text} ({evidence})" for text, weight, evidence in weighed if weight >= LEAST_WEIGHT
    )


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
    """What to run next, and the rollback: the plainest configuration that is known to be coherent."""
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


# What a fault in a text most likely comes from, and what to do: the words of a finding for each
# kind.

_NAN = "NaN or infinite logits: every step then picks one fixed token"
_LOOP = (
    "a model that is weak, or damaged by quantisation or a low-bit KV cache, in greedy or cold"
    " sampling"
)
_WEIGHTS = "wrong weights: a corrupt shard, a wrong quantisation flag, a wrong rope_theta"
_TOKENIZER = "a tokenizer or chat template that does not belong to the checkpoint"

_CAUSES: dict[str, tuple[str, ...]] = {
    "single_char_flood": (_NAN, "a corrupt shard or missing scale"),
    "special_token_flood": (_NAN, _TOKENIZER),
    "special_token_leak": (_TOKENIZER, "special tokens that the server does not skip"),
    "template_leak": (_TOKENIZER, "an end-of-turn token that is missing from the stop tokens"),
    "think_tag_leak": (
        "the template opens the reasoning and the server's reasoning parser is off or does not fit",
    ),
    "malformed_arguments": (
        "a tool parser that does not fit the model",
        "a KV cache with too few bits",
    ),
    "tokenizer_marks": ("ids turned into text without the tokenizer's decoder", _TOKENIZER),
    "replacement_characters": (
        "a character's bytes split over tokens or chunks and decoded apart",
        _TOKENIZER,
    ),
    "control_characters": (_TOKENIZER, _WEIGHTS),
    "newline_loop": ("a grammar or JSON mode that allows blanks without end", _LOOP),
    "blank_flood": ("a grammar or JSON mode that allows blanks without end", _LOOP),
    "repeated_tool_call": ("the tool's result is not shown to the model by the template", _LOOP),
    "stutter": ("a KV cache with too few bits", _WEIGHTS),
    "token_soup": (_WEIGHTS, "a KV cache that is corrupt or has too few bits", _TOKENIZER),
    "mixed_scripts": (_WEIGHTS, "a KV cache that is corrupt or has too few bits", _TOKENIZER),
    "no_text": ("special tokens only, which the server strips", "a parser that ate the answer"),
    "blank_text": (
        "special tokens only, which the server strips",
        "a context past the model's window",
    ),
    "answer_in_reasoning_field": ("a reasoning parser that does not fit the model",),
    "open_think_tag": (
        "max_tokens too small for the reasoning",
        "a reasoning parser that is not active",
    ),
    "reasoning_cut": ("max_tokens too small for the reasoning",),
}
_REMEDIES = {
    Label.DEGENERATE: (
        "see whether the checkpoint is whole: `assay verify CHECKPOINT`",
        (
            "see whether the model itself writes so: `assay check URL --reference-engine"
            " hf:CHECKPOINT`"
        ),
    ),
    Label.EMPTY: ("look at usage.completion_tokens, and ask again with skip_special_tokens=false",),
    Label.TRUNCATED_REASONING: (
        "ask again with a larger max_tokens",
        "set the server's reasoning parser",
    ),
}


def causes_of(kind: str) -> tuple[str, ...]:
    """Likely causes of a kind of fault, the likeliest first."""
    if kind in _CAUSES:
        return _CAUSES[kind]
    return (
        (_WEIGHTS, "a KV cache that is corrupt or has too few bits")
        if "salad" in kind or "soup" in kind
        else (_LOOP,)
    )


def explain(path: str, result: Grade) -> Finding:
    """The finding for one faulty text."""
    kind = result.kind or ""
    where = (
        f" from character {result.onset_char:,} of {result.part}"
        if result.label is Label.DEGENERATE
        else ""
    )
    return Finding(
        id=f"coherence.{result.label.value}",
        severity=Severity.WARNING if result.label is Label.TRUNCATED_REASONING else Severity.ERROR,
        title=f"{path}: {result.label.value.replace('_', ' ')} ({kind.replace('_', ' ')}){where}",
        evidence={"path": path, "kind": kind, "onset_char": result.onset_char, **result.evidence},
        causes=causes_of(kind),
        remedies=_REMEDIES[result.label],
    )
