"""The reference's side of a comparison: its windows, its rows, its floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.engines.opening import open_scorer
from assay.engines.scoring import ScoringEngine, StateRows, TokenizerFacts, Window, WindowRows
from assay.fidelity.floors import FLOOR_WINDOWS, rounding_floor, self_floor, storage_floor
from assay.fidelity.identity import label_of
from assay.fidelity.observe import HeldRows, LiveRows, ReferenceRows, require_path
from assay.fidelity.plan import Plan
from assay.fidelity.text import read_text
from assay.fidelity.windows import available_windows, cut_windows
from assay.progress import Progress


@dataclass
class Reference:
    """A reference that has been scored, or that scores along (`engine` is then still open)."""

    windows: Sequence[Window]
    rows: ReferenceRows
    tokenizer: TokenizerFacts
    facts: Mapping[str, Any]
    text_facts: Mapping[str, Any]
    self_kld: float | None = None
    floors: Mapping[str, float | None] = field(default_factory=dict)
    engine: ScoringEngine | None = None

    def close(self) -> None:
        """Close the engine, where one is still open."""
        if self.engine:
            self.engine.close()
            self.engine = None


def open_reference(plan: Plan, progress: Progress) -> Reference:
    """Score the reference of the plan, or get it ready to score along where it gives no states to keep."""
    engine = open_scorer(plan.reference)
    try:
        require_path(engine, plan.job)
        windows, text_facts = plan_windows(plan, engine.tokenizer)
        facts = {"label": label_of(plan.reference), **engine.describe()}
        if not engine.ability.states:
            live = LiveRows(engine, plan.job)
            return Reference(windows, live, engine.tokenizer, facts, text_facts, engine=engine)
        held: dict[int, WindowRows] = {}
        with progress(f"scoring {facts['label']}", len(windows)) as advance:
            for rows in engine.score_windows(windows, plan.job):
                held[rows.window.index] = rows
                advance()
        self_kld, floors = _floors(plan, engine, held, windows, progress) if plan.floors else (None, {})
        return Reference(
            windows, HeldRows(held), engine.tokenizer, facts, text_facts, self_kld=self_kld, floors=floors
        )
    finally:
        if engine.ability.states:
            engine.close()


def plan_windows(plan: Plan, tokenizer: TokenizerFacts) -> tuple[list[Window], dict[str, Any]]:
    """The windows of the plan's text, and what a result says of them. AssayError where there is no whole one."""
    text = read_text(plan.text)
    cut = plan.cut
    ids = tokenizer.encode(text.text)
    windows = cut_windows(ids, cut, tokenizer.bos_id, plan.windows)
    return windows, {
        **text.describe(),
        "tokens": len(ids),
        "windows_available": available_windows(len(ids), cut, tokenizer.bos_id),
        "windows_sha256": _hash(windows),
        "bos_id": tokenizer.bos_id,
        "tokenizer_sha256": tokenizer.sha256,
    }


def _hash(windows: Sequence[Window]) -> str:
    import hashlib

    return hashlib.sha256("".join(w.sha256 for w in windows).encode()).hexdigest()


def _floors(
    plan: Plan,
    engine: ScoringEngine,
    held: Mapping[int, WindowRows],
    windows: Sequence[Window],
    progress: Progress,
) -> tuple[float, dict[str, float | None]]:
    some = windows[:FLOOR_WINDOWS]
    with progress("measuring floors", 3) as advance:
        own = self_floor(engine, held, some, plan.job)
        advance()
        states = [r for w in some if isinstance(r := held[w.index], StateRows)]
        floors: dict[str, float | None] = {"storage_bf16": storage_floor(states) if states else None}
        advance()
        hooks = engine.ability.hooks
        floors["rounding_bf16"] = rounding_floor(engine, held, some, plan.job, plan.seed) if hooks else None
        advance()
    return own, floors
