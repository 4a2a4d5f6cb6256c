"""The detectors, one idea a file: `detect(view) -> Detection | None`, and a line here or an entry point."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from assay.coherence.detectors import floods, loops, tails, tokens, words
from assay.coherence.detectors import floods as poor_tail
from assay.coherence.detectors import loops as near_loops
from assay.coherence.salad import detector
from assay.coherence.text import Detection, Detector
from assay.plugins import load

DETECTORS: Sequence[Detector] = (
    tokens.detect_special_tokens,
    tokens.detect_replacement,
    floods.detect_flood,
    loops.detect_loop,
    near_loops.detect_near_loop,
    tails.detect_copied_tail,
    tails.detect_recycled_tail,
    poor_tail.detect_poor_tail,
    words.detect_variety,
    words.detect_stutter,
    words.detect_digits,
    words.detect_identifiers,
    words.detect_drift,
    detector.detect,
)
"""In order of precedence: of two detections with one onset the former names the kind."""


@cache
def all_detectors() -> Sequence[Detector]:
    """Those of assay, then those of other packages."""
    return (*DETECTORS, *load("assay.detectors").values())


__all__ = ["DETECTORS", "Detection", "Detector", "all_detectors"]
