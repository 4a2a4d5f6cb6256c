"""Identifier soup: one name that never ends, words glued with underscores, capitals or nothing at
all.
"""

from __future__ import annotations

import re

from assay.coherence.detection import Detection, Family, quote
from assay.coherence.text import TextView

MIN_PARTS = 20
MIN_GLUED_NAMES = 160
"""Lower-case letters in a row; the longest words of any language stay far below."""
MIN_NAME = 100
_NAME = re.compile(rf"[A-Za-z]\w{{{MIN_NAME},}}")
_HUMP = re.compile(r"[A-Z][a-z]{2,}")
_GLUED_NAME = re.compile(rf"[a-z]{{{MIN_GLUED_NAMES},}}")


def detect_identifiers(view: TextView) -> Detection | None:
    """The first endless name."""
    if all(len(piece) <= MIN_NAME for piece in view.text.split()):
        return None  # the cheap look: names hold no blanks
    for match in _NAME.finditer(view.text):
        name = match.group()
        digits = sum(c.isdigit() for c in name)
        parts = [p for p in name.split("_") if p.isalpha()]
        glued = _GLUED_NAME.search(name)
        soup = (
            (len(parts) >= MIN_PARTS and len(set(parts)) > 4)
            or (len(_HUMP.findall(name)) >= MIN_PARTS and digits < len(name) / 20)
            or (glued is not None and len(set(glued.group())) >= 12)
        )
        if soup:
            return Detection(
                "identifier_soup",
                match.start(),
                match.end(),
                {"length": len(name), "name": quote(name)},
                Family.SALAD,
            )
    return None
