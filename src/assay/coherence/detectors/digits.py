"""Digit salad: numbers glued to the words of a sentence, or lone digits strewn over blank lines."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from assay.coherence.detection import Detection, Family
from assay.coherence.text import TextView

_GLUED = re.compile(
    r"\b(?:the|and|but|so|this|that|of|with|was|are|have|we|you|they|it|is|think|which)\d+",
    re.IGNORECASE,
)
_LETTER_DIGIT = re.compile(r"(?<=[A-Za-z])\d")
_GAP = re.compile(r"\n[ \t]*\n[ \t]*\n\s*")
MIN_GLUED = 3


def detect_digits(view: TextView) -> Detection | None:
    """The first of several numbers where no number belongs."""
    glued = list(_glued(view.text))
    # In code such names exist (`is1`, `this2`); there they repeat, and words do not stand around
    # them.
    if len({m.group().lower() for m in glued}) >= MIN_GLUED and len(glued) * 300 > len(view.text):
        return Detection(
            "digit_salad",
            glued[0].start(),
            glued[-1].end(),
            {"glued": [m.group() for m in glued[:5]]},
            Family.SALAD,
        )
    return _strewn(view)


def _glued(text: str) -> Iterator[re.Match[str]]:
    """Numbers glued to a common word. Digits that follow a letter are rare, so they are looked for
    first.
    """
    for digit in _LETTER_DIGIT.finditer(text):
        for length in range(2, 6):
            if match := _GLUED.match(text, max(0, digit.start() - length)):
                yield match
                break


def _strewn(view: TextView) -> Detection | None:
    """Three gaps of two blank lines and more, of different heights, with hardly a letter between
    them.
    """
    text = view.text[: view.visible_end]
    gaps = [m.span() for m in _GAP.finditer(text)]
    if len(gaps) < 3:
        return None
    between = "".join(text[a[1] : b[0]] for a, b in itertools.pairwise(gaps))
    heights = {text[a:b].count("\n") for a, b in gaps}
    if (
        len(heights) < 2
        or len(between) > 20 * len(gaps)
        or sum(c.isalpha() for c in between) > len(gaps)
    ):
        return None
    return Detection("digit_salad", gaps[0][0], len(text), {"gaps": len(gaps)}, Family.SALAD)
