"""The rule on doubled words and syllables."""

from __future__ import annotations

from assay.coherence.detectors.stutter import HEALTHY, TIMES, Counts, judge_stutter
from assay.coherence.record import CheckRecord
from assay.coherence.rules.rule import Rule, Ruling, Rulings, State, coherence_finding
from assay.verdict import Severity


def stutter(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Doubled words and syllables over all texts of a run, at many times the rate of healthy
    models, or of the reference.

    Texts that are degenerate otherwise are left out: loops say things twice too.
    """
    counts = _stutter_counts(record)
    theirs = judge_stutter(_stutter_counts(reference)) if reference is not None else None
    own_rate = theirs.rate if theirs is not None and theirs.words else 0.0
    healthy = max(HEALTHY, own_rate)
    rate = judge_stutter(counts, healthy, confidence)
    if not rate.words:
        return Ruling(Rule.STUTTER, "not_examined", "no prose was written")
    says = (
        f"{rate.stutters} of {rate.words:,} words are said twice, {1000 * rate.rate:.1f} in 1,000"
    )
    says += (
        f", of the reference {1000 * own_rate:.1f}" if theirs is not None and theirs.words else ""
    )
    # Few words leave most rates open; only one that is as high as a fault's, in two texts or more,
    # asks for more of them.
    high = rate.rate > TIMES * healthy and sum(c.total > 0 for c in counts) > 1
    state: State = "unclear" if rate.verdict == "unclear" and high else "good"
    if rate.verdict != "bad":
        return Ruling(Rule.STUTTER, state, says)
    examples = [s.stutter_text for s in record.samples if s.stutter_text and s.words]
    finding = coherence_finding(
        "stutter",
        Severity.ERROR,
        f"words and syllables double at {rate.rate / healthy:.0f} times the rate of a healthy"
        f" model: {says}",
        {
            "words": rate.words,
            "stutters": rate.stutters,
            "healthy_rate": healthy,
            "rate": {"value": rate.rate, "lo": rate.lo, "hi": rate.hi},
        },
        detail="; ".join(examples[:5])[:300],
        causes=(
            (
                "a KV cache with too few bits (fp8 without scales; models with large key biases,"
                " such as Qwen2.5, suffer most)"
            ),
            "weights that lost too much in quantisation",
        ),
        remedies=("serve with --kv-cache-dtype auto and check again",),
    )
    return Ruling(Rule.STUTTER, "bad", says, (finding,))


def _stutter_counts(record: CheckRecord) -> list[Counts]:
    sane = (s for s in record.samples if not s.degenerate or s.kind == "stutter")
    return [Counts(words=s.words, doubled_words=s.stutters) for s in sane]
