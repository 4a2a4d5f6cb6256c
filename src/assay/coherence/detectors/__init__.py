"""The detectors, one idea a file. A new one is a file with `detect(view) -> Detection | None` and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from assay.coherence.detectors import floods, loops, tails, tokens, words
from assay.coherence.detectors import floods as poor_tail
from assay.coherence.detectors import loops as near_loops
from assay.coherence.salad import detector
from assay.coherence.text import Detection, Detector

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

__all__ = ["DETECTORS", "Detection", "Detector"]
