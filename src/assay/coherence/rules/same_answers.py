"""The rule on one answer to many questions."""

from __future__ import annotations

from collections import defaultdict

from assay.coherence.record import CheckRecord
from assay.coherence.rules.rule import Rule, Ruling, Rulings, coherence_finding
from assay.verdict import Severity

LEAST_CHARS = 20
"""Shorter answers can be the same by chance: a word found in a long text, a yes."""
LEAST_QUESTIONS = 4
"""So many different questions must have got the same answer."""


def same_answers(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """One answer to most questions is no model's work: a page in between, a stuck prompt, requests
    that mix.

    A warning alone, since every single text may be sane; an error where a reference told the
    questions apart.
    """
    questions, shared, text = _most_shared(record)
    if not shared:
        return None
    says = f"{shared} of {questions} different questions got the same answer, word for word"
    told_apart = (
        reference is not None and bool(reference.samples) and not _most_shared(reference)[1]
    )
    finding = coherence_finding(
        "same_answer",
        Severity.ERROR if told_apart else Severity.WARNING,
        says,
        {"questions": questions, "same_answer": shared},
        detail=text,
        causes=(
            "something between here and the model answers: a proxy, a cache, a page of an error",
            (
                "the chat template drops the question, or requests that run together get each"
                " other's answers"
            ),
        ),
        remedies=(
            "ask two different questions by hand, and compare the prompt_tokens of both answers",
        ),
    )
    return Ruling(Rule.SAME_ANSWERS, "bad" if told_apart else "good", says, (finding,))


def _most_shared(record: CheckRecord) -> tuple[int, int, str]:
    """How many questions there were, how many of them got the answer that most got (0 if too few),
    and its head.
    """
    asked: dict[tuple[str, int], set[tuple[str, str]]] = defaultdict(set)
    questions = {(probe.name, s.variant) for probe in record.probes for s in probe.samples}
    for probe in record.probes:
        for sample in probe.samples:
            # Degenerate texts have a rule of their own, and loops of one kind look
            # alike.
            if sample.label == "ok" and sample.text_chars >= LEAST_CHARS:
                asked[sample.text_head, sample.text_chars].add((probe.name, sample.variant))
    if not asked:
        return len(questions), 0, ""
    (text, _), who = max(asked.items(), key=lambda item: len(item[1]))
    enough = len(who) >= LEAST_QUESTIONS and len(who) > len(questions) / 2
    return len(questions), len(who) if enough else 0, text
