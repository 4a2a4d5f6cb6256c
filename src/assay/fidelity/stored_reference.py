"""`run:DIR` and `run:FILE` as the reference: a store of assay's, or llama.cpp's file of log-probabilities."""

from __future__ import annotations

from pathlib import Path

from assay.engines.scoring import TokenizerFacts
from assay.errors import AssayError, UsageError
from assay.fidelity.floors import Floors
from assay.fidelity.identity import label_of
from assay.fidelity.plan import Plan
from assay.fidelity.reference import Reference, hash_of, tokenizer_check
from assay.fidelity.store import open_store
from assay.fidelity.store.llama_base import open_base
from assay.fidelity.store.settings import stored_path


def stored_reference(plan: Plan) -> Reference:
    """The reference that `plan.reference` names; AssayError where it is damaged or does not fit the plan."""
    if plan.text:
        raise UsageError(
            f"{label_of(plan.reference)} has its own windows",
            remedy="leave out --text: candidates are scored on the text that was stored",
            finding_id="fidelity.usage",
        )
    path = stored_path(plan.reference)
    return _base_file(plan, path) if path.is_file() else _store(plan, path)


def _store(plan: Plan, path: Path) -> Reference:
    store = open_store(path)
    header = store.header
    _fits(plan, header.length, header.scored_from, header.path)
    windows = store.windows[: plan.windows]
    tokenizer = header.tokenizer
    text = {**header.text, "windows_available": len(store.windows), "windows_sha256": hash_of(windows)}
    facts = {"label": label_of(plan.reference), **header.engine, "states": header.dtype}
    check = tokenizer_check(str(tokenizer["sha256"]), int(tokenizer["vocab_size"]))
    return Reference(
        windows,
        store,
        check,
        facts,
        text,
        floors=Floors(**header.environment.get("floors", {})),
        probe_ids=tokenizer.get("probe_ids"),
        fingerprint=str(header.environment.get("engine_fingerprint", "")),
    )


def _base_file(plan: Plan, path: Path) -> Reference:
    base = open_base(path)
    _fits(plan, base.length, base.scored_from, "prefill")
    windows = base.windows(None)[: plan.windows]

    def check(candidate: TokenizerFacts, label: str) -> None:
        if (
            candidate.vocab_size > base.vocab_size
            or max(max(w.tokens) for w in windows) >= candidate.vocab_size
        ):
            raise AssayError(
                f"{label} has {candidate.vocab_size:,} tokens, {path.name} has {base.vocab_size:,}",
                finding_id="fidelity.tokenizer_mismatch",
                remedy="give a candidate of the same model",
            )

    facts = {
        "label": label_of(plan.reference),
        "engine": "llama.cpp base file",
        "vocab_size": base.vocab_size,
    }
    text = {
        "sources": [path.name],
        "windows_available": len(base.tokens),
        "windows_sha256": hash_of(windows),
        "tokenizer_sha256": None,
    }
    return Reference(windows, base, check, facts, text)


def _fits(plan: Plan, length: int, scored_from: int, path: str) -> None:
    """UsageError where the candidate would be scored in another way than what is stored."""
    wanted = (plan.length, plan.job.scored_from, plan.path)
    if wanted != (length, scored_from, path):
        scored = "all" if scored_from == 1 else "second-half"
        raise UsageError(
            f"{label_of(plan.reference)} was scored with --length {length} --scored {scored} --path {path}",
            remedy="leave these options out: they are those of the store",
            finding_id="fidelity.usage",
        )
