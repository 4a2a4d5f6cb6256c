"""All parsers in the order in which they are asked."""

from __future__ import annotations

from assay.plugins import load
from assay.speculation.parsers.base import Parser
from assay.speculation.parsers.fastdeploy import FastDeployParser
from assay.speculation.parsers.llama_cpp import LlamaCppParser
from assay.speculation.parsers.mlc import MlcParser
from assay.speculation.parsers.named import NamedParser
from assay.speculation.parsers.openai_usage import OpenAIUsageParser
from assay.speculation.parsers.sglang import SglangParser
from assay.speculation.parsers.summary import SummaryParser
from assay.speculation.parsers.tensorrt_llm import TensorRTParser
from assay.speculation.parsers.vllm_v0 import VllmV0Parser
from assay.speculation.parsers.vllm_v1 import VllmV1Parser

# The first parser that reads a line or a JSON object owns it.
PARSERS: tuple[type[Parser], ...] = (
    VllmV1Parser,
    VllmV0Parser,
    SglangParser,
    LlamaCppParser,
    TensorRTParser,
    MlcParser,
    FastDeployParser,
    SummaryParser,
    NamedParser,
    OpenAIUsageParser,
)


def all_parsers() -> tuple[type[Parser], ...]:
    """Those of other packages, which read less than the ones for named figures, then those of
    assay.
    """
    return (*load("assay.parsers").values(), *PARSERS)


def new_parsers() -> tuple[Parser, ...]:
    """Fresh parsers for one source; some remember what earlier lines said."""
    return tuple(parser() for parser in all_parsers())
