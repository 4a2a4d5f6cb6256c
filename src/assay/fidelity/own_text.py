"""`--text self`: the reference writes the text that it and its candidates are then scored on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.cache import write_atomically
from assay.engines.continuing import Sampler
from assay.engines.scoring import ScoringEngine
from assay.errors import AssayError
from assay.fidelity.identity import label_of
from assay.fidelity.plan import Plan
from assay.fidelity.sampled_text import generate_text
from assay.fidelity.text import SELF, Text
from assay.progress import Progress

_SPARE = 1.05
"""Sampled ids that become text and ids again may be fewer, so a little more is written."""


@dataclass(frozen=True)
class OwnText:
    """Text of the reference's own, and what a result says of how it was sampled."""

    text: Text
    origin: Mapping[str, Any]


def write_own_text(
    plan: Plan, engine: ScoringEngine, progress: Progress, folder: Path | None = None
) -> OwnText | None:
    """What `engine` writes where the plan asks for that, None where it names other text.

    It is kept in `folder`, so that an interrupted run goes on with the same. AssayError where the engine cannot
    sample.
    """
    if plan.text != (SELF,):
        return None
    label = label_of(plan.reference)
    if not isinstance(engine, Sampler):
        raise AssayError(
            f"{label} cannot write the text of --text {SELF}: only hf: engines sample",
            finding_id="fidelity.text_unusable",
            remedy="give a file with --text, or let hf:MODEL write one and store it: assay reference --text self",
        )
    writer, start = engine.sampler()
    origin = {
        "sampled_from": label,
        "temperature": 1.0,
        "seed": plan.seed,
        "start_ids": list(start),
        "tokens_per_text": plan.length,
    }
    kept = folder / "self-text.json" if folder else None
    if kept and kept.exists():
        return OwnText(Text((SELF,), json.loads(kept.read_text(encoding="utf-8"))), origin)
    wanted = int(_SPARE * plan.windows * plan.length) + plan.length
    with progress(f"sampling text from {label}", -(-wanted // plan.length)) as advance:
        text = generate_text(
            writer, start=start, tokens=wanted, per_text=plan.length, seed=plan.seed, advance=advance
        )
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(text.text))
    return OwnText(text, origin)
