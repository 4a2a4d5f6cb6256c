"""Characters that stand for broken bytes: U+FFFD from half a UTF-8 sequence, and control characters.

These name a decoding fault (bytes of one character split over tokens or chunks), not always a broken model.
"""

from __future__ import annotations

import re

from assay.coherence.detectors.base import Detection
from assay.coherence.textview import TextView

_BROKEN = re.compile("\ufffd+")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")
_LONE = re.compile("[\ud800-\udfff]")


def detect(view: TextView) -> Detection | None:
    """The first of enough replacement, control or lone surrogate characters."""
    n = len(view.text)
    for kind, pattern, share in (
        ("replacement_characters", _BROKEN, 0.002),
        ("replacement_characters", _LONE, 0.002),
        ("control_characters", _CONTROL, 0.01),
    ):
        runs = [m.span() for m in pattern.finditer(view.text)]
        count = sum(end - start for start, end in runs)
        if (count >= 3 and count >= share * n) or count >= 40:
            return Detection(kind, runs[0][0], runs[-1][1], {"count": count, "runs": len(runs)})
    return None
