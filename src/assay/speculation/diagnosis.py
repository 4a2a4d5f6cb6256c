"""The finding about the head itself: its state, likely causes in order, remedies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from assay.speculation.clues import Clue
from assay.speculation.head_state import HeadState, head_evidence
from assay.speculation.health import Assessment, Health
from assay.speculation.judged import Judged
from assay.verdict import Finding, Severity

VLLM = "https://github.com/vllm-project/vllm/"

_SILENT = (
    "the engine left the head's parameters uninitialised without saying so: the config announces a"
    " head that the checkpoint does not hold (vLLM 0.25.1 serves a head without its layer, or"
    " without any tensor, in silence)"
)


@dataclass(frozen=True)
class Diagnosis:
    """What is said of a head in one state; its usual causes come in order of likelihood."""

    name: str
    title: str
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    references: tuple[str, ...] = ()


DIAGNOSES: Mapping[HeadState, Diagnosis] = {
    HeadState.DEAD: Diagnosis(
        "head_dead",
        "no draft token is accepted: the head proposes nothing that fits",
        (
            _SILENT,
            (
                "the head's tensors were skipped or cast at load: their names or dtype differ from"
                " the quantization scheme"
            ),
            "an engine fault in the draft path (KV-cache group, block table, attention backend)",
        ),
        (
            "disable speculation until it is fixed: every draft costs time and earns nothing",
            (
                "see whether the head's tensors are there and of the declared dtype: `assay verify"
                " CHECKPOINT`"
            ),
            (
                "make a missing head loud: vLLM --model-loader-extra-config"
                " '{\"enable_weights_track\": true}'"
            ),
        ),
        (
            f"{VLLM}pull/35548",
            "https://github.com/sgl-project/sglang/issues/35797",
            "https://github.com/z-lab/paroquant/issues/47",
            "https://github.com/vllm-project/llm-compressor/issues/1843",
        ),
    ),
    HeadState.NOISE: Diagnosis(
        "head_noise",
        "draft tokens are accepted at chance level",
        (
            "the head's parameters are partly uninitialised",
            (
                "the draft does not belong to this target (another base model, another tokenizer, a"
                " wrong shared embedding or head)"
            ),
            (
                "the head is quantized and its scales were not read (rounding alone costs a few"
                " points)"
            ),
        ),
        (
            "disable speculation until it is fixed",
            "compare with a run of the unquantized checkpoint: --baseline SOURCE",
            (
                "keep the head in BF16 when quantizing, and list it in the config's ignore list"
                " under its fused names"
            ),
        ),
        (f"{VLLM}issues/41789", f"{VLLM}pull/38494", f"{VLLM}pull/43304"),
    ),
    HeadState.DIVERGED: Diagnosis(
        "head_diverged",
        "draft and target disagree too often for drafting to pay",
        (
            (
                "the head's norms are read by another convention, or a part of it is missing:"
                " position 0 near 10 %"
            ),
            (
                "the target is broken itself, or changed under the draft (fine-tuning); INT4, INT8"
                " and fp8 cost a head that reads its target's states a few points at most"
            ),
            "the draft is weak for this text: other domain, chat template, a temperature above 1",
            "an engine fault that hits later draft steps only",
        ),
        (
            "lower the number of speculative tokens, or use a draft made for this target",
            "measure how far the target itself moved: `assay compare`",
        ),
        (f"{VLLM}pull/41044", f"{VLLM}issues/47602", "https://arxiv.org/abs/2211.17192"),
    ),
    HeadState.UNCLEAR: Diagnosis(
        "low_acceptance",
        "too few draft tokens are accepted for drafting to pay",
        ("the head proposes tokens that the target rejects; there are too few hits to tell why",),
        ("collect more drafts",),
    ),
}

WORKS = 0.25
"""A position 0 that is surely above this, with hits that go on, is that of a head that was loaded
as it was trained.
"""

WORKING = Diagnosis(
    "low_acceptance",
    "the head works, and fewer than half of its first drafts are accepted: usual for sampled text,"
    " few for greedy text",
    (
        (
            "the text is sampled: at temperature 0.7 sound heads had a position 0 of 36 to 47 %,"
            " and one of 57 to 67 % at 0"
        ),
        "the draft is weak for this text: another domain, chat template or language",
        "the target changed under the draft (fine-tuning), or is broken itself",
    ),
    (
        (
            "say how the traffic is sampled, --temperature 0.7: a head is then judged by what sound"
            " heads reach there"
        ),
        "measure what drafting is worth: assay spec URL --baseline URL_WITHOUT_SPECULATION",
        "lower the number of speculative tokens if the tail is hardly accepted",
    ),
    ("https://arxiv.org/abs/2211.17192",),
)
"""What is said instead of `diverged` where counts show a head that works: they cannot tell sampling
from a weak draft.
"""

_SEEN_AT_START = {
    "weights_missing": "the engine says that the head's weights are missing",
    "weights_skipped": "head weights were skipped at load",
    "weights_uninitialised": "head weights were not initialised",
    "weights_cast": "head weights were cast to another dtype without a scale",
    "draft_vocab": "the draft's vocabulary does not fit the target's",
}


def likely_causes(
    state: HeadState | Diagnosis, clues: Sequence[Clue], checkpoint: Sequence[Finding] = ()
) -> list[str]:
    """Causes in order of likelihood: what was seen comes before what is usual."""
    usual = state.causes if isinstance(state, Diagnosis) else DIAGNOSES[state].causes
    seen = [f"the checkpoint: {f.title}" for f in checkpoint if f.severity.value != "info"]
    by_id = {c.id: c for c in clues}
    for name, text in _SEEN_AT_START.items():
        if clue := by_id.get(name):
            seen.append(f"{text} ({clue.count} lines, the first: {clue.text})")
    complete = any(
        f.id == "speculation.head_file" and f.evidence.get("status") == "ok" for f in checkpoint
    )
    return seen + [c for c in usual if not (complete and c is _SILENT)]


def quoted(clues: Sequence[Clue]) -> dict[str, str]:
    """Start-up messages that bear on speculation, as evidence."""
    return {c.id: c.text for c in clues}


def judge_head(judged: Judged) -> Finding | None:
    """The finding about the head itself; None where another finding (a dead engine, a collapse)
    says it all.
    """
    a, record = judged.assessment, judged.record
    only_late = a.collapse is not None and a.collapse.before.lo >= 0.5
    if a.health is Health.DEGRADED and (a.dead_engines or only_late):
        return None
    head = head_evidence(record)
    if a.health is Health.DEGRADED and head.state is not HeadState.DIVERGED:
        head = replace(head, state=HeadState.UNCLEAR)
    own = DIAGNOSES[head.state]
    if head.state is HeadState.DIVERGED and head.first is not None and head.first.lo >= WORKS:
        own = _working(judged)
    dead = head.state is HeadState.UNCLEAR and a.health is Health.BROKEN and not record.leading
    shown = DIAGNOSES[HeadState.DEAD] if dead else own
    bound = (
        f" over {head.drafts:,} drafts (true rate at most {head.upper:.2g})" if head.upper else ""
    )
    return Finding(
        f"speculation.{shown.name}",
        Severity.WARNING if judged.earns else Severity.ERROR,
        shown.title,
        detail=f"{a.reason}{bound}",
        evidence={**basis_figures(a), **head.to_json(), **quoted(judged.clues)},
        causes=likely_causes(own, judged.clues, judged.checkpoint),
        remedies=own.remedies,
        references=own.references,
    )


def _working(judged: Judged) -> Diagnosis:
    """`WORKING`, with what is known of the temperature."""
    told = next((c.text for c in judged.clues if c.id == "temperature"), None)
    if judged.temperature is not None:
        title = (
            "the head works, and less is accepted than of sound heads at temperature"
            f" {judged.temperature:g}"
        )
        return replace(
            WORKING, title=title, causes=WORKING.causes[1:], remedies=WORKING.remedies[1:]
        )
    if told and told not in ("0", "0.0"):
        first = (
            f"the text is sampled: the log names temperature {told}, at which sound heads are"
            " accepted less often"
        )
        return replace(WORKING, causes=(first, *WORKING.causes[1:]))
    return WORKING


def basis_figures(a: Assessment) -> dict[str, object]:
    """The figures that a finding quotes; `results.evidence` holds all of them."""
    return {"basis": a.basis, "rate": a.rate, "tokens_per_step": a.tokens_per_step}
