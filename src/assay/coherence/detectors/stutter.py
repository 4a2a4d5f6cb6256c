"""Stutter: words said twice or three times in a row, all over the text, as a cache with too few bits makes them."""

from __future__ import annotations

import re

from assay.coherence import language
from assay.coherence.detectors.base import Detection
from assay.coherence.textview import TextView

_TWICE = re.compile(r"(?<![\w'-])([a-z]{3,})(?: \1)+(?![\w'-])")
# English (and C) says these twice.
_ALLOWED = frozenset(
    [
        "again",
        "and",
        "beep",
        "bit",
        "blah",
        "boo",
        "bye",
        "cha",
        "choo",
        "chop",
        "day",
        "ding",
        "dong",
        "down",
        "duck",
        "dum",
        "false",
        "far",
        "goose",
        "had",
        "half",
        "hear",
        "hush",
        "knock",
        "left",
        "long",
        "many",
        "more",
        "much",
        "nan",
        "never",
        "night",
        "none",
        "now",
        "null",
        "one",
        "ooh",
        "over",
        "please",
        "pom",
        "really",
        "right",
        "round",
        "row",
        "rozenset",
        "run",
        "step",
        "stop",
        "tap",
        "that",
        "there",
        "tick",
        "tom",
        "true",
        "tut",
        "two",
        "up",
        "very",
        "void",
        "wah",
        "wait",
        "well",
        "who",
        "yes",
        "you",
        "yum",
    ]
)
MIN_WORDS = 2
"""Distinct words that stutter."""
MAX_GAP = 120
"""Code points per stutter, at most."""


def detect(view: TextView) -> Detection | None:
    """The first of several stutters that stand close together."""
    doubled = [m for m in _TWICE.finditer(view.text) if m.group(1) not in _ALLOWED]
    if len(doubled) < MIN_WORDS:
        return None
    bloom = language.tables().bloom  # other languages double words as a matter of grammar
    found = [m for m in doubled if language.is_known_word(m.group(1), bloom)]
    for index in range(len(found) - MIN_WORDS + 1):
        group = found[index : index + MIN_WORDS]
        if len({m.group(1) for m in group}) == MIN_WORDS and group[-1].end() - group[0].start() <= MAX_GAP * (
            MIN_WORDS - 1
        ):
            onset = group[0].start() + len(group[0].group(1))
            return Detection(
                "stutter",
                onset,
                found[-1].end(),
                {"words": [m.group(1) for m in found[:5]], "count": len(found)},
            )
    return None
