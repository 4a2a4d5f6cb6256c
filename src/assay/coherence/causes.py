"""What a fault in one text most likely comes from, in the words of its finding."""

from __future__ import annotations

from assay.coherence.grading import Grade, Label
from assay.verdict import Finding, Severity

_CAUSES: dict[str, tuple[str, ...]] = {
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
    "no_choices": ("a content filter or a proxy that takes the choices away",),
}
"""Of outputs in which no passage is degenerate; a detection names its own causes."""
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
        causes=result.causes or _CAUSES.get(kind, ()),
        remedies=_REMEDIES[result.label],
    )
