"""Rules on text that was billed or reasoned and never reached the user."""

from __future__ import annotations

from assay.coherence.record import CheckRecord, GradedReply
from assay.coherence.rules.degenerate import HARD_RATE
from assay.coherence.rules.rule import Rule, Ruling, Rulings, coherence_finding
from assay.stats import wilson
from assay.verdict import Severity

HIDDEN_TOKENS = 20
"""Tokens that must have been billed before missing text counts against the server."""


def hidden_tokens(record: CheckRecord, reference: CheckRecord | None, confidence: float) -> Rulings:
    """Tokens that were billed, and no text that was received: special tokens, stripped on their way
    out.
    """
    hidden = [s for s in record.samples if _is_hidden(s)]
    if len(hidden) < 2 or wilson(len(hidden), len(record.samples), confidence).lo <= HARD_RATE / 2:
        return None
    if reference is not None and sum(map(_is_hidden, reference.samples)) >= len(hidden):
        return None
    billed = sum(s.completion_tokens or 0 for s in hidden)
    received = sum(s.text_chars for s in hidden)
    title = (
        f"{billed} tokens were billed in {len(hidden)} answers, {received} characters of text were"
        " received"
    )
    finding = coherence_finding(
        "empty",
        Severity.ERROR,
        title,
        {"answers": len(hidden), "tokens_billed": billed, "chars_received": received},
        causes=(
            (
                "the model emits special or reserved tokens only, which the server strips from the"
                " text"
            ),
            "a reasoning or tool parser swallows the text",
        ),
        remedies=(
            "ask one question with skip_special_tokens=false and look at the raw tokens",
            "start the server without --reasoning-parser and --tool-call-parser, and ask again",
        ),
    )
    return Ruling(Rule.HIDDEN_TOKENS, "bad", title, (finding,))


def _is_hidden(sample: GradedReply) -> bool:
    tokens = sample.completion_tokens or 0
    return tokens >= HIDDEN_TOKENS and sample.text_chars < tokens / 4


def think_tag(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """Reasoning in the content up to a bare `</think>`: the way of a server without a reasoning
    parser, not a fault of form.
    """
    told = sum(s.think_tag for s in record.samples)
    if not told or (reference is not None and any(s.think_tag for s in reference.samples)):
        return None
    says = f"{told} of {len(record.samples)} answers hold the reasoning up to </think>"
    finding = coherence_finding(
        "think_tag",
        Severity.WARNING,
        f"{says}: users read it as the answer",
        {"answers": told},
        remedies=("start the server with the --reasoning-parser of this model",),
    )
    return Ruling(Rule.THINK_TAG, "good", says, (finding,))


def truncated(record: CheckRecord) -> Rulings:
    """Answers that ended inside their reasoning say nothing about the answer."""
    cut = [s for s in record.samples if s.label == "truncated_reasoning"]
    if not cut:
        return None
    says = f"{len(cut)} of {len(record.samples)} answers ended inside their reasoning"
    finding = coherence_finding(
        "truncated_reasoning",
        Severity.WARNING,
        f"{says}: the answer itself was never seen",
        {"truncated": len(cut), "texts": len(record.samples)},
        causes=(
            "the model reasons longer than the probe allows",
            "the reasoning parser missed the end of the reasoning",
        ),
        remedies=("run again with --token-budget 4, or switch reasoning off with --no-thinking",),
    )
    return Ruling(
        Rule.TRUNCATED_REASONING,
        "unclear" if len(cut) > len(record.samples) / 3 else "good",
        says,
        (finding,),
    )
