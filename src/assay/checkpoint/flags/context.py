"""`--max-model-len` against the positions that the model knows, under every rope type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from assay.checkpoint.document_types import Document
from assay.checkpoint.findings import found, warned
from assay.checkpoint.flags.command import ServeArgs
from assay.checkpoint.flags.flag_values import number_of
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

SCALED_ALREADY = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"}
)
"""Rope types whose `max_position_embeddings` is the scaled length; the factor of any other type
multiplies it (vLLM 0.32).
"""
_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_seq_length")
_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def lint_context(checkpoint: Checkpoint, args: ServeArgs) -> Iterator[Finding]:
    """A finding for a context that is longer than the model's positions."""
    length = number_of(args.get("--max-model-len") or "", "size or auto")
    limit = positions(checkpoint, args)
    if length is None or limit is None or length <= limit:
        return
    title = f"--max-model-len {length:g} is beyond the model's {limit:g} positions"
    remedies = ["lower it, or configure rope scaling with --hf-overrides"]
    allowed = args.environment.get(_LONG) in {"1", "true", "True"}
    write = warned if allowed else found
    yield write("flag_rejected", title, remedies=remedies, limit=limit, flag="--max-model-len")


def positions(checkpoint: Checkpoint, args: ServeArgs) -> float | None:
    """Positions of the model after scaling; None if the config does not say."""
    overrides = _objects(args)
    config: Document = {**checkpoint.text_config, **overrides}
    known = [v for key in _KEYS if type(v := config.get(key)) is int]
    if not known:
        return None
    factor = 1.0
    for settings in _rope_settings(config):
        kind = settings.get("rope_type") or settings.get("type") or "default"
        given = settings.get("factor")
        if kind not in SCALED_ALREADY and isinstance(given, int | float):
            factor = float(given)
    if "gemma3" in checkpoint.model_type:
        factor = 1.0
    longest = min(known) * factor
    own = config.get("model_max_length")
    return max(longest, own) if type(own) is int else longest


def _objects(args: ServeArgs) -> Document:
    """Overrides of the config on the command line, without nested language models."""
    given: dict[str, Any] = args.structure("--hf-overrides") or {}
    nested = given.get("text_config")
    return {**given, **nested} if isinstance(nested, dict) else given


def _rope_settings(config: Document) -> Iterator[Document]:
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.get(key)
        if isinstance(settings, dict):
            yield settings
            yield from (inner for inner in settings.values() if isinstance(inner, dict))
