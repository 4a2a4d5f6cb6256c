"""Records to judge, built from a few words."""

from __future__ import annotations

from assay.coherence.record import (
    AnswerCheck,
    CheckRecord,
    GradedReply,
    PassageScore,
    ProbeResult,
    TimedText,
)

TEXT = (
    "The old mill stood by the river, and nobody had lived there since the winter of the great"
    " flood."
)


def sample(label: str = "ok", kind: str | None = None, **fields: object) -> GradedReply:
    bad = label != "ok"
    given: dict[str, object] = {
        "label": label,
        "kind": kind,
        "onset_char": 0 if bad else None,
        "finish_reason": "stop",
        "completion_tokens": 40,
        "text_head": TEXT,
        "text_chars": 160,
        "coherent_chars": 0 if bad else 160,
        "temperature": 0.7,
        "seed": 1,
        "prompt_tokens": 30,
        **fields,
    }
    return GradedReply(**given)  # type: ignore[arg-type]


def samples(ok: int = 0, loops: int = 0, floods: int = 0, empty: int = 0) -> list[GradedReply]:
    return [
        *[sample()] * ok,
        *[sample("degenerate", "sentence_loop", onset_char=700)] * loops,
        *[sample("degenerate", "single_char_flood")] * floods,
        *[sample("empty", "no_text", text_chars=0, completion_tokens=200, finish_reason="length")]
        * empty,
    ]


def passages(
    loss: float = 0.0, deep_loss: float = 0.0, base: float = 0.9
) -> tuple[PassageScore, ...]:
    """Twelve texts of 500 bytes near the start and eight at depth; texts differ, losses (bits per
    byte) hardly do.
    """
    nats_per_bit = 0.6931471805599453 * 500

    def score(index: int, depth: int, bits: float) -> PassageScore:
        return PassageScore(
            f"p{index:02d}", depth, (bits + 0.001 * (index % 3)) * nats_per_bit, 500
        )

    return (
        *(score(i, 0, base + 0.05 * i + loss) for i in range(12)),
        *(score(i, 900, base + 0.05 * i + loss + deep_loss) for i in range(4)),
        *(score(i, 1800, base + 0.05 * i + loss + deep_loss) for i in range(4)),
    )


def timed(label: str = "ok") -> TimedText:
    bad = label != "ok"
    return TimedText(
        label=label,
        kind="sentence_loop" if bad else None,
        onset_char=20 if bad else None,
        text_head=TEXT,
        text_chars=600,
        coherent_chars=150 if bad else 600,
        prompt_tokens=30,
        completion_tokens=150,
        ttft_s=0.1,
        e2e_s=5.1,
        itl_s=5 / 149,
        decode_tokens_per_s=149 / 5,
        round=1,
    )


def record(
    texts: list[GradedReply],
    scores: tuple[PassageScore, ...] = (),
    timed_texts: tuple[TimedText, ...] = (timed(), timed(), timed()),
    probe: str = "story",
    **fields: object,
) -> CheckRecord:
    result = ProbeResult(probe, probe, tuple(texts))
    return CheckRecord(probes=(result,), passages=scores, timed=timed_texts, **fields)  # type: ignore[arg-type]


def answered(passed: int, wrong: int) -> list[GradedReply]:
    right = sample(checks=(AnswerCheck("names_paris", True),))
    other = sample(checks=(AnswerCheck("names_paris", False, "the answer does not name Paris"),))
    return [*[right] * passed, *[other] * wrong]
