"""Characters that stand for broken bytes, and a tokenizer's internal marks: a decoding fault."""

from __future__ import annotations

import re

from assay.coherence.arrays import Spans
from assay.coherence.detection import TOKENIZER, Detection, Family
from assay.coherence.detectors.token_mentions import SPECIAL
from assay.coherence.text import TextView

_SPLIT = "a character's bytes split over tokens or chunks and decoded apart"
_BROKEN = re.compile("\ufffd+")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")
_LONE = re.compile("[\ud800-\udfff]")


def detect_replacement(view: TextView) -> Detection | None:
    """The first of enough replacement, control or lone surrogate characters."""
    n = len(view.text)
    for kind, pattern, share, causes in (
        ("replacement_characters", _BROKEN, 0.002, (_SPLIT, TOKENIZER)),
        ("replacement_characters", _LONE, 0.002, (_SPLIT, TOKENIZER)),
        ("control_characters", _CONTROL, 0.01, ()),
    ):
        runs = [m.span() for m in pattern.finditer(view.text)]
        count = sum(end - start for start, end in runs)
        if (count >= 3 and count >= share * n) or count >= 40:
            evidence = {"count": count, "runs": len(runs)}
            return Detection(kind, runs[0][0], runs[-1][1], evidence, Family.BYTES, causes)
    return None


_BETWEEN_TEXT = re.compile(r"(?<=[\w.,;:!?)*\"'])▁{1,8}(?=[\w(*\"'#-])")
"""`▁` glued to text on both sides: no rule, bar or sparkline is written so."""
LEAST_BETWEEN = 3
_BYTE_LEVEL = re.compile(r"[A-Za-z][Ġ▁][A-Za-z]|Ċ")


def find_tokenizer_marks(view: TextView) -> Detection | None:
    """`Ġ`, `▁` or `Ċ` between letters: ids were turned into text without the tokenizer's
    decoder.
    """
    marks = list(_BYTE_LEVEL.finditer(view.text))
    if len(marks) < 5 or len(marks) < len(view.text) / 60:
        named = Spans(m.span() for m in SPECIAL.finditer(view.text))
        marks = [m for m in _BETWEEN_TEXT.finditer(view.text) if m.start() not in named]
        if len(marks) < LEAST_BETWEEN or len({view.text[m.end()] for m in marks}) < 2:
            return None
    return Detection(
        "tokenizer_marks",
        marks[0].start(),
        marks[-1].end(),
        {"count": len(marks)},
        Family.BYTES,
        ("ids turned into text without the tokenizer's decoder", TOKENIZER),
    )
