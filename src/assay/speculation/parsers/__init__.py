"""Parsers of what engines write about their drafts: one engine a file."""

from assay.speculation.parsers.base import Line, Parser, Sample
from assay.speculation.parsers.counts import count, counts, from_histogram, number, positions_from

__all__ = [
    "Line",
    "Parser",
    "Sample",
    "count",
    "counts",
    "from_histogram",
    "number",
    "positions_from",
]
