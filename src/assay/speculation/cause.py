"""Likely causes of a bad head, in order, from what the engine said at start and what the checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from assay.speculation.clues import Clue
from assay.speculation.head import HeadState
from assay.verdict import Finding

VLLM = "https://github.com/vllm-project/vllm/"
REFERENCES: Mapping[HeadState, tuple[str, ...]] = {
    HeadState.DEAD: (
        f"{VLLM}pull/35548",
        "https://github.com/sgl-project/sglang/issues/35797",
        "https://github.com/z-lab/paroquant/issues/47",
        "https://github.com/vllm-project/llm-compressor/issues/1843",
    ),
    HeadState.NOISE: (f"{VLLM}issues/41789", f"{VLLM}pull/38494", f"{VLLM}pull/43304"),
    HeadState.DIVERGED: (f"{VLLM}pull/41044", f"{VLLM}issues/47602", "https://arxiv.org/abs/2211.17192"),
    HeadState.UNCLEAR: (),
}

_SILENT = (
    "the engine left the head's parameters uninitialised without saying so: the config announces a head that the "
    "checkpoint does not hold (older vLLM, and quantized checkpoints up to today, load on in silence)"
)
_GENERIC: Mapping[HeadState, tuple[str, ...]] = {
    HeadState.DEAD: (
        _SILENT,
        "the head's tensors were skipped or cast at load: their names or dtype differ from the quantization scheme",
        "an engine fault in the draft path (KV-cache group, block table, attention backend)",
    ),
    HeadState.NOISE: (
        "the draft does not belong to this target (another base model, another tokenizer, a wrong shared head)",
        "the head was quantized, or its scales or norm convention were read wrongly",
        "the head's parameters are partly uninitialised",
    ),
    HeadState.DIVERGED: (
        "the draft is weak for this text: other domain, chat template, high temperature with greedy proposals",
        "the target changed under the draft (fine-tuning, strong quantization)",
        "an engine fault that hits later draft steps only",
    ),
    HeadState.UNCLEAR: (
        "the head proposes tokens that the target rejects; there are too few hits to tell why",
    ),
}
REMEDIES: Mapping[HeadState, tuple[str, ...]] = {
    HeadState.DEAD: (
        "disable speculation until it is fixed: every draft costs time and earns nothing",
        "assay verify CHECKPOINT says whether the head's tensors are there and of the declared dtype",
        "make a missing head loud: vLLM --model-loader-extra-config '{\"enable_weights_track\": true}'",
    ),
    HeadState.NOISE: (
        "disable speculation until it is fixed",
        "compare with a run of the unquantized checkpoint: --baseline SOURCE",
        "keep the head in BF16 when quantizing, and list it in the config's ignore list under its fused names",
    ),
    HeadState.DIVERGED: (
        "lower the number of speculative tokens, or use a draft made for this target",
        "assay compare measures how far the target itself moved",
    ),
    HeadState.UNCLEAR: ("collect more drafts",),
}


def likely_causes(state: HeadState, clues: Sequence[Clue], checkpoint: Sequence[Finding] = ()) -> list[str]:
    """Causes in order of likelihood: what was seen comes before what is usual."""
    seen = [f"the checkpoint: {f.title}" for f in checkpoint if f.severity.value != "info"]
    by_id = {c.id: c for c in clues}
    for name, text in (
        ("weights_missing", "the engine says that the head's weights are missing"),
        ("weights_skipped", "head weights were skipped at load"),
        ("weights_uninitialised", "head weights were not initialised"),
        ("weights_cast", "head weights were cast to another dtype without a scale"),
        ("draft_vocab", "the draft's vocabulary does not fit the target's"),
    ):
        if name in by_id:
            clue = by_id[name]
            seen.append(f"{text} ({clue.count} lines, the first: {clue.text})")
    usual = list(_GENERIC[state])
    if any(f.id == "speculation.head_file" and f.evidence.get("status") == "ok" for f in checkpoint):
        usual = [c for c in usual if c is not _SILENT]
    return seen + usual


def quoted(clues: Sequence[Clue]) -> dict[str, str]:
    """Start-up messages that bear on speculation, as evidence."""
    return {c.id: c.text for c in clues}
