"""Parsers of what engines write about their drafts: one engine a file."""

from assay.speculation.observation import Counts, Definition, Kind, Load, Observation, Printed
from assay.speculation.parsers.base import Line, Parser, Sample, StartUp
from assay.speculation.parsers.counts import count, counts, from_histogram, number, positions_from

__all__ = [
    "Counts",
    "Definition",
    "Kind",
    "Line",
    "Load",
    "Observation",
    "Parser",
    "Printed",
    "Sample",
    "StartUp",
    "count",
    "counts",
    "from_histogram",
    "number",
    "positions_from",
]
