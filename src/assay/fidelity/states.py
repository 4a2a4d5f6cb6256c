"""Score windows with an engine and store the final states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.engines.scoring import ScoringEngine, Window
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.names import label_of
from assay.fidelity.plan import Plan
from assay.fidelity.store.manifest import StoreHeader
from assay.fidelity.store.reader import Store
from assay.fidelity.store.writer import StoreWriter
from assay.fidelity.text.tokenizer_proof import probe_ids
from assay.progress import Progress


def store_states(
    plan: Plan,
    engine: ScoringEngine,
    windows: Sequence[Window],
    text_facts: Mapping[str, Any],
    folder: Path,
    progress: Progress,
    dtype: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Store:
    """Score the windows that `folder` does not hold yet, and store them (in the engine's own type
    by default).

    `facts` are kept beside the environment: what may change from run to run of the same reference.
    """
    writer: StoreWriter | None = None
    with progress(f"scoring {label_of(plan.reference)}", len(windows)) as advance:
        # The first window is scored in any case: it tells the head and the type of the states.
        for rows in engine.score_windows(windows[:1], plan.job):
            states, head = rows.states, rows.head  # type: ignore[union-attr]
            header = StoreHeader(
                engine=engine.describe(),
                tokenizer={
                    "sha256": engine.tokenizer.sha256,
                    "vocab_size": engine.tokenizer.vocab_size,
                    "probe_ids": probe_ids(engine.tokenizer.encode),
                },
                text=dict(text_facts),
                path=plan.path,
                scored_from=plan.job.scored_from,
                length=len(windows[0].tokens),
                dtype=dtype or str(states.dtype).removeprefix("torch."),
                environment=describe() | dict(facts or {}),
            )
            writer = StoreWriter(folder, header, head)
        if writer is None:
            raise AssayError(
                f"{label_of(plan.reference)} scored nothing", finding_id="fidelity.engine_load"
            )
        todo = [w for w in windows if not writer.has(w)]
        for _ in range(len(windows) - len(todo)):
            advance()
        for rows in engine.score_windows(todo, plan.job) if todo else ():
            writer.add(rows.window, rows.states)  # type: ignore[union-attr]
            advance()
    return writer.finish()
