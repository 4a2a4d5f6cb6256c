"""The detectors, one idea a file: `detect(view) -> Detection | None`, and a line here or an entry
point.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from assay.coherence.detectors import floods, loops, salad, stutter, tails, tokens, words
from assay.coherence.text import Detection, Detector
from assay.plugins import load

DETECTORS: Sequence[Detector] = (
    tokens.detect_special_tokens,
    tokens.detect_replacement,
    floods.detect_flood,
    floods.detect_brackets,
    loops.detect_loop,
    loops.detect_near_loop,
    tails.detect_like_calls,
    tails.detect_copied_tail,
    tails.detect_recycled_tail,
    floods.detect_poor_tail,
    tails.detect_few_words,
    tails.detect_rotation,
    stutter.detect_stutter,
    words.detect_digits,
    words.detect_identifiers,
    words.detect_drift,
    words.detect_strays,
    words.detect_loose_words,
    salad.detect,
)
"""In order of precedence: of two detections with one onset the former names the kind."""


@cache
def all_detectors() -> Sequence[Detector]:
    """Those of assay, then those of other packages."""
    return (*DETECTORS, *load("assay.detectors").values())


__all__ = ["DETECTORS", "Detection", "Detector", "all_detectors"]
