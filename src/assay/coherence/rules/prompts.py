"""Does the server build the same prompts from the same messages as the reference?"""

from __future__ import annotations

from collections.abc import Sequence

from assay.coherence.record import CheckRecord
from assay.coherence.rules.ruling import Ruling
from assay.verdict import Finding, Severity

_LATER_TURNS = frozenset({"second_turn", "tool_call"})
"""Probes whose last prompt holds the model's own first answer."""


def prompts(record: CheckRecord, reference: CheckRecord | None) -> Sequence[Ruling]:
    """The same messages must become the same number of prompt tokens: else template or tokenizer differ."""
    if reference is None:
        return ()
    ours, theirs = _prompt_tokens(record), _prompt_tokens(reference)
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) < 3:
        return ()
    other = {key: (ours[key], theirs[key]) for key in shared if ours[key] != theirs[key]}
    says = f"{len(shared) - len(other)} of {len(shared)} prompts have the reference's number of tokens"
    if len(other) <= len(shared) / 2:
        return (Ruling("prompts", "good", says),)
    examples = {
        f"{probe} {variant}".strip(): list(counts) for (probe, variant), counts in list(other.items())[:5]
    }
    finding = Finding(
        id="coherence.prompt_mismatch",
        severity=Severity.ERROR,
        title=f"the server builds other prompts from the same messages than the reference: {says}",
        evidence={"prompts": len(shared), "different": len(other), "tokens_server_and_reference": examples},
        causes=(
            "the chat template is not the model's own",
            "the tokenizer is another, or does not add the start token (BOS) that the model was trained with",
        ),
        remedies=(
            "compare chat_template, tokenizer.json and bos_token of the served checkpoint with the original",
        ),
    )
    return (Ruling("prompts", "bad", says, (finding,)),)


def _prompt_tokens(record: CheckRecord) -> dict[tuple[str, str], int]:
    """Prompt tokens by probe and variant, for the prompts that do not depend on an earlier answer."""
    return {
        (probe.name, sample.variant): sample.prompt_tokens
        for probe in record.probes
        for sample in probe.samples
        if probe.name not in _LATER_TURNS and sample.prompt_tokens is not None
    }
