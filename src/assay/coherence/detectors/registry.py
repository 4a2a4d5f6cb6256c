"""All detectors in their order of precedence: a line here, or an entry point of another package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from assay.coherence.detection import Detection
from assay.coherence.detectors.brackets import detect_brackets
from assay.coherence.detectors.broken_bytes import detect_replacement
from assay.coherence.detectors.call_envelopes import detect_call_envelopes
from assay.coherence.detectors.copied_tail import detect_copied_tail
from assay.coherence.detectors.digits import detect_digits
from assay.coherence.detectors.drift import detect_drift
from assay.coherence.detectors.floods import detect_flood
from assay.coherence.detectors.growing_restarts import detect_growing_restarts
from assay.coherence.detectors.identifiers import detect_identifiers
from assay.coherence.detectors.like_calls import detect_like_calls
from assay.coherence.detectors.loops import detect_loop
from assay.coherence.detectors.loose_words import detect_loose_words
from assay.coherence.detectors.lost_blanks import detect_lost_blanks
from assay.coherence.detectors.mark_blocks import detect_mark_blocks
from assay.coherence.detectors.near_loops import detect_near_loop
from assay.coherence.detectors.poor_tail import detect_poor_tail
from assay.coherence.detectors.recycled_tail import detect_recycled_tail
from assay.coherence.detectors.rotation import detect_few_words, detect_rotation
from assay.coherence.detectors.salad import detect_salad
from assay.coherence.detectors.special_tokens import detect_special_tokens
from assay.coherence.detectors.spliced_words import detect_spliced_words
from assay.coherence.detectors.strays import detect_strays
from assay.coherence.detectors.stutter import detect_stutter
from assay.coherence.text import TextView
from assay.plugins import load

Detector = Callable[[TextView], Detection | None]

DETECTORS: Sequence[Detector] = (
    detect_special_tokens,
    detect_call_envelopes,
    detect_replacement,
    detect_flood,
    detect_mark_blocks,
    detect_brackets,
    detect_loop,
    detect_near_loop,
    detect_growing_restarts,
    detect_like_calls,
    detect_copied_tail,
    detect_recycled_tail,
    detect_poor_tail,
    detect_few_words,
    detect_rotation,
    detect_stutter,
    detect_digits,
    detect_identifiers,
    detect_drift,
    detect_strays,
    detect_lost_blanks,
    detect_spliced_words,
    detect_loose_words,
    detect_salad,
)
"""In order of precedence: of two detections with one onset the former names the kind."""


@cache
def all_detectors() -> Sequence[Detector]:
    """The detectors of assay, then those of other packages."""
    return (*DETECTORS, *load("assay.detectors").values())
