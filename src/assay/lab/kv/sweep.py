"""`assay kv sweep`: many codecs on one model and one scored reference, and the Pareto front of bytes against KL.

Each is measured once and kept. The one to take, the smallest of the best grade, was chosen for what these windows say of
it; so it is measured again on windows that took no part, and the difference is the winner's curse.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from assay.engines.ray_scorer import RayScorer, on_ray
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.cost import Budget
from assay.fidelity.plan import QUICK_MINUTES
from assay.fidelity.result import summarise
from assay.lab.kv.fit import Fitters, fitters, kept_layers
from assay.lab.kv.lab import Lab, Measured, Unfinished, open_lab
from assay.lab.kv.spec import KvSpec, parse_spec
from assay.lab.options import SweepPlan
from assay.progress import NO_PROGRESS, Progress
from assay.runs import KeptFile
from assay.stats.equivalence import MIN_WINDOWS, Margins
from assay.stats.intervals import Resampling
from assay.verdict import Block, Chart, Finding, Metric, Point, Report, Series, Severity, Table, Verdict

FORMAT = "assay-kv-rows/1"
"""Of the file in which `--out` keeps the rows, so that a sweep goes on another day or with more codecs."""
FINDING = "kv.rows"
"""Id of whatever is wrong with such a file."""
GRADES = ("ACCEPT", "MARGINAL")
"""Best first. What is graded otherwise is never chosen."""


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the (bytes, KL) that no other point beats in one without being worse in the other; by bytes.

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
    """Index of the smallest row of the best grade that any has; None where none has a grade that can be taken."""
    for grade in GRADES:
        graded = [i for i, row in enumerate(rows) if row["grade"] == grade]
        if graded:
            return min(graded, key=lambda i: (rows[i]["bytes"]["stored"], rows[i]["kld"]["mean"]))
    return None


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
    """One SPEC a line; empty lines and those that begin with # are left out. UsageError where it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise _usage(f"cannot read the SPECs in {path}: {why}", "give a text file, one SPEC a line") from error
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


@on_ray
def run_sweep(plan: SweepPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure all, and the chosen one again. Interrupted, the report holds the rows that were measured."""
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
    with open_lab(
        plan.model,
        plan.text,
        windows=plan.windows,
        fresh=plan.fresh,
        length=plan.length,
        mode=plan.mode,
        batch=plan.batch,
        block=plan.block,
        calibration=plan.calibration,
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
                name, many = rows[chosen]["codec"], _fresh_that_fit(rows[chosen], len(lab.fresh), budget)
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
        if running and lab.partial and lab.partial.bytes:  # what was measured of the row that was cut short
            rows.append({"codec": running, "interrupted": True, **_row(lab.partial, plan, lab.blocks)})
        text, notices = lab.text, lab.notices()
    on_front = pareto_front([(r["bytes"]["stored"], r["kld"]["mean"]) for r in rows])
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
        summary=f"{len(rows)} codecs on {plan.windows} windows of {plan.length} tokens, {plan.mode}; "
        f"{len(on_front)} on the Pareto front",
    )


FRESH_LEFT_OUT = ("fresh windows", "whether the choice holds on other text")


def _fresh_that_fit(row: Mapping[str, Any], count: int, budget: Budget) -> int:
    """How many of `count` fresh windows there is time for, by what those of the chosen `row` took; 0 for fewer than 8 (or all)."""
    a_window = (budget.took.get("the exact cache", 0.0) + row["score_s"]) / row["windows"]
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
    lab: Lab, specs: Sequence[KvSpec], plan: SweepPlan, layers: Sequence[int], file: KeptFile | None, budget: Budget
) -> None:
    """On a cluster: have all rows measured and kept, several at once, so that no worker waits for the end of a row.

    The rows are read in their order afterwards; one that cannot be measured says so then.
    """
    todo = [spec for spec in specs if not (file and str(spec) in file)]
    if not isinstance(lab.engine, RayScorer) or lab.engine.workers < 2 or len(todo) < 2:
        return
    lab.score_reference()
    stop = Event()

    def measure(spec: KvSpec) -> None:
        with suppress(AssayError):
            _measured(lab.apart(), spec, plan, None, layers, lambda: stop.is_set() or budget.left() <= 0)

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
    lab: Lab, spec: KvSpec, plan: SweepPlan, pool: Fitters | None, layers: Sequence[int], late: Callable[[], bool]
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
            for k in ("grade", "dppl_pct", "kld", "tv", "top1_pct", "top1_beyond_rounding_pct", "tokens", "windows")
        },
        "kld_se": summary.kl.se,
        "fires": measured.engagement.fires,
        "fit_s": round(fit, 2),
        "score_s": round(score, 2),
    }


def _winner(row: Mapping[str, Any], again: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"codec": row["codec"], "same_windows": row, "fresh_windows": again}
    if again:
        found["winners_curse"] = curse((row["kld"]["mean"], row["kld_se"]), (again["kld"]["mean"], again["kld_se"]))
    return found


def _judged(rows: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None) -> tuple[Verdict, list[Finding]]:
    """PASS needs a codec with a grade that fresh windows confirm; where all are rejected the sweep fails."""
    if winner is None:
        grades = [row["grade"] for row in rows]
        undecided = [row["codec"] for row in rows if row["grade"] == "INCONCLUSIVE"]
        if grades and not undecided:
            title = f"none of the {len(rows)} codecs is within the margins: every one is REJECT"
            remedies = ("sweep codecs with more bits, or keep first tokens and boundary layers exact",)
            return Verdict.FAIL, [Finding("kv.none_accepted", Severity.ERROR, title, remedies=remedies)]
        title = f"nothing is chosen: {len(undecided)} of {len(rows)} codecs are undecided, and none is accepted"
        remedies = ("run again with more windows (--windows)",)
        return Verdict.INCONCLUSIVE, [Finding("kv.undecided", Severity.WARNING, title, remedies=remedies)]
    again = winner["fresh_windows"]
    if again and again["grade"] not in GRADES:
        title = f"fresh windows do not confirm {winner['codec']}: {again['grade']} on them"
        remedies = ("run again with more windows (--windows, --fresh), or take a codec with more bits",)
        return Verdict.INCONCLUSIVE, [Finding("kv.choice_unconfirmed", Severity.WARNING, title, remedies=remedies)]
    return Verdict.PASS, []


def _failure(codec: str, error: AssayError) -> Finding:
    return Finding(
        "kv.sweep_failed",
        Severity.WARNING,
        f"{codec} could not be measured: {error.message}",
        remedies=(error.remedy,) if error.remedy else (),
    )


def _headline(rows: Sequence[Mapping[str, Any]], winner: Mapping[str, Any] | None) -> list[Metric]:
    if winner is None:
        if not rows:
            return []
        least = min(rows, key=lambda row: (row["kld"]["mean"], row["bytes"]["stored"]))
        return [Metric("least KL", f"{least['codec']}: {_said(least)}")]
    row, again = winner["same_windows"], winner["fresh_windows"]
    found = [Metric("chosen", f"{winner['codec']}: {_said(row)}")]
    if again:
        difference = winner["winners_curse"]
        found += [
            Metric("fresh windows", _said(again)),
            Metric(
                "winner's curse", f"{difference['value']:+.2g} nats [{difference['lo']:+.2g}, {difference['hi']:+.2g}]"
            ),
        ]
    return found


def _said(row: Mapping[str, Any]) -> str:
    dppl = row["dppl_pct"]
    return (
        f"{row['bytes']['ratio']:.2f}× smaller, KL {row['kld']['mean']:.3g} nats, "
        f"Δppl {dppl['value']:+.2f} % [{dppl['lo']:+.2f}, {dppl['hi']:+.2f}], {row['grade']}"
    )


def _blocks(rows: Sequence[Mapping[str, Any]], on_front: Sequence[int]) -> list[Block]:
    ordered = sorted(range(len(rows)), key=lambda i: rows[i]["bytes"]["stored"])
    table = Table(
        "Codecs by stored bytes",
        ("", "codec", "smaller", "KL (nats)", "Δppl %", "top-1 %", "grade"),
        [["◆" if i in on_front else "", *_cells(rows[i])] for i in ordered],
        numeric=frozenset({2}),
        note="◆ on the Pareto front: no other is smaller without a larger KL",
    )
    points = {i: Point(r["bytes"]["stored"] / 1024, r["kld"]["mean"]) for i, r in enumerate(rows)}
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
    kld, dppl, top1 = row["kld"], row["dppl_pct"], row["top1_pct"]
    return [
        row["codec"],
        f"{row['bytes']['ratio']:.2f}×",
        f"{kld['mean']:.3g} [{kld['lo']:.3g}, {kld['hi']:.3g}]",
        f"{dppl['value']:+.2f} [{dppl['lo']:+.2f}, {dppl['hi']:+.2f}]",
        f"{top1['value']:.2f}",
        row["grade"],
    ]


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="kv.usage")
