"""`assay reference`: score a reference once and store it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.engines.opening import check_spec, open_scorer
from assay.engines.scoring import ScoringEngine, ScoringPath, Window, WindowRows
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.floors import measure_floors
from assay.fidelity.identity import fingerprint, label_of
from assay.fidelity.observe import LiveRows, require_path
from assay.fidelity.own_text import write_own_text
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_text, plan_windows, store_states
from assay.fidelity.store.llama_base import write_base
from assay.fidelity.store.manifest import DTYPES
from assay.progress import Progress
from assay.verdict import Metric, Report, Verdict

FORMATS = ("assay", "llama.cpp")


def keep_reference(plan: Plan, out: Path, *, dtype: str, form: str, progress: Progress) -> Report:
    """Store the reference of `plan` at `out`; AssayError where the engine gives nothing that could be stored."""
    if form not in FORMATS or dtype not in ("engine", *DTYPES):
        raise UsageError(
            f"cannot store the format {form!r} with states of {dtype!r}",
            remedy=f"--format {' or '.join(FORMATS)}; --dtype engine, {', '.join(DTYPES)}",
            finding_id="fidelity.usage",
        )
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
                f"{label_of(plan.reference)} gives no final states to store: {engine.ability.reason}",
                finding_id="fidelity.no_states",
                remedy="store its log-probabilities: --format llama.cpp --scored second-half",
            )
        facts: dict[str, Any] = {"engine_fingerprint": fingerprint(plan.reference)}
        if plan.floors:
            live = LiveRows(engine, plan.job)
            facts["floors"] = measure_floors(engine, live, windows, plan.job, plan.seed, progress).to_json()
        store = store_states(
            plan, engine, windows, text_facts, out, progress, None if dtype == "engine" else dtype, facts
        )
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
                "states", f"{size.states_bytes / 2**20:.1f} MiB, {size.bytes_per_token:,.0f} bytes a token"
            ),
            Metric("output head", f"{size.head_bytes / 2**20:.1f} MiB, once"),
        ],
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
