"""`assay kv sweep`: many codecs on one model and one scored reference.

Each is measured once and kept. The chosen one is measured again on windows that took no part in the
choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from assay.engines.ray_scorer import RayScorer, on_ray
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.budget import Budget
from assay.fidelity.plan import QUICK_MINUTES
from assay.fidelity.summary import summarise
from assay.progress import NO_PROGRESS, Progress
from assay.runs import KeptFile
from assay.stats import Resampling
from assay.stats.equivalence import Margins
from assay.stats.resolution import MIN_WINDOWS
from assay.verdict import Finding, Report, Verdict
from assay_lab.kv.choice import choose, judged, pareto_front, ranked, winner_of
from assay_lab.kv.evaluator import CodecEvaluator
from assay_lab.kv.fitters import Fitters, fitters
from assay_lab.kv.interruption import Unfinished
from assay_lab.kv.layer_coders import kept_layers
from assay_lab.kv.measured import Measured
from assay_lab.kv.opening import ModelOnText, Work, open_evaluator
from assay_lab.kv.spec import KvSpec, parse_spec
from assay_lab.kv.sweep_report import blocks_of_rows, failure, headline_of, not_ranked
from assay_lab.options import SweepPlan

FORMAT = "assay-kv-rows/1"
"""Of the file in which `--out` keeps the rows, so that a sweep goes on another day or with more
codecs.
"""
FINDING = "kv.rows"
"""Id of every finding about such a file."""


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


@dataclass(frozen=True)
class SweepRun:
    """A plan of `kv sweep`, resolved: SPECs are read and parsed, by their names."""

    plan: SweepPlan
    specs: Mapping[str, KvSpec]
    budget: Budget

    @classmethod
    def of(cls, plan: SweepPlan) -> SweepRun:
        """Resolve a plan; UsageError for a SPEC that cannot be read."""
        if plan.specs:
            plan = replace(plan, codecs=(*plan.codecs, *specs_in(plan.specs)), specs=None)
        specs = {str(spec): spec for spec in map(parse_spec, plan.codecs)}
        for spec in specs.values():
            spec.require(plan.streams)
        return cls(plan, specs, Budget.of(plan.budget, plan.quick, QUICK_MINUTES))

    @property
    def work(self) -> Work:
        """The measurements that the time is planned for."""
        together = all(spec.token_by_token for spec in self.specs.values())
        return Work(self.budget, len(self.specs), least=1, together=together)

    def on(self, evaluator: CodecEvaluator) -> SweepRun:
        """With windows, length and block as the budget allows."""
        size = (len(evaluator.windows), evaluator.length, evaluator.setup.block)
        return replace(
            self, plan=replace(self.plan, windows=size[0], length=size[1], block=size[2])
        )


@dataclass
class Rows:
    """What a sweep has measured: its rows, the codecs that failed, the one that is being measured,
    the chosen row and the same codec on fresh windows.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, AssayError] = field(default_factory=dict)
    running: str = ""
    chosen: int | None = None
    again: dict[str, Any] | None = None


class RowMeter:
    """Measures the rows of a sweep, or reads them from the file that keeps them."""

    def __init__(self, run: SweepRun, evaluator: CodecEvaluator, pool: Fitters | None) -> None:
        self.run, self.evaluator, self.pool = run, evaluator, pool
        plan, windows = run.plan, [*evaluator.windows, *evaluator.fresh]
        same = identity(plan, [w.sha256 for w in windows])
        self.file = KeptFile(plan.out, same, FORMAT, FINDING) if plan.out else None
        self.layers = kept_layers(evaluator.shape, plan.skip_layers)

    def row(self, where: CodecEvaluator, spec: KvSpec, key: str) -> dict[str, Any] | None:
        """The row of a codec on the windows of `where`, kept under `key`.

        None where the budget ended before it began; a row that the budget cut short is not kept.
        """
        budget = self.run.budget
        try:
            return (
                self.file.have(key, partial(self._whole, where, spec))
                if self.file
                else (self._whole(where, spec))
            )
        except _Short as short:
            if not short.row["windows"]:
                own = where is self.evaluator
                what = (str(spec), f"anything about {spec}") if own else FRESH_LEFT_OUT
                budget.leave_out(*what)
                return None
            missing = len(where.windows) - short.row["windows"]
            budget.leave_out(
                f"{missing} of {len(where.windows)} passages of {spec}",
                "differences that fewer passages cannot resolve",
            )
            return short.row

    def _whole(self, where: CodecEvaluator, spec: KvSpec) -> dict[str, Any]:
        """The row on all windows; `_Short` where there was no time for all."""
        measured = self.measured(where, spec, lambda: self.run.budget.left() <= 0)
        if len(measured.seen) < min(2, len(where.windows)):  # the exact cache took the time
            raise _Short({"windows": 0})
        found = _row(measured, self.run.plan, where.blocks)
        if found["windows"] < len(where.windows):
            raise _Short(found)
        return found

    def measured(self, where: CodecEvaluator, spec: KvSpec, late: Callable[[], bool]) -> Measured:
        """Score a codec on the windows of `where` until it is `late`."""
        plan, pool = self.run.plan, self.pool
        return where.measure(
            str(spec),
            coders=(lambda: pool.fit(spec, self.layers, plan.streams)) if pool else None,
            table_tokens=plan.table_tokens,
            measure_windows=4,
            enough=lambda seen: late(),
            streams=plan.streams,
            skip_layers=plan.skip_layers,
        )


@on_ray
def run_sweep(plan: SweepPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure all, and the chosen one again. Interrupted, the report holds the rows that were
    measured.
    """
    run, found = SweepRun.of(plan), Rows()
    with open_evaluator(ModelOnText.of(run.plan), run.work, progress) as evaluator:
        run = run.on(evaluator)
        with (
            _fitters(evaluator, run.plan.jobs) as pool,
            Unfinished(lambda: found.rows, run.budget) as cut,
        ):
            meter = RowMeter(run, evaluator, pool)
            _measure_side_by_side(meter)
            _measure_rows(meter, found)
            _choose(meter, found)
        if cut and found.chosen is None:  # of the rows that are whole
            found.chosen = choose(found.rows)
        if found.running and evaluator.partial and evaluator.partial.seen:
            # What was measured of the row that was cut short.
            cut_short = _row(evaluator.partial, run.plan, evaluator.blocks)
            found.rows.append({"codec": found.running, "interrupted": True, **cut_short})
        facts = {"text": evaluator.text, **run.budget.results(), "cache": evaluator.shape.to_json()}
        return _report(run, found, cut, facts, evaluator.notices())


def _measure_rows(meter: RowMeter, found: Rows) -> None:
    """Measure one codec after the other; AssayError where not one could be measured."""
    budget = meter.run.budget
    for name, spec in meter.run.specs.items():
        if budget.left() <= 0:
            budget.leave_out(name, f"anything about {name}")
            continue
        found.running = name
        try:
            if row := meter.row(meter.evaluator, spec, name):
                found.rows.append({"codec": name, **row})
        except AssayError as error:
            if error.finding_id == FINDING:
                raise
            found.failed[name] = error
    found.running = ""
    if not found.rows and not found.failed:
        raise budget.nothing_fits("opening the model and scoring the exact cache took it")
    if not found.rows:
        raise next(iter(found.failed.values()))


def _choose(meter: RowMeter, found: Rows) -> None:
    """Choose a row, and measure its codec again on fresh windows."""
    run, fresh = meter.run, meter.evaluator.fresh
    found.chosen = choose(found.rows)
    if found.chosen is None or not run.plan.fresh:
        return
    row = found.rows[found.chosen]
    many = _fresh_that_fit(row, len(fresh), run.budget)
    if not many:
        run.budget.leave_out(*FRESH_LEFT_OUT)
        return
    name, fewer = row["codec"], f"{many} " if many < len(fresh) else ""
    where = meter.evaluator.on(fresh[:many])
    found.again = meter.row(where, run.specs[name], f"fresh|{fewer}{name}")
    if found.again and fewer:
        missing = f"{len(fresh) - many} of {len(fresh)} fresh windows"
        run.budget.leave_out(missing, "differences that fewer passages cannot resolve")


def _report(
    run: SweepRun,
    found: Rows,
    cut: Unfinished,
    facts: Mapping[str, Any],
    notices: Sequence[Finding],
) -> Report:
    rows, plan = found.rows, run.plan
    ranks = ranked(rows)
    numbers = list(ranks)
    on_front = [numbers[i] for i in pareto_front(list(ranks.values()))]
    winner = None if found.chosen is None else winner_of(rows[found.chosen], found.again)
    verdict, findings = judged(rows, winner) if rows else (Verdict.INCONCLUSIVE, [])
    return Report(
        command="kv sweep",
        verdict=cut.verdict(verdict),
        subject={"model": plan.model, "plan": plan.facts()},
        findings=[
            *cut.findings(),
            *run.budget.findings(),
            *findings,
            *not_ranked(rows, ranks),
            *(failure(codec, error) for codec, error in found.failed.items()),
            *notices,
        ],
        results={
            "mode": plan.mode,
            "rows": rows,
            "front": [rows[i]["codec"] for i in on_front],
            "winner": winner,
            "failed": {codec: error.message for codec, error in found.failed.items()},
            **facts,
        },
        environment=describe(),
        headline=headline_of(rows, winner),
        blocks=blocks_of_rows(rows, on_front) if rows else [],
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


def _fitters(lab: CodecEvaluator, jobs: int) -> AbstractContextManager[Fitters | None]:
    """Who fits the codecs: none where the engine is in workers, which fit theirs themselves."""
    return nullcontext() if isinstance(lab.engine, RayScorer) else fitters(lab.layer_coders, jobs)


def _measure_side_by_side(meter: RowMeter) -> None:
    """On a cluster: have all rows measured and kept, several at once, so that no worker waits for
    the end of a row.

    The rows are read in their order afterwards; one that cannot be measured says so then.
    """
    evaluator, file = meter.evaluator, meter.file
    todo = [spec for name, spec in meter.run.specs.items() if not (file and name in file)]
    engine = evaluator.engine
    if not isinstance(engine, RayScorer) or engine.workers < 2 or len(todo) < 2:
        return
    evaluator.score_reference()
    stop = Event()

    def measure(spec: KvSpec) -> None:
        with suppress(AssayError):
            meter.measured(
                evaluator.apart(), spec, lambda: stop.is_set() or meter.run.budget.left() <= 0
            )

    with (
        evaluator.progress("measuring rows side by side", len(todo)) as advance,
        ThreadPoolExecutor(engine.workers) as threads,
    ):
        try:
            for _ in threads.map(measure, todo):
                advance()
        except BaseException:
            stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
            raise


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


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="kv.usage")
