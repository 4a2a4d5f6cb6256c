"""Prose without its blanks: `Thebestwaytocleanacastironpan`."""

from __future__ import annotations

import re

from assay.coherence.detection import TOKENIZER, WEIGHTS, Detection, Family, quote
from assay.coherence.text import TextView

LEAST_RUN, LEAST_LETTERS = 24, 120
"""Letters in a row without a blank that no word has, and letters in such rows in all."""
SMALL_WORDS = 1 / 30
"""Small words in these rows for each letter: names and encoded data hold few."""
_RUN = re.compile(rf"[A-Z]?[a-z]{{{LEAST_RUN},}}+")
_PIECE = re.compile(r"\S+")
_SMALL = re.compile(
    r"the|and|with|that|this|for|from|into|which|when|are|was|you|not|have|will|its"
)
DISTINCT = 5
NEAR = 400
"""Code points between two rows of one passage."""


def detect_lost_blanks(view: TextView) -> Detection | None:
    """Find a passage of English whose words stand without blanks between them."""
    passage: list[re.Match[str]] = []
    for run in _RUN.finditer(view.text):
        if passage and run.start() - passage[-1].end() > NEAR:
            passage = []
        passage.append(run)
        if sum(m.end() - m.start() for m in passage) < LEAST_LETTERS:
            continue
        letters = "".join(m.group().lower() for m in passage)
        small = _SMALL.findall(letters)
        if len(small) < SMALL_WORDS * len(letters) or len(set(small)) < DISTINCT:
            if len(passage) > 20:
                passage = passage[1:]
            continue
        first = passage[0].start()
        if _is_address(view.text, passage):
            return None
        return Detection(
            "lost_blanks",
            first,
            run.end(),
            {"text": quote(view.text[first : run.end()]), "letters": len(letters)},
            Family.BYTES,
            ("text put together from tokens without their blanks", TOKENIZER, WEIGHTS),
        )
    return None


def _is_address(text: str, passage: list[re.Match[str]]) -> bool:
    """Whether the rows are tags or parts of addresses, which are written without blanks."""
    before = sum(text[m.start() - 1 : m.start()] in ("#", "/", "@", "_", "-") for m in passage)
    return 2 * before > len(passage)
