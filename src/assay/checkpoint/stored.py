"""Apply every rule on headers and documents, as a stage of `assay verify`."""

from __future__ import annotations

from assay.checkpoint.draft import check_draft, is_draft
from assay.checkpoint.findings import found
from assay.checkpoint.gguf.stage import examine_gguf_files
from assay.checkpoint.index import check_index
from assay.checkpoint.kv_cache import check_kv, kv_cache
from assay.checkpoint.lists import check_unlisted, choose_list
from assay.checkpoint.mtp import examine_checkpoint, head_prefixes
from assay.checkpoint.mtp_findings import check_mtp
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.orphans import check_orphans
from assay.checkpoint.quantization import check_quantization
from assay.checkpoint.rules.registry import all_rules
from assay.checkpoint.schemes.registry import parse
from assay.checkpoint.state import VerifyState
from assay.checkpoint.structure import check_structure
from assay.checkpoint.subject import Checkpoint


def examine_tensors(state: VerifyState) -> None:
    """Every rule on headers and documents, and the GGUF files."""
    checkpoint = state.opened.checkpoint
    for header in checkpoint.headers.values():
        state.add(found(f.id, f.message, **f.evidence) for f in header.faults)
    examine_gguf_files(state)
    state.stored.count = len(checkpoint.tensors) + sum(len(g.tensors) for g in state.stored.ggufs)
    if checkpoint.kind in {"gguf", "safetensors"} or "config.json" not in checkpoint.files:
        return
    state.add(check_index(checkpoint))
    for rule in all_rules():
        state.add(rule(checkpoint))
    state.stored.declared = parse(checkpoint)
    state.stored.cache = kv_cache(checkpoint, state.stored.declared)
    if checkpoint.tensors:
        _stored(state, checkpoint)


def _stored(state: VerifyState, checkpoint: Checkpoint) -> None:
    """What is stored against what the config promises and declares."""
    if is_draft(checkpoint):
        source = state.options.target
        target = open_checkpoint(source).checkpoint if source else None
        state.add(check_draft(checkpoint, target))
    else:
        prefixes = head_prefixes(checkpoint)
        compared = choose_list(checkpoint, prefixes)
        state.stored.expected_from = None if compared.problem else compared.origin
        state.add(check_structure(checkpoint, compared))
        state.add(check_unlisted(checkpoint, compared))
        state.stored.mtp = examine_checkpoint(checkpoint, state.stored.declared)
        state.add(
            check_mtp(state.stored.mtp, state.stored.declared is not None, state.options.version)
        )
        state.add(check_quantization(checkpoint, state.stored.declared, prefixes))
    state.add(check_orphans(checkpoint))
    state.add(check_kv(checkpoint, state.stored.cache))
