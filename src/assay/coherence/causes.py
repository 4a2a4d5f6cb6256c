"""What a fault in one text most likely comes from, in the words of its finding."""

from __future__ import annotations

from assay.coherence.grading import Grade, Label
from assay.verdict import Finding, Severity

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
