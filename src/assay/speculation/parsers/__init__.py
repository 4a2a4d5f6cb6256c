"""One engine a file, and one for figures that say themselves what they count. A new engine is a new file and a line here."""

from __future__ import annotations

from assay.plugins import load
from assay.speculation.parsers.base import Parser
from assay.speculation.parsers.llama_cpp import LlamaCppParser
from assay.speculation.parsers.named import NamedParser, SummaryParser
from assay.speculation.parsers.others import (
    FastDeployParser,
    GuardParser,
    MlcParser,
    OpenAIUsageParser,
    TensorRTParser,
)
from assay.speculation.parsers.sglang import SglangParser
from assay.speculation.parsers.vllm import VllmV0Parser, VllmV1Parser

# The first parser that reads a line or a JSON object owns it.
PARSERS: tuple[type[Parser], ...] = (
    VllmV1Parser,
    VllmV0Parser,
    SglangParser,
    LlamaCppParser,
    TensorRTParser,
    MlcParser,
    FastDeployParser,
    GuardParser,
    SummaryParser,
    NamedParser,
    OpenAIUsageParser,
)


def all_parsers() -> tuple[type[Parser], ...]:
    """Those of other packages, which read less than the ones for named figures, then those of assay."""
    return (*load("assay.parsers").values(), *PARSERS)


def new_parsers() -> tuple[Parser, ...]:
    """Fresh parsers for one source; some remember what earlier lines said."""
    return tuple(parser() for parser in all_parsers())
