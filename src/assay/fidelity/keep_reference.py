"""`assay reference`: score a reference once and store it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.engines.ray_scorer import on_ray
from assay.engines.scoring import ScoringEngine, ScoringPath, Window, WindowRows
from assay.engines.specs import check_spec, open_scorer
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.breakdown.floors import FLOOR_WINDOWS, measure_floors
from assay.fidelity.budget import Budget
from assay.fidelity.llama_base import write_base
from assay.fidelity.memory import estimate_memory
from assay.fidelity.names import fingerprint, label_of
from assay.fidelity.open_reference import words_of
from assay.fidelity.pace import WORTH_MEASURING, measure_pace
from assay.fidelity.plan import Plan
from assay.fidelity.reference import model_digests, plan_text, plan_windows
from assay.fidelity.score import LiveRows, require_path
from assay.fidelity.states import store_states
from assay.fidelity.store.manifest import NAME as STORE
from assay.fidelity.store.manifest import read_manifest
from assay.fidelity.store.reader import Store
from assay.fidelity.text.own import write_own_text
from assay.progress import Progress
from assay.verdict import Finding, Metric, Report, Severity, Verdict


@on_ray
def keep_reference(plan: Plan, out: Path, *, dtype: str, form: str, progress: Progress) -> Report:
    """Store the reference of `plan` at `out`; AssayError where the engine gives nothing that could
    be stored.
    """
    _refuse_form(plan, out, form)
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
            a_window = measure_pace(engine, plan, words_of(own or text)).score * plan.length
            kept = len(read_manifest(out).windows) if (out / STORE).exists() else 0
            floors = {"floors": 3 * FLOOR_WINDOWS * a_window} if plan.floors else {}
            Budget().tell(floors | {"states": (len(windows) - kept) * a_window}, progress)
        facts = _origin(plan, engine, windows, progress)
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
    return _stored(plan, out, store, len(windows), text_facts, facts.get("floors"))


def _refuse_form(plan: Plan, out: Path, form: str) -> None:
    """UsageError for a place or a protocol that does not go with the format."""
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


def _origin(
    plan: Plan, engine: ScoringEngine, windows: Sequence[Window], progress: Progress
) -> dict[str, Any]:
    """What a store keeps of where it comes from: the engine, the model's files, the floors."""
    facts: dict[str, Any] = {
        "engine_fingerprint": fingerprint(plan.reference),
        "model_sha256": model_digests(plan.reference),
    }
    if plan.floors:
        live = LiveRows(engine, plan.job)
        floors = measure_floors(engine, live, windows, plan.job, plan.seed, progress)
        facts["floors"] = floors.to_json()
    return facts


def _stored(
    plan: Plan,
    out: Path,
    store: Store,
    windows: int,
    text_facts: Mapping[str, Any],
    floors: Mapping[str, Any] | None,
) -> Report:
    """The report of a store of final states."""
    size = store.size
    results = {
        "format": "assay",
        "windows": windows,
        "tokens": size.tokens,
        "states_bytes": size.states_bytes,
        "head_bytes": size.head_bytes,
        "bytes_per_token": size.bytes_per_token,
        "dtype": store.header.dtype,
        "floors": floors,
        "text": text_facts,
        "engine": dict(store.header.engine),
    }
    return _report(
        plan,
        out,
        results,
        [
            Metric("stored", f"{size.tokens:,} tokens in {windows} windows"),
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
