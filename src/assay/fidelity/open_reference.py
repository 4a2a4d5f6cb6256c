"""Score the reference of a plan, or get one ready that scores along with its candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from assay.engines.scoring import ScoringEngine, Window
from assay.engines.specs import SCORERS, is_server, open_scorer
from assay.fidelity.breakdown.floors import FLOOR_WINDOWS, Floors, measure_floors
from assay.fidelity.breakdown.greedy import Continued, continue_greedily
from assay.fidelity.budget import Budget
from assay.fidelity.names import fingerprint, label_of
from assay.fidelity.pace import WORTH_MEASURING, measure_pace
from assay.fidelity.plan import Plan
from assay.fidelity.reference import Reference, plan_text, plan_windows, tokenizer_check
from assay.fidelity.routing import read_routing
from assay.fidelity.score import LiveRows, require_path
from assay.fidelity.states import store_states
from assay.fidelity.store.manifest import NAME as STORE
from assay.fidelity.store.manifest import read_manifest
from assay.fidelity.store.reader import Store
from assay.fidelity.stored_reference import stored_reference
from assay.fidelity.text.own import OwnText, write_own_text
from assay.fidelity.text.sources import Text
from assay.fidelity.text.tokenizer_proof import probe_ids
from assay.progress import Progress
from assay.runs import Kept, keep_value, read_value


def open_reference(
    plan: Plan, folder: Path, progress: Progress, budget: Budget | None = None
) -> Reference:
    """Score the reference of the plan into `folder`, read a stored one, or get one ready that
    scores along.

    OutOfTime where the budget is too small for any answer.
    """
    budget = budget or Budget()
    if plan.reference.startswith(("run:", "pack:")):
        return stored_reference(plan)
    text = plan_text(plan)  # before a model is loaded: a wrong name should not cost that
    with budget.stage("loading libraries"):  # once; a candidate is opened without
        import_module(
            SCORERS.get(f"{plan.reference.partition(':')[0]}:", "torch").partition(":")[0]
        )
    with budget.stage("opening the reference"):
        engine = open_scorer(plan.reference)
    try:
        require_path(engine, plan.job)
        own = write_own_text(plan, engine, progress, folder)
        plan = _fitting(plan, engine, own or text, budget, folder, progress)
        windows, text_facts = plan_windows(plan, engine.tokenizer, own, text)
        reference = Reference(
            windows,
            LiveRows(engine, plan.job),
            tokenizer_check(engine.tokenizer.sha256, engine.tokenizer.vocab_size),
            {"label": label_of(plan.reference), **engine.describe()},
            text_facts,
            probe_ids=probe_ids(engine.tokenizer.encode),
            engine=engine,
            fingerprint=fingerprint(plan.reference),
            plan=plan,
        )
        if engine.ability.states:
            _store(reference, plan, engine, folder, budget, progress)
        reference.greedy = _greedy(plan, engine, windows, folder, progress)
        if engine.ability.states:
            if plan.routing:
                kept = Kept(folder / "routing")
                reference.routing = read_routing(engine, windows, plan.job, kept, progress)
            # By now it also says how many windows ran together.
            reference.facts = {**reference.facts, **engine.describe()}
            reference.close()
    except BaseException:
        engine.close()
        raise
    return reference


def _store(
    reference: Reference,
    plan: Plan,
    engine: ScoringEngine,
    folder: Path,
    budget: Budget,
    progress: Progress,
) -> None:
    """Store the states of the reference, so that its engine can be closed, and measure the floors.

    The floors come after the answer, unless opening the engine again would take longer than they
    do.
    """
    windows = reference.windows
    with budget.stage("scoring the reference"):
        store = store_states(
            plan, engine, windows, reference.text_facts, folder / "reference", progress
        )
    reference.rows = store
    opening = budget.took["opening the reference"]
    passes = 3 * FLOOR_WINDOWS * budget.took["scoring the reference"] / len(windows)
    kept = Kept(folder / "floors")
    if not plan.floors:
        return
    if "floors" in kept or (budget.seconds is None and opening > passes):
        reference.floors = _floors(plan, engine, store, windows, kept, progress)
        return

    def measure_later() -> Floors:
        store.drop_head()  # the model comes with its own
        again = open_scorer(plan.reference)
        try:
            return _floors(plan, again, store, windows, kept, progress)
        finally:
            again.close()

    reference.floors_later = (opening + passes, measure_later)


def _fitting(
    plan: Plan,
    engine: ScoringEngine,
    text: Text | OwnText | None,
    budget: Budget,
    folder: Path,
    progress: Progress,
) -> Plan:
    """The plan with as many windows as the budget allows, by the engine's own speed; a run that
    goes on keeps its size.

    The expected time is told, without a budget too.
    """
    sides, opening = len(plan.sides), budget.took["opening the reference"]
    if budget.seconds is None and plan.windows * plan.length * (1 + sides) < WORTH_MEASURING:
        return plan
    pace = measure_pace(engine, plan, words_of(text))
    here = sum(
        not is_server(spec) for spec in plan.sides
    )  # whose opening takes as long as the reference's
    scored = sides if engine.ability.states else 2 * sides - 1
    once = int(plan.routing)  # the reference runs once more for its routing, a candidate twice
    a_token = pace.score * (1 + scored + once * (1 + 2 * sides)) + pace.compare * sides * (1 + once)
    kept = folder / "size.json"
    if budget.seconds is None:
        windows, length, batch = plan.windows, plan.length, plan.batch
    elif (known := read_value(kept)) is not None:
        windows, length, batch = known
    else:
        windows, length = budget.size(a_token, plan.windows, plan.length, opening=opening * here)
        batch = plan.batch or budget.together(pace.score * length)
        keep_value(kept, [windows, length, batch])
    budget.note_size((plan.windows, plan.length), (windows, length))
    each = pace.score * (1 + (not engine.ability.states) + 2 * once) + pace.compare * (1 + once)
    expected = {"reference": pace.score * ((1 + once) * windows - windows_kept(folder)) * length}
    for number, spec in enumerate(plan.sides):
        todo = windows - _scored(folder, number, 1 if is_server(spec) else batch or 4)
        expected[label_of(spec, plan.sides)] = (
            opening * (not is_server(spec)) + each * max(0, todo) * length
        )
    budget.tell(expected, progress)
    return replace(plan, windows=windows, length=length, batch=batch)


def words_of(text: Text | OwnText | None) -> str:
    """The text itself, empty where there is none yet."""
    words = text.text if isinstance(text, OwnText) else text
    return words.text if isinstance(words, Text) else words or ""


def windows_kept(folder: Path) -> int:
    """Windows of the reference that an earlier run of this folder has stored."""
    there = (folder / "reference" / STORE).exists()
    return len(read_manifest(folder / "reference").windows) if there else 0


def _scored(folder: Path, number: int, batch: int) -> int:
    """Windows of a candidate that an earlier run has scored: its batches, each a file."""
    return sum(not path.suffix for path in folder.glob(f"candidate-{number:02d}*/*")) * batch


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
    kept: Kept,
    progress: Progress,
) -> Floors:
    """Measure the floors, or read them where an interrupted run has measured them."""

    def measure() -> dict[str, Any]:
        return measure_floors(engine, store, windows, plan.job, plan.seed, progress).to_json()

    return Floors(**kept.have("floors", measure))
