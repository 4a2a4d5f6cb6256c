"""Rules on the counters that a server keeps and the prompts that it builds."""

from __future__ import annotations

from assay.coherence.record import CheckRecord
from assay.coherence.rules.rule import Rule, Ruling, Rulings, coherence_finding
from assay.verdict import Severity


def counters(record: CheckRecord) -> Rulings:
    """A counter of corrupted requests that moved during the run."""
    if not record.counters:
        return Ruling(
            Rule.SERVER_COUNTERS, "not_examined", "the server counts no corrupted answers"
        )
    moved = {name: value for name, value in record.counters.items() if value > 0}
    if not moved:
        return Ruling(Rule.SERVER_COUNTERS, "good", "the server's counters did not move")
    text = ", ".join(f"{name} +{value:g}" for name, value in sorted(moved.items()))
    title = f"the server itself counted corrupted answers during the run: {text}"
    causes = ("NaN in the logits: overflow in float16, a corrupt shard, a faulty kernel",)
    finding = coherence_finding(
        "corrupted_requests", Severity.ERROR, title, {"counters": moved}, causes=causes
    )
    return Ruling(Rule.SERVER_COUNTERS, "bad", text, (finding,))


_LATER_TURNS = frozenset({"second_turn", "tool_call"})
"""Probes whose last prompt holds the model's own first answer."""


def prompts(record: CheckRecord, reference: CheckRecord | None) -> Rulings:
    """The same messages must become the same number of prompt tokens: else template or tokenizer
    differ.
    """
    if reference is None:
        return Ruling(Rule.PROMPTS, "not_examined", "there is no reference to compare prompts with")
    ours, theirs = _prompt_tokens(record), _prompt_tokens(reference)
    shared = sorted(ours.keys() & theirs.keys())
    if len(shared) < 3:
        return Ruling(
            Rule.PROMPTS,
            "not_examined",
            f"{len(shared)} prompts were counted on both sides, 3 are needed",
        )
    other = {key: (ours[key], theirs[key]) for key in shared if ours[key] != theirs[key]}
    says = (
        f"{len(shared) - len(other)} of {len(shared)} prompts have the reference's number of tokens"
    )
    if len(other) <= len(shared) / 2:
        return Ruling(Rule.PROMPTS, "good", says)
    examples = {
        f"{probe} {form}".strip(): list(counts) for (probe, form), counts in list(other.items())[:5]
    }
    finding = coherence_finding(
        "prompt_mismatch",
        Severity.ERROR,
        f"the server builds other prompts from the same messages than the reference: {says}",
        {"prompts": len(shared), "different": len(other), "tokens_server_and_reference": examples},
        causes=(
            "the chat template is not the model's own",
            (
                "the tokenizer is another, or does not add the start token (BOS) that the model was"
                " trained with"
            ),
        ),
        remedies=(
            (
                "compare chat_template, tokenizer.json and bos_token of the served checkpoint with"
                " the original"
            ),
        ),
    )
    return Ruling(Rule.PROMPTS, "bad", says, (finding,))


def _prompt_tokens(record: CheckRecord) -> dict[tuple[str, str], int]:
    """Prompt tokens by probe and variant, for the prompts that do not depend on an
    earlier answer.
    """
    return {
        (probe.name, sample.variant): sample.prompt_tokens
        for probe in record.probes
        for sample in probe.samples
        if probe.name not in _LATER_TURNS and sample.prompt_tokens is not None
    }
