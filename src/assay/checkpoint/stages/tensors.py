"""Headers, index, documents, expected tensors, quantisation and draft head: all that headers and small files tell."""

from __future__ import annotations

from importlib.util import find_spec

from assay.checkpoint.draft import check_draft, is_draft
from assay.checkpoint.families import FAMILIES
from assay.checkpoint.findings import found
from assay.checkpoint.index import check_index
from assay.checkpoint.mtp.examine import examine_checkpoint, head_prefixes
from assay.checkpoint.mtp.rule import check_mtp
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.outcome import Outcome
from assay.checkpoint.quantization.check import check_quantization
from assay.checkpoint.quantization.kv import check_kv, kv_cache
from assay.checkpoint.quantization.orphans import check_orphans
from assay.checkpoint.quantization.schemes import parse
from assay.checkpoint.rules import RULES
from assay.checkpoint.stages import gguf
from assay.checkpoint.structure import Expectation, check_structure, expectation
from assay.checkpoint.subject import Checkpoint


def examine(outcome: Outcome) -> None:
    """Every rule on headers and documents, and the GGUF files."""
    checkpoint = outcome.opened.checkpoint
    for header in checkpoint.headers.values():
        outcome.add(found(f.id, f.message, **f.evidence) for f in header.faults)
    gguf.examine(outcome)
    outcome.tensors = len(checkpoint.tensors) + sum(len(g.tensors) for g in outcome.ggufs)
    if checkpoint.kind in {"gguf", "safetensors"} or "config.json" not in checkpoint.files:
        return
    outcome.add(check_index(checkpoint))
    for rule in RULES:
        outcome.add(rule(checkpoint))
    outcome.declared = parse(checkpoint)
    outcome.cache = kv_cache(checkpoint, outcome.declared)
    if checkpoint.tensors:
        _stored(outcome, checkpoint)


def _stored(outcome: Outcome, checkpoint: Checkpoint) -> None:
    """What is stored against what the config promises and declares."""
    if is_draft(checkpoint):
        source = outcome.options.target
        target = open_checkpoint(source).checkpoint if source else None
        outcome.add(check_draft(checkpoint, target))
    else:
        promised = _promised(checkpoint)
        outcome.expected_from = promised.origin if promised else None
        outcome.add(check_structure(checkpoint, promised))
        outcome.mtp = examine_checkpoint(checkpoint, outcome.declared)
        outcome.add(check_mtp(outcome.mtp, outcome.declared is not None, outcome.options.version))
        outcome.add(check_quantization(checkpoint, outcome.declared, head_prefixes(checkpoint)))
    outcome.add(check_orphans(checkpoint))
    outcome.add(check_kv(checkpoint, outcome.cache))


def _promised(checkpoint: Checkpoint) -> Expectation | None:
    """From the config where assay knows the layout by heart (no torch to import), else from transformers."""
    if str(checkpoint.text_config.get("model_type")) in FAMILIES:
        return expectation(checkpoint)
    if checkpoint.config.get("architectures") and find_spec("torch") and find_spec("transformers"):
        from assay.checkpoint.meta_model import meta_expectation

        return meta_expectation(checkpoint)
    return None
