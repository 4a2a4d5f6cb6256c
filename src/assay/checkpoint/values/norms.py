"""Norm weights stored as `w` where the architecture computes `1 + w`, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from assay.checkpoint.findings import SHOWN, found, plural, warned
from assay.checkpoint.values.judgement import is_norm
from assay.checkpoint.values.statistics import Statistics
from assay.verdict import Finding

ONE_PLUS = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "paligemma",
        "vaultgemma",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
    }
)
"""Architectures whose RMS norm multiplies by 1 + w; the gated norm of their linear attention does
not.
"""

PLAIN = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "deepseek_v3",
        "glm4_moe",
        "mimo",
        "smollm3",
        "olmo2",
        "phi3",
        "granite",
    }
)

# What a norm multiplies by is positive nearly everywhere, and below 1 in some channel. Measured
# shares of norms: more than a fifth negative: SmolLM2 2 %, with 1 subtracted 98 %; under a
# twentieth negative: Gemma 3 41 %, with 1 added 98 %. Means tell nothing: SmolLM2's lie at 0.25,
# Gemma 3's between -0.4 and 323.
NEGATIVE, POSITIVE, MOST = 0.2, 0.05, 0.8

NEGATIVE_IN_HEAD = 0.01
"""In place of NEGATIVE for an EAGLE-3 head: its norms start at 1 and stay near it, so that w - 1 is
near 0, of either sign.
"""


def check_norms(statistics: Sequence[Statistics], model_type: str) -> Iterator[Finding]:
    """Backbone and draft head are judged apart: a head is often converted by another tool."""
    if model_type not in ONE_PLUS | PLAIN:
        return
    norms = [
        s
        for s in statistics
        if is_norm(s.name) and s.name.endswith("weight") and "linear_attn" not in s.name
    ]
    norms = [s for s in norms if "visual" not in s.name and "vision" not in s.name]
    for part, group in (
        ("the model", [s for s in norms if "mtp" not in s.name]),
        ("the multi-token-prediction head", [s for s in norms if "mtp" in s.name]),
    ):
        yield from _group(part, group, model_type)


def _group(part: str, norms: Sequence[Statistics], model_type: str) -> Iterator[Finding]:
    if len(norms) < 2:
        return
    if model_type in PLAIN:
        few = NEGATIVE_IN_HEAD if any("midlayer." in s.name for s in norms) else NEGATIVE
        odd = [s for s in norms if s.all_zero or s.negative_share > few]
        if len(odd) * 2 > len(norms):
            title = (
                f"norm weights of {part} are stored as w - 1, but {model_type} multiplies by w as"
                " it is"
            )
            yield _finding(title, odd, "they come from a format that stores w - 1; add 1 to them")
        return
    odd = [s for s in norms if not s.all_zero and s.negative_share < POSITIVE]
    if len(odd) > MOST * len(norms):
        title = f"norm weights of {part} are stored as 1 + w, but {model_type} adds the 1 itself"
        reason = "a converter added the 1 already; subtract it"
        if all(s.constant for s in odd):
            yield warned(
                "norm_convention",
                title + " (all of them constant)",
                causes=[reason],
                count=len(odd),
            )
        else:
            yield _finding(title, odd, reason)


def _finding(title: str, odd: Sequence[Statistics], cause: str) -> Finding:
    detail = (
        "The output is wrong everywhere, though every tensor is present and of the right shape."
    )
    references = ["https://github.com/youssofal/MTPLX/issues/176"]
    means = {s.name: round(s.mean, 4) for s in odd[:SHOWN]}
    title = f"{title} ({plural(len(odd), 'tensor')})"
    return found(
        "norm_convention", title, detail=detail, causes=[cause], references=references, means=means
    )
