"""The reference's side of a comparison: its windows, its rows, its floors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.cache import write_atomically
from assay.engines.opening import open_scorer
from assay.engines.scoring import ScoringEngine, TokenizerFacts, Window
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.floors import Floors, measure_floors
from assay.fidelity.greedy import Continued, continue_greedily
from assay.fidelity.identity import fingerprint, label_of
from assay.fidelity.observe import LiveRows, ReferenceRows, require_path
from assay.fidelity.own_text import OwnText, write_own_text
from assay.fidelity.plan import Plan
from assay.fidelity.store import Store, StoreHeader, StoreWriter
from assay.fidelity.text import SELF, Text, read_text
from assay.fidelity.tokenizer_proof import probe_ids
from assay.fidelity.windows import available_windows, cut_windows
from assay.progress import Progress


@dataclass
class Reference:
    """A reference that has been scored, or that scores along (`engine` is then still open).

    `check(tokenizer, label)` raises AssayError unless a candidate's token ids mean the same.
    """

    windows: Sequence[Window]
    rows: ReferenceRows
    check: Callable[[TokenizerFacts, str], None]
    facts: Mapping[str, Any]
    text_facts: Mapping[str, Any]
    floors: Floors = field(default_factory=Floors)
    probe_ids: Sequence[int] | None = None
    """Its ids of the probe text (`assay.fidelity.tokenizer_proof`), None where nobody knows them."""
    greedy: Continued = field(default_factory=lambda: Continued(reason="a stored reference has no model"))
    """Its greedy continuations, where the plan asks for them."""
    engine: ScoringEngine | None = None
    fingerprint: str = ""
    """`identity.fingerprint` of what scored it; empty where nobody knows."""

    def close(self) -> None:
        """Close the engine, where one is still open."""
        if self.engine:
            self.engine.close()
            self.engine = None


def open_reference(plan: Plan, folder: Path, progress: Progress) -> Reference:
    """Score the reference of the plan into `folder`, read a stored one, or get one ready that scores along."""
    if plan.reference.startswith("run:"):
        from assay.fidelity.stored_reference import stored_reference

        return stored_reference(plan)
    text = plan_text(plan)  # before a model is loaded: a wrong name should not cost that
    engine = open_scorer(plan.reference)
    keep_open = not engine.ability.states
    try:
        require_path(engine, plan.job)
        own = write_own_text(plan, engine, progress, folder)
        windows, text_facts = plan_windows(plan, engine.tokenizer, own, text)
        check = tokenizer_check(engine.tokenizer.sha256, engine.tokenizer.vocab_size)
        facts = {"label": label_of(plan.reference), **engine.describe()}
        probe = probe_ids(engine.tokenizer.encode)
        own_print = fingerprint(plan.reference)
        if keep_open:
            rows = LiveRows(engine, plan.job)
            greedy = _greedy(plan, engine, windows, folder, progress)
            return Reference(
                windows,
                rows,
                check,
                facts,
                text_facts,
                probe_ids=probe,
                greedy=greedy,
                engine=engine,
                fingerprint=own_print,
            )
        store = store_states(plan, engine, windows, text_facts, folder / "reference", progress)
        floors = (
            _floors(plan, engine, store, windows, folder / "floors.json", progress)
            if plan.floors
            else Floors()
        )
        greedy = _greedy(plan, engine, windows, folder, progress)
        return Reference(
            windows, store, check, facts, text_facts, floors, probe, greedy, fingerprint=own_print
        )
    except BaseException:
        keep_open = False
        raise
    finally:
        if not keep_open:
            engine.close()


def plan_text(plan: Plan) -> Text | None:
    """The text that the plan names, None where the reference writes it; AssayError where it cannot be read."""
    return None if plan.text == (SELF,) else read_text(plan.text)


def plan_windows(
    plan: Plan, tokenizer: TokenizerFacts, own: OwnText | None = None, text: Text | None = None
) -> tuple[list[Window], dict[str, Any]]:
    """The windows of the plan's text (`own`, where the reference wrote it; `text`, where it has been read already), and
    what a result says of them.

    AssayError where there is no whole one.
    """
    text = own.text if own else text or read_text(plan.text)
    ids = tokenizer.encode(text.text)
    windows = cut_windows(ids, plan.cut, tokenizer.bos_id, plan.windows)
    return windows, {
        **text.describe(),
        **(own.origin if own else {}),
        "tokens": len(ids),
        "windows_available": available_windows(len(ids), plan.cut, tokenizer.bos_id),
        "windows_sha256": hash_of(windows),
        "bos_id": tokenizer.bos_id,
        "tokenizer_sha256": tokenizer.sha256,
    }


def hash_of(windows: Sequence[Window]) -> str:
    """One hash of all windows."""
    import hashlib

    return hashlib.sha256("".join(w.sha256 for w in windows).encode()).hexdigest()


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
    """Score the windows that `folder` does not hold yet, and store them (in the engine's own type by default).

    `facts` are kept beside the environment: what may change from run to run of the same reference.
    """
    writer: StoreWriter | None = None
    with progress(f"scoring {label_of(plan.reference)}", len(windows)) as advance:
        # The first window is scored in any case: it tells the head and the type of the states.
        for rows in engine.score_windows(windows[:1], plan.job):
            states, head = rows.states, rows.head  # type: ignore[attr-defined]
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
            raise AssayError(f"{label_of(plan.reference)} scored nothing", finding_id="fidelity.engine_load")
        todo = [w for w in windows if not writer.has(w)]
        for _ in range(len(windows) - len(todo)):
            advance()
        for rows in engine.score_windows(todo, plan.job) if todo else ():
            writer.add(rows.window, rows.states)  # type: ignore[attr-defined]
            advance()
    return writer.finish()


def tokenizer_check(sha256: str, vocab_size: int) -> Callable[[TokenizerFacts, str], None]:
    """The check that a candidate's vocabulary has this hash."""

    def check(candidate: TokenizerFacts, label: str) -> None:
        if candidate.sha256 != sha256:
            raise AssayError(
                f"{label} has another tokenizer than the reference: their vocabularies differ "
                f"({candidate.vocab_size:,} and {vocab_size:,} entries, hashes {candidate.sha256[:12]} and {sha256[:12]})",
                finding_id="fidelity.tokenizer_mismatch",
                remedy="distributions over different tokens cannot be compared; give a candidate of the same model",
            )

    return check


def _greedy(
    plan: Plan, engine: ScoringEngine, windows: Sequence[Window], folder: Path, progress: Progress
) -> Continued:
    """The reference's greedy continuations; none where the plan asks for none."""
    if not plan.greedy:
        return Continued()
    folder.mkdir(parents=True, exist_ok=True)
    with progress(f"continuing with {label_of(plan.reference)}", 1) as advance:
        continued = continue_greedily(engine, windows, plan.greedy, folder / "greedy.json")
        advance()
    return continued


def _floors(
    plan: Plan,
    engine: ScoringEngine,
    store: Store,
    windows: Sequence[Window],
    kept: Path,
    progress: Progress,
) -> Floors:
    """Measure the floors, or read them where an interrupted run has measured them."""
    if kept.exists():
        return Floors(**json.loads(kept.read_text(encoding="utf-8")))
    floors = measure_floors(engine, store, windows, plan.job, plan.seed, progress)
    write_atomically(kept, json.dumps(floors.to_json()))
    return floors
