"""Engines: what assay asks of a model, in this process, in another, or behind a URL."""

from assay.engines.call_text import EXCERPT, CallText, call_remains, read_calls
from assay.engines.capabilities import Capability, CapabilityReport, MissingCapability
from assay.engines.engine import Engine, TokenScores, score_all
from assay.engines.requests import (
    GIVEN_UP,
    Message,
    OnText,
    Reply,
    Request,
    TextPiece,
    Timing,
    ToolCall,
)
from assay.engines.setup import setup_differences, setup_facts
from assay.engines.spec_options import Options, full_spec, read_options, require_local, with_options

__all__ = [
    "EXCERPT",
    "GIVEN_UP",
    "CallText",
    "Capability",
    "CapabilityReport",
    "Engine",
    "Message",
    "MissingCapability",
    "OnText",
    "Options",
    "Reply",
    "Request",
    "TextPiece",
    "Timing",
    "TokenScores",
    "ToolCall",
    "call_remains",
    "full_spec",
    "read_calls",
    "read_options",
    "require_local",
    "score_all",
    "setup_differences",
    "setup_facts",
    "with_options",
]
