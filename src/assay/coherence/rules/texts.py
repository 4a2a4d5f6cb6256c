"""Are the texts degenerate, empty, cut off, or billed and never received?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.coherence.record import CheckRecord, Sample
from assay.coherence.rules.ruling import Ruling, State, interval_json, kinds_of, percent
from assay.stats.wilson import newcombe, wilson
from assay.verdict import Finding, Severity

HARD_RATE = 0.05
"""Without a reference: the rate of floods, salads and empty answers must not lie above this (lower bound)."""
MAJORITY = 0.5
"""Without a reference: more degenerate texts than this (lower bound) is a failure, whatever their kind."""
TOLERATED = 1 / 3
"""A subject passes without a reference if its degenerate rate stays below this (upper bound)."""
RATE_MARGIN = 0.10
"""With a reference: so much more degenerate than the reference (lower bound of the difference) is a failure."""
RATE_CLEAR = 0.25
"""With a reference: if the difference may still be larger than this (upper bound), the rate alone is unclear."""
HIDDEN_TOKENS = 20
"""Tokens that must have been billed before missing text is held against the server."""
_LOOPS_BY_NAME = frozenset({"the_the_the", "a_a_a", "few_words", "repeated_tool_call"})
_HARD_LOOPS = frozenset({"newline_loop", "delimiter_loop"})
"""Loops of nothing but blanks and marks: no model that is whole ends there, so they count as floods."""


def is_loop(kind: str | None) -> bool:
    """Whether a kind is a loop, which a small healthy model writes too, rather than a flood or a salad."""
    return kind is not None and ("loop" in kind or kind in _LOOPS_BY_NAME) and kind not in _HARD_LOOPS


def is_hard(sample: Sample) -> bool:
    """Whether the text is one that no sane model writes at any size: a flood, a salad, nothing at all."""
    return sample.degenerate and not is_loop(sample.kind)


def hard_texts(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Floods, salads and empty answers: no model that is whole writes them."""
    n = len(record.samples)
    if not n:
        return ()
    hard = [sample for sample in record.samples if is_hard(sample)]
    rate = wilson(len(hard), n)
    says = f"{len(hard)} of {n} texts are floods, salads or empty ({percent(rate)})"
    evidence: dict[str, Any] = {
        "texts": n,
        "hard": len(hard),
        "rate": interval_json(rate),
        "kinds": kinds_of(hard),
    }
    if reference is not None and reference.samples:
        theirs = [sample for sample in reference.samples if is_hard(sample)]
        difference = newcombe(len(hard), n, len(theirs), len(reference.samples))
        evidence["reference_hard"] = len(theirs)
        evidence["difference"] = interval_json(difference)
        says += f"; reference {len(theirs)} of {len(reference.samples)}"
        bad = len(hard) >= 3 and difference.lo > 0
        unclear = not bad and difference.hi > RATE_CLEAR
    else:
        bad = len(hard) >= 3 and rate.lo > HARD_RATE
        unclear = not bad and rate.hi > RATE_CLEAR
    if not bad:
        return (Ruling("hard_texts", "unclear" if unclear else "good", says),)
    finding = Finding(
        id="coherence.degenerate",
        severity=Severity.ERROR,
        title=f"the server writes text that no sane model writes: {len(hard)} of {n} texts ({percent(rate)})",
        evidence=evidence,
    )
    return (Ruling("hard_texts", "bad", says, (finding,)),)


def degenerate_rate(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """All degenerate texts, loops included; a weak model loops too, so only a large share or a difference counts."""
    n = len(record.samples)
    if not n:
        return ()
    bad_texts = [sample for sample in record.samples if sample.degenerate]
    rate = wilson(len(bad_texts), n)
    says = f"{len(bad_texts)} of {n} texts are degenerate ({percent(rate)})"
    evidence: dict[str, Any] = {
        "texts": n,
        "degenerate": len(bad_texts),
        "rate": interval_json(rate),
        "kinds": kinds_of(bad_texts),
    }
    if reference is not None and reference.samples:
        theirs = sum(sample.degenerate for sample in reference.samples)
        difference = newcombe(len(bad_texts), n, theirs, len(reference.samples))
        evidence |= {
            "reference_texts": len(reference.samples),
            "reference_degenerate": theirs,
            "difference": interval_json(difference),
        }
        says += f"; reference {theirs} of {len(reference.samples)}, difference {percent(difference)}"
        if difference.lo > RATE_MARGIN:
            title = (
                f"the server degenerates more than the model itself does: {len(bad_texts)} of {n} texts against "
                f"{theirs} of {len(reference.samples)}"
            )
            return (Ruling("degenerate_rate", "bad", says, (_degenerate(Severity.ERROR, title, evidence),)),)
        if difference.hi > RATE_CLEAR:
            return (Ruling("degenerate_rate", "unclear", says, (_thin(says, evidence, reference),)),)
        return (Ruling("degenerate_rate", "good", says),)
    if rate.lo > MAJORITY:
        title = f"most texts are degenerate: {len(bad_texts)} of {n} ({percent(rate)})"
        return (Ruling("degenerate_rate", "bad", says, (_degenerate(Severity.ERROR, title, evidence),)),)
    if rate.hi > TOLERATED:
        return (Ruling("degenerate_rate", "unclear", says, (_thin(says, evidence, None),)),)
    if bad_texts:
        title = f"{len(bad_texts)} of {n} texts are degenerate; a small model does that on its own"
        return (Ruling("degenerate_rate", "good", says, (_degenerate(Severity.WARNING, title, evidence),)),)
    return (Ruling("degenerate_rate", "good", says),)


def _degenerate(severity: Severity, title: str, evidence: Mapping[str, Any]) -> Finding:
    return Finding(id="coherence.degenerate", severity=severity, title=title, evidence=evidence)


def _thin(says: str, evidence: Mapping[str, Any], reference: CheckRecord | None) -> Finding:
    remedies = ["run again with more --samples"]
    if reference is None:
        remedies.insert(
            0,
            "compare with the model itself: --reference-engine hf:PATH, or --reference run.json from a healthy server",
        )
    return Finding(
        id="coherence.unclear",
        severity=Severity.WARNING,
        title=f"too few texts to tell a weak model from a broken server: {says}",
        evidence=evidence,
        remedies=remedies,
    )


def hidden_tokens(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Tokens that were billed, and no text that was received: special tokens, stripped on their way out."""
    hidden = [s for s in record.samples if _is_hidden(s)]
    if len(hidden) < 2 or wilson(len(hidden), len(record.samples)).lo <= HARD_RATE / 2:
        return ()
    if reference is not None and sum(map(_is_hidden, reference.samples)) >= len(hidden):
        return ()
    billed = sum(s.completion_tokens or 0 for s in hidden)
    received = sum(s.text_chars for s in hidden)
    title = (
        f"{billed} tokens were billed in {len(hidden)} answers, {received} characters of text were received"
    )
    finding = Finding(
        id="coherence.empty",
        severity=Severity.ERROR,
        title=title,
        evidence={"answers": len(hidden), "tokens_billed": billed, "chars_received": received},
        causes=(
            "the model emits special or reserved tokens only, which the server strips from the text",
            "a reasoning or tool parser swallows the text",
        ),
        remedies=(
            "ask one question with skip_special_tokens=false and look at the raw tokens",
            "start the server without --reasoning-parser and --tool-call-parser, and ask again",
        ),
    )
    return (Ruling("hidden_tokens", "bad", title, (finding,)),)


def _is_hidden(sample: Sample) -> bool:
    tokens = sample.completion_tokens or 0
    return tokens >= HIDDEN_TOKENS and sample.text_chars < tokens / 4


def truncated(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """Answers that ended inside their reasoning say nothing about the answer."""
    cut = [s for s in record.samples if s.label == "truncated_reasoning"]
    if not cut:
        return ()
    says = f"{len(cut)} of {len(record.samples)} answers ended inside their reasoning"
    finding = Finding(
        id="coherence.truncated_reasoning",
        severity=Severity.WARNING,
        title=f"{says}: the answer itself was never seen",
        evidence={"truncated": len(cut), "texts": len(record.samples)},
        causes=(
            "the model reasons longer than the probe allows",
            "the reasoning parser missed the end of the reasoning",
        ),
        remedies=("run again with --token-budget 4, or switch reasoning off with --no-thinking",),
    )
    state: State = "unclear" if len(cut) > len(record.samples) / 3 else "good"
    return (Ruling("truncated_reasoning", state, says, (finding,)),)


def unfinished(record: CheckRecord) -> Sequence[Ruling]:
    """Steps that the server can do and did not finish leave the verdict open."""
    steps = [
        ("coherence.probe_unfinished", f"the probe {probe.name}", probe.failed, len(probe.samples))
        for probe in record.probes
    ]
    steps += [
        ("coherence.scores_unfinished", "scoring fixed texts", record.passages_failed, len(record.passages)),
        ("throughput.unfinished", "timing", record.timed_failed, len(record.timed)),
    ]
    return [
        Ruling("unfinished", "unclear", f"{step}: {reason}", (_unfinished(id_, step, reason, samples),))
        for id_, step, reason, samples in steps
        if reason
    ]


def _unfinished(id_: str, step: str, reason: str, samples: int) -> Finding:
    return Finding(
        id=id_,
        severity=Severity.WARNING,
        title=f"{step} could not be finished: {reason}",
        evidence={"step": step, "samples": samples},
    )
