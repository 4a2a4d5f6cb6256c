"""The detectors, one idea a file. A new one is a file with `detect(view) -> Detection | None` and a line here."""

from __future__ import annotations

from collections.abc import Sequence

from assay.coherence.detectors import floods, loops, replacement, special_tokens
from assay.coherence.detectors.base import Detection, Detector

DETECTORS: Sequence[Detector] = (
    special_tokens.detect,
    replacement.detect,
    floods.detect,
    loops.detect,
)
"""In order of precedence: of two detections with one onset the former names the kind."""

__all__ = ["DETECTORS", "Detection", "Detector"]
