"""`assay kv eval` and `assay kv sweep`: what one codec, or each of many, does to the distribution
of a model, and the bytes it takes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import parse_qsl, quote

from assay.engines.ray_scorer import RayScorer, on_ray
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.breakdown.floors import Floors
from assay.fidelity.budget import Budget
from assay.fidelity.compare import (
    FIRST_LOOK,
    Looks,
    assess,
    certain_findings,
    implausible,
    run_compare,
)
from assay.fidelity.control import against_control, control_findings, control_metrics
from assay.fidelity.engaged import engaged
from assay.fidelity.findings import findings_of
from assay.fidelity.names import label_of
from assay.fidelity.observation import WindowObservation
from assay.fidelity.plan import QUICK_MINUTES, MarginOptions, Plan
from assay.fidelity.report import blocks, headline
from assay.fidelity.result import verdict_of
from assay.fidelity.summary import is_certain, margins_of, summarise
from assay.options import declared_options
from assay.progress import NO_PROGRESS, Progress
from assay.runs import KeptFile
from assay.stats import Resampling
from assay.stats.equivalence import MIN_WINDOWS, Margins, confidence_of_look
from assay.verdict import (
    Block,
    Chart,
    Finding,
    Metric,
    Point,
    Report,
    Series,
    Severity,
    Table,
    Verdict,
    worst,
)
from assay_lab.kv.cache_hook import LENGTHS, NOTE, CacheBytes, Mode, check_ranks, path_of
from assay_lab.kv.calibration import read_calibration
from assay_lab.kv.codecs.samples import Samples, Site
from assay_lab.kv.fit import Fitters, fitters, kept_layers
from assay_lab.kv.lab import Lab, Measured, Unfinished, engine_spec, open_planned
from assay_lab.kv.pages import BLOCK, CODEC, refuse_wrapped
from assay_lab.kv.pages.layout import layout_of
from assay_lab.kv.pages.source import source_of
from assay_lab.kv.spec import KvSpec, parse_spec
from assay_lab.options import EvalPlan, SweepPlan

# One codec.


def comparison(plan: EvalPlan) -> Plan:
    """The plan of the comparison that this is: the model with its exact cache against itself with
    the codec.
    """
    spec = engine_spec(plan.model)
    return Plan(
        reference=spec,
        candidates=(spec,),
        text=plan.text,
        windows=plan.windows,
        length=plan.length,
        path=path_of(plan.mode).value,
        batch=plan.batch,
        seed=plan.seed,
        **{name: getattr(plan, name) for name in declared_options(MarginOptions)},
    )


@on_ray
def run_eval(plan: EvalPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Score the model with the codec in its KV cache against itself without; count the bytes of the
    streams.

    Interrupted, the report holds what was scored, and the same command goes on from there.
    """
    if plan.codec == CODEC:
        return _run_packed(plan, progress)
    refuse_wrapped(plan.codec)
    spec, compared = (
        parse_spec(plan.codec),
        comparison(plan),
    )  # whose margins and sizes are checked now
    for one in filter(None, (spec, parse_spec(plan.control) if plan.control else None)):
        one.require(plan.streams)
        check_ranks(plan.model, str(one))
        if plan.calibration is None:
            require_no_calibration(one, plan.streams)
    budget = Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    margins, look = margins_of(plan), FIRST_LOOK
    certain = False
    with open_planned(
        plan,
        any_engine=True,
        budget=budget,
        together=spec.token_by_token
        and (not plan.control or parse_spec(plan.control).token_by_token),
        codecs=1 + bool(plan.control),
        skip_layers=plan.skip_layers,
        progress=progress,
    ) as lab:
        plan = replace(plan, windows=len(lab.windows), length=lab.length, block=lab.block)
        compared, blocks_of_windows = comparison(plan), lab.blocks

        def enough(seen: Sequence[WindowObservation]) -> bool:
            nonlocal look, certain
            if not (plan.all or plan.control) and look <= len(seen) < len(lab.windows):
                look = 2 * len(seen)
                certain = is_certain(seen, margins, blocks_of_windows)
            return certain or budget.left() <= 0

        subject = {"model": plan.model, "plan": plan.facts()}
        with Unfinished(lambda: lab.partial) as cut:
            lab.measure(
                plan.codec,
                streams=plan.streams,
                skip_layers=plan.skip_layers,
                table_tokens=plan.table_tokens,
                enough=enough,
            )
        measured = lab.partial
        if plan.control and not cut:
            with Unfinished(lambda: measured) as cut:
                lab.measure(
                    plan.control,
                    streams=plan.streams,
                    skip_layers=plan.skip_layers,
                    table_tokens=plan.table_tokens,
                )
        control = lab.partial if plan.control and measured is not lab.partial else None
        note = measured.engagement.notes.get(NOTE, {}) if measured else {}
        results: dict[str, Any] = {
            "codec": str(spec),
            "mode": plan.mode,
            "block": plan.block,
            "streams": plan.streams,
            "skip_layers": list(plan.skip_layers),
            "text": {**lab.text, "length": plan.length},
            "chars_per_token": lab.text.get("characters_per_token"),
            "cache": note.get("cache"),
            "calibration": lab.provenance,
            "table_tokens": plan.table_tokens,
            **budget.results(),
        }
        if measured and not (certain or cut) and (missing := len(lab.windows) - len(measured.seen)):
            budget.leave_out(
                f"{missing} of {len(lab.windows)} passages",
                "differences that fewer passages cannot resolve",
            )
        if not (measured and measured.seen):
            verdict = cut.verdict(Verdict.INCONCLUSIVE)
            found = [*cut.findings(), *budget.findings()]
            return Report("kv eval", verdict, subject, found, results, interrupted=cut.interrupted)
        # Placements that spare every layer of this model are no self-test: nothing took part.
        same = bool(note.get("lossless")) and spec.changes_nothing
        took_part = engaged(
            measured.seen,
            measured.engagement,
            path=lab.job.path,
            hooked=not (cut and measured is lab.partial),
            same=same or bool(cut),
            label=plan.codec,
        )
        # The engine stays open until here: its tokenizer says what tokens are.
        facts, decode = lab.engine.describe(), lab.engine.tokenizer.decode
        settings = json.dumps([plan.mode, plan.streams, plan.skip_layers, lab.about])
        looks = Looks(compared, f"{spec} {settings}", len(measured.seen))
        result = assess(
            compared,
            Floors(),
            decode,
            measured.seen,
            plan.codec,
            took_part,
            facts,
            blocks=lab.blocks,
            confidence=confidence_of_look(looks.number),
            self_test=same,
        )
        if not cut:
            looks.record(result.summary)
        result = replace(result, certain=certain)
        found = [
            *cut.findings(),
            *budget.findings(),
            *certain_findings([result], len(lab.windows)),
            *findings_of(result, plan.allow_marginal),
            *lab.notices(),
        ]
        found += implausible(lab.text, result.summary.ppl_reference)
    verdict = verdict_of(result, plan.allow_marginal)
    body = result.to_json() | results
    against = None
    if control:
        against = against_control(
            result,
            replace(result, label=plan.control, seen=control.seen),
            plan.control_margin,
            plan.margin_ppl,
        )
    if against:
        body["control"] = against.to_json()
        found += control_findings([against])
        verdict = worst([verdict, against.verdict])
    if measured.bytes:
        body["bytes"] = measured.bytes.to_json()
        body["table_tokens"] = measured.bytes.table_tokens
        body["engaged"]["per_layer"] = {str(k): v for k, v in measured.engagement.per_layer.items()}
    return Report(
        command="kv eval",
        verdict=cut.verdict(verdict),
        subject=subject,
        findings=found,
        results=body,
        environment=describe(),
        headline=[
            *headline([result]),
            *cache_figures(measured.bytes),
            *control_metrics([against] if against else []),
        ],
        blocks=blocks([result], compared),
        interrupted=cut.interrupted,
        summary=f"{label_of(compared.reference)} with {plan.codec}",
    )


def _run_packed(plan: EvalPlan, progress: Progress) -> Report:
    """Grade packed pages of vLLM: the same engine with its own cache against what is really
    resident.
    """
    kind, _, rest = plan.model.partition(":")
    if kind != "vllm" or plan.calibration is None:
        raise UsageError(
            "packed pages are graded in vLLM, with a calibration",
            remedy=f"assay kv eval vllm:MODEL --codec {CODEC} --calibration FILE",
            finding_id="kv.usage",
        )
    if (
        plan.streams != "kv"
        or plan.skip_layers
        or plan.control
        or plan.mode != Mode.DECODE
        or plan.block != 1
    ):
        raise UsageError(
            "packed pages hold keys and values of all layers and are graded token by token",
            remedy="leave out --stream, --skip-layers, --control, --mode and --block",
            finding_id="kv.usage",
        )
    calibration, (model, _, query) = read_calibration(Path(plan.calibration)), rest.partition("?")
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "kv_pages" or (name == "kv_cache_dtype" and value != "auto"):
            raise UsageError(
                f"{plan.model}: packed pages are graded against vLLM's own cache, and {name}"
                " changes that one too",
                remedy=f"leave out {name}",
                finding_id="kv.usage",
            )
    source_of(plan.calibration, model)  # refused before the engine starts
    cache = calibration.provenance["cache"]
    layout = layout_of(int(cache["kv_heads"]), int(cache["head_dim"]), BLOCK)
    candidate = f"{plan.model}{'&' if '?' in rest else '?'}kv_pages={quote(str(Path(plan.calibration).resolve()))}"
    compared = replace(
        comparison(plan),
        candidates=(candidate,),
        budget=plan.budget,
        quick=plan.quick,
        all=plan.all,
    )
    found = run_compare(compared, progress)
    calibration.check_text(found.results.get("text", {}), ())
    pages = {"bytes_per_token_and_head": layout.slot, "ratio": layout.ratio, "tokens": BLOCK}
    size = Metric(
        "pages", f"{layout.ratio:.2f}× smaller than bf16: {layout.slot} bytes a token and KV head"
    )
    return replace(
        found,
        command="kv eval",
        subject={"model": plan.model, "plan": plan.facts()},
        results={
            **found.results,
            "codec": CODEC,
            "calibration": dict(calibration.provenance),
            "pages": pages,
        },
        headline=[*found.headline, size],
        summary=f"{label_of(compared.reference)} with packed pages",
    )


def require_no_calibration(spec: KvSpec, streams: str) -> None:
    """UsageError where a codec cannot do without a calibration: now, not when the exact cache has
    been scored.
    """
    for stream in streams:
        recipe = spec.of(stream)
        if recipe:
            recipe.fit(Samples(Site(stream, 0, 1, 1, 64)))


def cache_figures(size: CacheBytes | None) -> list[Metric]:
    """How large the cache is, and what its tables are worth."""
    if size is None:
        return []
    found = [
        Metric(
            "cache",
            f"{size.ratio:.2f}× smaller than bf16: {size.stored / 1024:.0f} of"
            f" {size.bf16 / 1024:.0f} KiB for {size.tokens:,} tokens, {16 / size.ratio:.2f} bits a"
            " value",
        )
    ]
    if size.tables:
        at = ", ".join(f"{size.ratio_at(n):.2f}× at {n // 1024}k" for n in LENGTHS)
        even = (
            "never"
            if size.break_even_tokens is None
            else f"from {size.break_even_tokens:,} tokens on"
        )
        found += [
            Metric(
                "tables",
                f"{size.tables / 2**20:.2f} MiB, as if {size.sharing:.0f} sequences of"
                f" {size.tokens:,} tokens shared them; an encoder needs"
                f" {size.encoder_tables / 2**20:.2f} MiB more",
            ),
            Metric("one sequence with its tables", f"{at}; smaller than bf16 {even}"),
        ]
    return found


# `assay kv sweep`: many codecs on one model and one scored reference, and the Pareto front of bytes
# against KL.
#
# Each is measured once and kept. The one to take, the smallest of the best grade, was chosen for
# what these windows say of it; so it is measured again on windows that took no part, and the
# difference is the winner's curse.


FORMAT = "assay-kv-rows/1"
"""Of the file in which `--out` keeps the rows, so that a sweep goes on another day or with more
codecs.
"""
FINDING = "kv.rows"
"""Id of whatever is wrong with such a file."""
GRADES = ("ACCEPT", "MARGINAL")
"""Best first. What is graded otherwise is never chosen."""


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (bytes, KL) that no other point beats in one without being worse in the other;
    by bytes.

    Of equal points the first stands for all.
    """
    found: list[int] = []
    best = math.inf
    for i in sorted(range(len(points)), key=lambda i: (*points[i], i)):
        if points[i][1] < best:
            found.append(i)
            best = points[i][1]
    return found


def choose(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Index of the smallest row of the best grade that any has; None where none has a grade that
    can be taken.
    """
    ranks = ranked(rows)
    for grade in GRADES:
        graded = [i for i in ranks if rows[i]["grade"] == grade]
        if graded:
            return min(graded, key=lambda i: ranks[i])
    return None


def ranked(rows: Sequence[Mapping[str, Any]]) -> dict[int, tuple[float, float]]:
    """(stored bytes, KL) of the rows that have both, by index; what the budget cut short may lack
    either.
    """
    figures = {i: (_bytes_of(row), row["kld"]["mean"]) for i, row in enumerate(rows)}
    return {i: (a, b) for i, (a, b) in figures.items() if a is not None and b is not None}


def _bytes_of(row: Mapping[str, Any]) -> float | None:
    return row["bytes"]["stored"] if row["bytes"] else None


def curse(chosen: tuple[float, float], again: tuple[float, float]) -> dict[str, float]:
    """Second measurement minus first, each (value, standard error), with a normal 95 % interval."""
    value = again[0] - chosen[0]
    half = 1.959964 * math.hypot(chosen[1], again[1])
    return {"value": value, "lo": value - half, "hi": value + half}


def identity(plan: SweepPlan, windows: Sequence[str]) -> dict[str, Any]:
    """All that a row depends on but its codec; windows by their hashes."""
    kept = ("model", "mode", "streams", "skip_layers", "length", "batch", "table_tokens", "seed")
    digest = hashlib.sha256("\n".join(windows).encode()).hexdigest()
    tables = Path(plan.calibration).read_bytes() if plan.calibration else b""
    return {
        **{name: getattr(plan, name) for name in kept},
        **({"block": plan.block} if plan.block > 1 else {}),
        "windows": digest,
        "calibration": hashlib.sha256(tables).hexdigest() if plan.calibration else None,
    }


def specs_in(path: Path) -> tuple[str, ...]:
    """One SPEC a line; empty lines and those that begin with # are left out. UsageError where it
    cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise _usage(
            f"cannot read the SPECs in {path}: {why}", "give a text file, one SPEC a line"
        ) from error
    return tuple(
        line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
    )


@on_ray
def run_sweep(plan: SweepPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure all, and the chosen one again. Interrupted, the report holds the rows that were
    measured.
    """
    if plan.specs:
        plan = replace(plan, codecs=(*plan.codecs, *specs_in(plan.specs)), specs=None)
    specs = {str(spec): spec for spec in map(parse_spec, plan.codecs)}
    for spec in specs.values():
        spec.require(plan.streams)
    failed: dict[str, AssayError] = {}
    rows: list[dict[str, Any]] = []
    chosen: int | None = None
    again: dict[str, Any] | None = None
    running = ""
    budget = Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    with open_planned(
        plan,
        budget=budget,
        together=all(spec.token_by_token for spec in specs.values()),
        codecs=len(specs),
        least_codecs=1,
        progress=progress,
    ) as lab:
        plan = replace(plan, windows=len(lab.windows), length=lab.length, block=lab.block)
        rows_of = identity(plan, [w.sha256 for w in [*lab.windows, *lab.fresh]])
        file = KeptFile(plan.out, rows_of, FORMAT, FINDING) if plan.out else None
        layers, shape = kept_layers(lab.shape, plan.skip_layers), lab.shape

        def row(where: Lab, spec: KvSpec, key: str) -> dict[str, Any] | None:
            def measure() -> dict[str, Any]:
                measured = _measured(where, spec, plan, pool, layers, lambda: budget.left() <= 0)
                if len(measured.seen) < min(2, len(where.windows)):  # the exact cache took the time
                    raise _Short({"windows": 0})
                found = _row(measured, plan, where.blocks)
                if found["windows"] < len(where.windows):
                    raise _Short(found)
                return found

            try:
                return file.have(key, measure) if file else measure()
            except _Short as short:  # which no file should hold as a whole row
                if not short.row["windows"]:
                    what = (str(spec), f"anything about {spec}") if where is lab else FRESH_LEFT_OUT
                    budget.leave_out(*what)
                    return None
                missing = len(where.windows) - short.row["windows"]
                budget.leave_out(
                    f"{missing} of {len(where.windows)} passages of {spec}",
                    "differences that fewer passages cannot resolve",
                )
                return short.row

        with _fitters(lab, plan.jobs) as pool, Unfinished(lambda: rows) as cut:
            _measure_side_by_side(lab, list(specs.values()), plan, layers, file, budget)
            for name, spec in specs.items():
                if budget.left() <= 0:
                    budget.leave_out(name, f"anything about {name}")
                    continue
                running = name
                try:
                    if found := row(lab, spec, name):
                        rows.append({"codec": name, **found})
                except AssayError as error:
                    if error.finding_id == FINDING:
                        raise
                    failed[name] = error
            running = ""
            if not rows and not failed:
                raise budget.nothing_fits("opening the model and scoring the exact cache took it")
            if not rows:
                raise next(iter(failed.values()))
            chosen = choose(rows)
            if chosen is not None and plan.fresh:
                name, many = (
                    rows[chosen]["codec"],
                    _fresh_that_fit(rows[chosen], len(lab.fresh), budget),
                )
                if not many:
                    budget.leave_out(*FRESH_LEFT_OUT)
                else:
                    fewer = f"{many} " if many < len(lab.fresh) else ""
                    again = row(lab.on(lab.fresh[:many]), specs[name], f"fresh|{fewer}{name}")
                    if again and fewer:
                        missing = f"{len(lab.fresh) - many} of {len(lab.fresh)} fresh windows"
                        budget.leave_out(missing, "differences that fewer passages cannot resolve")
        if cut and chosen is None:  # of the rows that are whole
            chosen = choose(rows)
        if running and lab.partial and lab.partial.seen:
            # what was measured of the row that was cut short
            rows.append(
                {"codec": running, "interrupted": True, **_row(lab.partial, plan, lab.blocks)}
            )
        text, notices = lab.text, lab.notices()
    numbers = list(ranks := ranked(rows))
    on_front = [numbers[i] for i in pareto_front(list(ranks.values()))]
    winner = None if chosen is None else _winner(rows[chosen], again)
    verdict, findings = _judged(rows, winner) if rows else (Verdict.INCONCLUSIVE, [])
    return Report(
        command="kv sweep",
        verdict=cut.verdict(verdict),
        subject={"model": plan.model, "plan": plan.facts()},
        findings=[
            *cut.findings(),
            *budget.findings(),
            *findings,
            *_not_ranked(rows, ranks),
            *(_failure(codec, error) for codec, error in failed.items()),
            *notices,
        ],
        results={
            "mode": plan.mode,
            "rows": rows,
            "front": [rows[i]["codec"] for i in on_front],
            "winner": winner,
            "failed": {codec: error.message for codec, error in failed.items()},
            "text": text,
            **budget.results(),
            "cache": shape.to_json(),
        },
        environment=describe(),
        headline=_headline(rows, winner),
        blocks=_blocks(rows, on_front) if rows else [],
        interrupted=cut.interrupted,
        summary=(
            f"{len(rows)} codecs on {plan.windows} windows of {plan.length} tokens, {plan.mode}; "
            f"{len(on_front)} on the Pareto front"
        ),
    )


FRESH_LEFT_OUT = ("fresh windows", "whether the choice holds on other text")


def _fresh_that_fit(row: Mapping[str, Any], count: int, budget: Budget) -> int:
    """How many of `count` fresh windows there is time for, by what those of the chosen `row` took;
    0 for fewer than 8 (or all).
    """
    took = budget.took.get("the exact cache", 0.0) + row["score_s"]
    a_window = max(1e-9, took / row["windows"])  # of what was kept it is 0
    fit = count if a_window * count <= budget.left() else max(0, int(budget.left() / a_window))
    return fit if fit >= min(MIN_WINDOWS, count) and budget.left() > 0 else 0


class _Short(Exception):
    """A row that the end of the budget cut short."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row


def _fitters(lab: Lab, jobs: int) -> AbstractContextManager[Fitters | None]:
    """Who fits the codecs: none where the engine is in workers, which fit theirs themselves."""
    return nullcontext() if isinstance(lab.engine, RayScorer) else fitters(lab.bench, jobs)


def _measure_side_by_side(
    lab: Lab,
    specs: Sequence[KvSpec],
    plan: SweepPlan,
    layers: Sequence[int],
    file: KeptFile | None,
    budget: Budget,
) -> None:
    """On a cluster: have all rows measured and kept, several at once, so that no worker waits for
    the end of a row.

    The rows are read in their order afterwards; one that cannot be measured says so then.
    """
    todo = [spec for spec in specs if not (file and str(spec) in file)]
    if not isinstance(lab.engine, RayScorer) or lab.engine.workers < 2 or len(todo) < 2:
        return
    lab.score_reference()
    stop = Event()

    def measure(spec: KvSpec) -> None:
        with suppress(AssayError):
            _measured(
                lab.apart(), spec, plan, None, layers, lambda: stop.is_set() or budget.left() <= 0
            )

    with (
        lab.progress("measuring rows side by side", len(todo)) as advance,
        ThreadPoolExecutor(lab.engine.workers) as threads,
    ):
        try:
            for _ in threads.map(measure, todo):
                advance()
        except BaseException:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _measured(
    lab: Lab,
    spec: KvSpec,
    plan: SweepPlan,
    pool: Fitters | None,
    layers: Sequence[int],
    late: Callable[[], bool],
) -> Measured:
    return lab.measure(
        str(spec),
        coders=(lambda: pool.fit(spec, layers, plan.streams)) if pool else None,
        table_tokens=plan.table_tokens,
        measure_windows=4,
        enough=lambda seen: late(),
        streams=plan.streams,
        skip_layers=plan.skip_layers,
    )


def _row(measured: Measured, plan: SweepPlan, blocks: Sequence[int] | None) -> dict[str, Any]:
    """One codec on the windows of a lab."""
    summary = summarise(measured.seen, Margins(), Resampling(2000, plan.seed), blocks=blocks)
    figures = summary.to_json()
    fit, score = measured.seconds
    return {
        "bytes": measured.bytes.to_json() if measured.bytes else None,
        **{
            k: figures[k]
            for k in (
                "grade",
                "dppl_pct",
                "kld",
                "tv",
                "top1_pct",
                "top1_beyond_rounding_pct",
                "tokens",
                "windows",
            )
        },
        "kld_se": summary.kl.se,
        "fires": measured.engagement.fires,
        "fit_s": round(fit, 2),
        "score_s": round(score, 2),
    }


def _winner(row: Mapping[str, Any], again: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"codec": row["codec"], "same_windows": row, "fresh_windows": again}
    figures = [(r["kld"]["mean"], r["kld_se"]) for r in (row, again) if r]
    if len(figures) == 2 and all(x is not None and math.isfinite(x) for f in figures for x in f):
        found["winners_curse"] = curse(*figures)
    return found


def _judged(
    rows: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None
) -> tuple[Verdict, list[Finding]]:
    """PASS needs a codec with a grade that fresh windows confirm; where all are rejected the sweep
    fails.
    """
    if winner is None:
        grades = [row["grade"] for row in rows]
        undecided = [row["codec"] for row in rows if row["grade"] != "REJECT"]
        if grades and not undecided:
            title = f"none of the {len(rows)} codecs is within the margins: every one is REJECT"
            remedies = (
                "sweep codecs with more bits, or keep first tokens and boundary layers exact",
            )
            return Verdict.FAIL, [
                Finding("kv.none_accepted", Severity.ERROR, title, remedies=remedies)
            ]
        title = (
            f"nothing is chosen: {len(undecided)} of {len(rows)} codecs are undecided, and none is"
            " accepted"
        )
        remedies = ("run again with more windows (--windows)",)
        return Verdict.INCONCLUSIVE, [
            Finding("kv.undecided", Severity.WARNING, title, remedies=remedies)
        ]
    again = winner["fresh_windows"]
    if again and again["grade"] not in GRADES:
        title = f"fresh windows do not confirm {winner['codec']}: {again['grade']} on them"
        remedies = (
            "run again with more windows (--windows, --fresh), or take a codec with more bits",
        )
        return Verdict.INCONCLUSIVE, [
            Finding("kv.choice_unconfirmed", Severity.WARNING, title, remedies=remedies)
        ]
    return Verdict.PASS, []


def _failure(codec: str, error: AssayError) -> Finding:
    return Finding(
        "kv.sweep_failed",
        Severity.WARNING,
        f"{codec} could not be measured: {error.message}",
        remedies=(error.remedy,) if error.remedy else (),
    )


def _not_ranked(rows: Sequence[Mapping[str, Any]], ranks: Collection[int]) -> list[Finding]:
    names = [row["codec"] for i, row in enumerate(rows) if i not in ranks]
    if not names:
        return []
    title = f"{', '.join(names)}: cut short before its bytes and KL were known, so it is not ranked"
    return [Finding("kv.not_ranked", Severity.INFO, title, remedies=("run the same sweep again",))]


def _headline(rows: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None) -> list[Metric]:
    if winner is None:
        if not rows:
            return []
        ranks = ranked(rows)
        if not ranks:
            return []
        least = rows[min(ranks, key=lambda i: ranks[i][::-1])]
        return [Metric("least KL", f"{least['codec']}: {_said(least)}")]
    row, again = winner["same_windows"], winner["fresh_windows"]
    found = [Metric("chosen", f"{winner['codec']}: {_said(row)}")]
    if again:
        found.append(Metric("fresh windows", _said(again)))
    if difference := winner.get("winners_curse"):
        found.append(Metric("winner's curse", f"{_interval(difference, '+.2g', 'nats')}"))
    return found


UNKNOWN = "–"
"""In place of a figure that was not measured."""


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _interval(figure: Mapping[str, Any], form: str, unit: str = "") -> str:
    """A value with its interval, as far as they are known."""
    value = figure["mean" if "mean" in figure else "value"]
    shown = f"{_number(value, form)} {unit}".rstrip()
    if None in (figure["lo"], figure["hi"]):
        return shown
    return f"{shown} [{figure['lo']:{form}}, {figure['hi']:{form}}]"


def _smaller(row: Mapping[str, Any]) -> str:
    return f"{row['bytes']['ratio']:.2f}×" if row["bytes"] else UNKNOWN


def _said(row: Mapping[str, Any]) -> str:
    size = f"{_smaller(row)} smaller" if row["bytes"] else "bytes not measured"
    return (
        f"{size}, KL {_number(row['kld']['mean'], '.3g')} nats, "
        f"Δppl {_interval(row['dppl_pct'], '+.2f', '%')}, {row['grade']}"
    )


def _blocks(rows: Sequence[Mapping[str, Any]], on_front: Sequence[int]) -> list[Block]:
    ranks = ranked(rows)
    ordered = sorted(range(len(rows)), key=lambda i: _bytes_of(rows[i]) or math.inf)
    table = Table(
        "Codecs by stored bytes",
        ("", "codec", "smaller", "KL (nats)", "Δppl %", "top-1 %", "grade"),
        [["◆" if i in on_front else "", *_cells(rows[i])] for i in ordered],
        numeric=frozenset({2}),
        note="◆ on the Pareto front: no other is smaller without a larger KL",
    )
    if not ranks:
        return [table]
    points = {i: Point(size / 1024, kl) for i, (size, kl) in ranks.items()}
    others = [points[i] for i in points if i not in on_front]
    series = [Series("Pareto front", [points[i] for i in on_front])]
    if others:
        series.append(Series("others", others))
    chart = Chart(
        "KL against stored bytes",
        "scatter",
        series,
        x_label="stored KiB of a window's cache",
        y_label="KL (nats)",
        log_x=True,
        log_y=all(p.y > 0 for p in points.values()),
    )
    return [table, chart]


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row["codec"],
        _smaller(row),
        _interval(row["kld"], ".3g"),
        _interval(row["dppl_pct"], "+.2f"),
        _number(row["top1_pct"]["value"], ".2f"),
        row["grade"],
    ]


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="kv.usage")
