"""`run:DIR`, `run:FILE`, `pack:FILE`: a stored reference, which has to fit the plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from assay.engines.scoring import Window
from assay.errors import UsageError
from assay.fidelity.breakdown.floors import Floors
from assay.fidelity.llama_base import open_base
from assay.fidelity.names import label_of
from assay.fidelity.pack.reader import open_pack
from assay.fidelity.plan import Plan
from assay.fidelity.reference import Reference, hash_of, size_check, tokenizer_check
from assay.fidelity.score import ReferenceRows
from assay.fidelity.store.manifest import StoreHeader
from assay.fidelity.store.reader import open_store, stored_path


def stored_reference(plan: Plan) -> Reference:
    """The reference that `plan.reference` names; AssayError where it is damaged or does not fit the
    plan.
    """
    if plan.text:
        raise UsageError(
            f"{label_of(plan.reference)} has its own windows",
            remedy="leave out --text: candidates are scored on the text that was stored",
            finding_id="fidelity.usage",
        )
    if plan.reference.startswith("pack:"):
        pack = open_pack(plan.reference)
        return _stored(plan, pack.header, pack.windows, pack, find_head=pack.find_head)
    path = stored_path(plan.reference)
    return _base_file(plan, path) if path.is_file() else _store(plan, path)


def _store(plan: Plan, path: Path) -> Reference:
    store = open_store(path)
    return _stored(plan, store.header, store.windows, store)


def _stored(
    plan: Plan, header: StoreHeader, windows: Sequence[Window], rows: ReferenceRows, **more: Any
) -> Reference:
    _fits(plan, header.length, header.scored_from, header.path)
    available, windows = len(windows), windows[: plan.windows]
    tokenizer = header.tokenizer
    text = {**header.text, "windows_available": available, "windows_sha256": hash_of(windows)}
    facts = {"label": label_of(plan.reference), **header.engine, "states": header.dtype}
    check = tokenizer_check(str(tokenizer["sha256"]), int(tokenizer["vocab_size"]))
    if not tokenizer["sha256"]:  # a capture says how many tokens there are, and not which
        check = size_check(int(tokenizer["vocab_size"]), windows, label_of(plan.reference))
    return Reference(
        windows,
        rows,
        check,
        facts,
        text,
        floors=Floors(**header.environment.get("floors", {})),
        probe_ids=tokenizer.get("probe_ids"),
        model_sha256=header.environment.get("model_sha256", {}),
        fingerprint=str(header.environment.get("engine_fingerprint", "")),
        **more,
    )


def _base_file(plan: Plan, path: Path) -> Reference:
    base = open_base(path)
    _fits(plan, base.length, base.scored_from, "prefill")
    windows = base.windows(None)[: plan.windows]

    check = size_check(base.vocab_size, windows, path.name)
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
            f"{label_of(plan.reference)} was scored with --length {length} --scored {scored} --path"
            f" {path}",
            remedy="leave these options out: they are those of the store",
            finding_id="fidelity.usage",
        )
