"""The detectors, one idea a file. A new one is a file with `detect(view) -> Detection | None` and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from assay.coherence.detectors import (
    copied_tail,
    digits,
    drift,
    floods,
    identifiers,
    loops,
    near_loops,
    poor_tail,
    recycled_tail,
    replacement,
    salad,
    special_tokens,
    stutter,
    variety,
)
from assay.coherence.detectors.base import Detection, Detector

DETECTORS: Sequence[Detector] = (
    special_tokens.detect,
    replacement.detect,
    floods.detect,
    loops.detect,
    near_loops.detect,
    copied_tail.detect,
    recycled_tail.detect,
    poor_tail.detect,
    variety.detect,
    stutter.detect,
    digits.detect,
    identifiers.detect,
    drift.detect,
    salad.detect,
)
"""In order of precedence: of two detections with one onset the former names the kind."""

__all__ = ["DETECTORS", "Detection", "Detector"]
