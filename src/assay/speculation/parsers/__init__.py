"""One parser a file. A new engine is a new file and one line here."""

from __future__ import annotations

from assay.speculation.parsers.base import Parser
from assay.speculation.parsers.llama_cpp import LlamaCppParser
from assay.speculation.parsers.others import (
    GuardParser,
    MlcParser,
    MlxVlmParser,
    OpenAIUsageParser,
    QuotedRatesParser,
)
from assay.speculation.parsers.sglang import SglangParser
from assay.speculation.parsers.tensorrt_llm import TensorRTParser
from assay.speculation.parsers.vllm import VllmSummaryParser, VllmV0Parser, VllmV1Parser

# The order settles which parser owns a JSON object that several could read.
PARSERS: tuple[type[Parser], ...] = (
    VllmV1Parser,
    VllmV0Parser,
    VllmSummaryParser,
    QuotedRatesParser,
    SglangParser,
    MlxVlmParser,
    LlamaCppParser,
    TensorRTParser,
    MlcParser,
    GuardParser,
    OpenAIUsageParser,
)


def new_parsers() -> tuple[Parser, ...]:
    """Fresh parsers for one source; some remember what earlier lines said."""
    return tuple(parser() for parser in PARSERS)
