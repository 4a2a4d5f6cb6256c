"""The reference's side of a comparison: its windows, its rows, its floors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from assay.engines.ray_scorer import on_ray
from assay.engines.scoring import ScoringEngine, ScoringPath, TokenizerFacts, Window, WindowRows
from assay.engines.specs import SCORERS, check_spec, is_server, open_scorer
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.breakdown.floors import FLOOR_WINDOWS, Floors, measure_floors
from assay.fidelity.breakdown.greedy import Continued, continue_greedily
from assay.fidelity.budget import Budget
from assay.fidelity.llama_base import open_base, write_base
from assay.fidelity.memory import estimate_memory
from assay.fidelity.names import fingerprint, label_of
from assay.fidelity.pace import WORTH_MEASURING, measure_pace
from assay.fidelity.pack.reader import open_pack
from assay.fidelity.plan import Plan
from assay.fidelity.routing import Routing, read_routing
from assay.fidelity.score import LiveRows, ReferenceRows, require_path
from assay.fidelity.store.manifest import NAME as STORE
from assay.fidelity.store.manifest import StoreHeader, read_manifest
from assay.fidelity.store.reader import Store, open_store, stored_path
from assay.fidelity.store.writer import StoreWriter
from assay.fidelity.text.own import OwnText, write_own_text
from assay.fidelity.text.sources import SELF, Text, read_text
from assay.fidelity.text.tokenizer_proof import probe_ids
from assay.fidelity.windows import available_windows, blocks_of, cut_windows, places_of
from assay.progress import Progress
from assay.runs import Kept, keep_value, read_value
from assay.verdict import Finding, Metric, Report, Severity, Verdict


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
    """Its ids of the probe text (`assay.fidelity.text.tokenizer_proof`), None where nobody knows them."""
    greedy: Continued = field(
        default_factory=lambda: Continued(reason="a stored reference has no model")
    )
    """Its greedy continuations, where the plan asks for them."""
    engine: ScoringEngine | None = None
    find_head: Callable[[Any], None] = lambda engine: None
    """Told each candidate's engine before it scores: a pack without an output head takes the
    candidate's.
    """
    model_sha256: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files of its model, by which a stranger's copy is known as the same; empty
    where nobody knows.
    """
    fingerprint: str = ""
    """`identity.fingerprint` of what scored it; empty where nobody knows."""
    routing: Routing | None = None
    """What its routers choose, where the plan asks for it."""
    plan: Plan | None = None
    """The plan with as many windows as a budget allows, None where it is as it was."""
    floors_later: tuple[float, Callable[[], Floors]] | None = None
    """Seconds that the floors will take, and what measures them; None where they are measured or
    not wanted.
    """

    def blocks(self, count: int) -> list[int]:
        """The cluster of each of the first windows; a store of version 0.1 has its windows one
        after the other.
        """
        places = self.text_facts.get("places") or range(len(self.windows))
        return blocks_of(places[:count])

    def is_same(self, spec: str, facts: Mapping[str, Any]) -> bool:
        """Whether `spec`, whose engine says `facts` of itself, is the reference itself: the same
        files run the same way.
        """
        if self.fingerprint and fingerprint(spec) == self.fingerprint:
            return True
        own = {name: value for name, value in self.facts.items() if name not in ("label", "states")}
        return bool(self.model_sha256) and own == facts and model_digests(spec) == self.model_sha256

    def close(self) -> None:
        """Close the engine, where one is still open."""
        if self.engine:
            self.engine.close()
            self.engine = None


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
    opening = budget.took["opening the reference"]
    keep_open = not engine.ability.states
    try:
        require_path(engine, plan.job)
        own = write_own_text(plan, engine, progress, folder)
        plan = _fitting(plan, engine, own or text, budget, folder, opening, progress)
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
                plan=plan,
            )
        with budget.stage("scoring the reference"):
            store = store_states(plan, engine, windows, text_facts, folder / "reference", progress)
        # The floors come after the answer, unless opening the engine again would take longer than
        # they do.
        passes = 3 * FLOOR_WINDOWS * budget.took["scoring the reference"] / len(windows)
        floors, kept, later = Floors(), Kept(folder / "floors"), None
        if plan.floors and ("floors" in kept or (budget.seconds is None and opening > passes)):
            floors = _floors(plan, engine, store, windows, kept, progress)
        elif plan.floors:

            def measure_later() -> Floors:
                store.drop_head()  # the model comes with its own
                again = open_scorer(plan.reference)
                try:
                    return _floors(plan, again, store, windows, kept, progress)
                finally:
                    again.close()

            later = (opening + passes, measure_later)
        greedy = _greedy(plan, engine, windows, folder, progress)
        routing = None
        if plan.routing:
            routing = read_routing(engine, windows, plan.job, Kept(folder / "routing"), progress)
        facts |= engine.describe()  # by now also how many windows ran together
        return Reference(
            windows,
            store,
            check,
            facts,
            text_facts,
            floors,
            probe,
            greedy,
            routing=routing,
            fingerprint=own_print,
            plan=plan,
            floors_later=later,
        )
    except BaseException:
        keep_open = False
        raise
    finally:
        if not keep_open:
            engine.close()


def _fitting(
    plan: Plan,
    engine: ScoringEngine,
    text: Text | OwnText | None,
    budget: Budget,
    folder: Path,
    opening: float,
    progress: Progress,
) -> Plan:
    """The plan with as many windows as the budget allows, by the engine's own speed; a run that
    goes on keeps its size.

    The expected time is told, without a budget too.
    """
    sides = len(plan.sides)
    if budget.seconds is None and plan.windows * plan.length * (1 + sides) < WORTH_MEASURING:
        return plan
    pace = measure_pace(engine, plan, _words(text))
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


def _words(text: Text | OwnText | None) -> str:
    words = text.text if isinstance(text, OwnText) else text
    return words.text if isinstance(words, Text) else words or ""


def windows_kept(folder: Path) -> int:
    """Windows of the reference that an earlier run of this folder has stored."""
    there = (folder / "reference" / STORE).exists()
    return len(read_manifest(folder / "reference").windows) if there else 0


def _scored(folder: Path, number: int, batch: int) -> int:
    """Windows of a candidate that an earlier run has scored: its batches, each a file."""
    return sum(not path.suffix for path in folder.glob(f"candidate-{number:02d}*/*")) * batch


def plan_text(plan: Plan) -> Text | None:
    """The text that the plan names, None where the reference writes it; AssayError where it cannot
    be read.
    """
    return None if plan.text == (SELF,) else read_text(plan.text)


def plan_windows(
    plan: Plan, tokenizer: TokenizerFacts, own: OwnText | None = None, text: Text | None = None
) -> tuple[list[Window], dict[str, Any]]:
    """The windows of the plan's text (`own`, where the reference wrote it; `text`, where it has
    been read already), and what a result says of them.

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
        "places": places_of(len(ids), plan.cut, tokenizer.bos_id, plan.windows),
        "characters_per_token": len(text.text) / len(ids),
        "latin": text.is_latin,
        "bos_id": tokenizer.bos_id,
        "tokenizer_sha256": tokenizer.sha256,
    }


def hash_of(windows: Sequence[Window]) -> str:
    """One hash of all windows."""
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


def tokenizer_check(sha256: str, vocab_size: int) -> Callable[[TokenizerFacts, str], None]:
    """The check that a candidate's vocabulary has this hash."""

    def check(candidate: TokenizerFacts, label: str) -> None:
        if candidate.sha256 != sha256:
            raise AssayError(
                f"{label} has another tokenizer than the reference: their vocabularies differ"
                f" ({candidate.vocab_size:,} and {vocab_size:,} entries, hashes"
                f" {candidate.sha256[:12]} and {sha256[:12]})",
                finding_id="fidelity.tokenizer_mismatch",
                remedy=(
                    "distributions over different tokens cannot be compared; give a candidate of"
                    " the same model"
                ),
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
    kept: Kept,
    progress: Progress,
) -> Floors:
    """Measure the floors, or read them where an interrupted run has measured them."""

    def measure() -> dict[str, Any]:
        return measure_floors(engine, store, windows, plan.job, plan.seed, progress).to_json()

    return Floors(**kept.have("floors", measure))


# `run:DIR` and `run:FILE` as the reference: a store of assay's, or llama.cpp's file of
# log-probabilities.


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


def size_check(
    vocab_size: int, windows: Sequence[Window], name: str
) -> Callable[[TokenizerFacts, str], None]:
    """What can be told of a candidate's tokenizer where the reference has only a number of tokens."""

    def check(candidate: TokenizerFacts, label: str) -> None:
        if (
            candidate.vocab_size > vocab_size
            or max(max(w.tokens) for w in windows) >= candidate.vocab_size
        ):
            raise AssayError(
                f"{label} has {candidate.vocab_size:,} tokens, {name} has {vocab_size:,}",
                finding_id="fidelity.tokenizer_mismatch",
                remedy="give a candidate of the same model",
            )

    return check


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


# `assay reference`: score a reference once and store it.


@on_ray
def keep_reference(plan: Plan, out: Path, *, dtype: str, form: str, progress: Progress) -> Report:
    """Store the reference of `plan` at `out`; AssayError where the engine gives nothing that could
    be stored.
    """
    if form == "llama.cpp" and plan.scored != "second-half":
        raise UsageError(
            "llama.cpp's file holds the second half of each window",
            remedy="give --scored second-half",
            finding_id="fidelity.usage",
        )
    if out.is_file() if form == "assay" else out.is_dir():
        raise UsageError(
            f"--out {out} is a {'file' if form == 'assay' else 'folder'}, the format {form} needs "
            f"{'a folder' if form == 'assay' else 'a file'}",
            remedy="give another name",
            finding_id="fidelity.usage",
        )
    check_spec(plan.reference, ScoringPath(plan.path))
    estimate_memory(plan, progress)
    text = plan_text(plan)
    engine = open_scorer(plan.reference)
    try:
        require_path(engine, plan.job)
        own = write_own_text(plan, engine, progress)
        windows, text_facts = plan_windows(plan, engine.tokenizer, own, text)
        if form == "llama.cpp":
            return _write_base(plan, out, engine, windows, text_facts, progress)
        if not engine.ability.states:
            raise AssayError(
                f"{label_of(plan.reference)} gives no final states to store:"
                f" {engine.ability.reason}",
                finding_id="fidelity.no_states",
                remedy="store its log-probabilities: --format llama.cpp --scored second-half",
            )
        if len(windows) * plan.length >= WORTH_MEASURING:
            a_window = measure_pace(engine, plan, _words(own or text)).score * plan.length
            kept = len(read_manifest(out).windows) if (out / STORE).exists() else 0
            floors = {"floors": 3 * FLOOR_WINDOWS * a_window} if plan.floors else {}
            Budget().tell(floors | {"states": (len(windows) - kept) * a_window}, progress)
        facts: dict[str, Any] = {
            "engine_fingerprint": fingerprint(plan.reference),
            "model_sha256": model_digests(plan.reference),
        }
        if plan.floors:
            live = LiveRows(engine, plan.job)
            facts["floors"] = measure_floors(
                engine, live, windows, plan.job, plan.seed, progress
            ).to_json()
        number_format = None if dtype == "engine" else dtype
        try:
            store = store_states(
                plan, engine, windows, text_facts, out, progress, number_format, facts
            )
        except KeyboardInterrupt:
            if not (out / STORE).exists():
                raise
            return _cut_short(plan, out, len(windows), text_facts)
    finally:
        engine.close()
    size = store.size
    results = {
        "format": form,
        "windows": len(windows),
        "tokens": size.tokens,
        "states_bytes": size.states_bytes,
        "head_bytes": size.head_bytes,
        "bytes_per_token": size.bytes_per_token,
        "dtype": store.header.dtype,
        "floors": facts.get("floors"),
        "text": text_facts,
        "engine": dict(store.header.engine),
    }
    return _report(
        plan,
        out,
        results,
        [
            Metric("stored", f"{size.tokens:,} tokens in {len(windows)} windows"),
            Metric(
                "states",
                f"{size.states_bytes / 2**20:.1f} MiB, {size.bytes_per_token:,.0f} bytes a token",
            ),
            Metric("output head", f"{size.head_bytes / 2**20:.1f} MiB, once"),
        ],
    )


def _cut_short(plan: Plan, out: Path, total: int, text: Mapping[str, Any]) -> Report:
    """The report of a reference that was interrupted: what is stored stays."""
    done = len(read_manifest(out).windows)
    title = (
        f"interrupted: {done} of {total} passages are stored, the same command goes on from there"
    )
    finding = Finding("fidelity.interrupted", Severity.WARNING, title)
    results = {"windows": total, "stored": done, "text": text}
    report = _report(plan, out, results, [Metric("stored", f"{done} of {total} passages")])
    return replace(
        report, verdict=Verdict.INCONCLUSIVE, findings=(finding,), interrupted=True, summary=""
    )


def model_digests(spec: str) -> dict[str, str]:
    """SHA-256 of the files of a model on this machine by their names; empty where the spec names
    none.
    """
    path = Path(spec.partition("?")[0].partition(":")[2]).expanduser()
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    found = {}
    for file in files:
        if file.is_file() and not file.name.startswith("."):
            with file.open("rb") as content:
                found[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return found


def _write_base(
    plan: Plan,
    out: Path,
    engine: ScoringEngine,
    windows: Sequence[Window],
    text_facts: Mapping[str, Any],
    progress: Progress,
) -> Report:
    with progress(f"scoring {label_of(plan.reference)}", len(windows)) as advance:

        def rows() -> Iterator[WindowRows]:
            for row in engine.score_windows(windows, plan.job):
                yield row
                advance()

        base = write_base(out, windows, rows())
    size = out.stat().st_size
    tokens = len(windows) * base.rows_per_window
    results = {
        "format": "llama.cpp",
        "windows": len(windows),
        "tokens": tokens,
        "bytes": size,
        "bytes_per_token": size / tokens,
        "text": text_facts,
        "engine": engine.describe(),
    }
    return _report(
        plan,
        out,
        results,
        [
            Metric("stored", f"{tokens:,} tokens in {len(windows)} windows"),
            Metric("size", f"{size / 2**20:.1f} MiB, {size / tokens:,.0f} bytes a token"),
        ],
    )


def _report(plan: Plan, out: Path, results: dict[str, Any], headline: list[Metric]) -> Report:
    return Report(
        command="reference",
        verdict=Verdict.PASS,
        subject={"engine": plan.reference, "out": str(out), "text": results["text"]["sources"]},
        results=results,
        environment=describe(),
        headline=headline,
        summary=f"stored; compare with it as run:{out}",
    )
