"""`assay kv sweep`: many codecs on one model and one scored reference, and the front of bytes against KL.

Each is measured once and kept. The one to take, the smallest of the best grade, was chosen for what these windows say of
it; so it is measured again on windows that took no part, and the difference is the winner's curse.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.result import summarise
from assay.lab.kv.cache_hook import Mode
from assay.lab.kv.fit import Fitters, fitters, kept_layers
from assay.lab.kv.lab import Lab, Ledger, session
from assay.lab.kv.spec import KvSpec, parse_spec
from assay.lab.options import SweepPlan
from assay.progress import NO_PROGRESS, Progress
from assay.runs import write_atomically
from assay.stats.bootstrap import Resampling
from assay.stats.equivalence import Margins
from assay.verdict import Block, Chart, Finding, Metric, Point, Report, Series, Severity, Table, Verdict

# -----------------------------------------------------------------------------
# Measured rows in a file of the user's, so that a sweep goes on where it stopped, another day or with more codecs.

FORMAT = "assay-kv-rows/1"
FINDING = "kv.rows"
"""Id of whatever is wrong with such a file."""


class RowFile:
    """A JSON file with rows by key, all of one `plan`; it is written after every row."""

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        self._path = path
        self._plan: dict[str, Any] = json.loads(json.dumps(plan))
        # A file that cannot be written should not cost a measurement first.
        if not path.parent.is_dir():
            raise self._other("is in a folder that does not exist")
        self._rows: dict[str, Any] = self._read() if path.exists() else {}

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The row of `key`: as it stands in the file, else measured and written."""
        if key not in self._rows:
            self._rows[key] = measure()
            document = {"format": FORMAT, "plan": self._plan, "rows": self._rows}
            try:
                write_atomically(self._path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            except OSError as error:
                raise self._other(f"cannot be written: {error.strerror}") from error
        return self._rows[key]

    def forget(self) -> None:
        """Nothing: the file is the user's."""

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            theirs, rows = document["plan"], document["rows"]
            known = document["format"] == FORMAT and isinstance(theirs, dict) and isinstance(rows, dict)
        except OSError as error:
            raise self._other(f"cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise self._other("holds no rows of a sweep") from error
        if not known:
            raise self._other("holds no rows of a sweep")
        if differing := sorted(k for k in {*theirs, *self._plan} if theirs.get(k) != self._plan.get(k)):
            raise self._other(f"holds rows of another sweep: it differs in {', '.join(differing)}")
        return dict(rows)

    def _other(self, why: str) -> UsageError:
        return UsageError(
            f"{self._path} {why}", remedy="name another file with --out, or none", finding_id=FINDING
        )


# -----------------------------------------------------------------------------
# Which of many configurations matter: those that no other beats in bytes and KL at once, and the one to take.

GRADES = ("ACCEPT", "MARGINAL")
"""Best first. What is graded otherwise is taken only where nothing else is there."""


def front(points: Sequence[tuple[float, float]]) -> list[int]:
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


def choose(rows: Sequence[Mapping[str, Any]]) -> int:
    """Index of the smallest row of the best grade that any has; of those of no such grade the one with the least KL."""
    for grade in GRADES:
        graded = [i for i, row in enumerate(rows) if row["grade"] == grade]
        if graded:
            return min(graded, key=lambda i: (rows[i]["bytes"]["stored"], rows[i]["kld"]["mean"]))
    return min(range(len(rows)), key=lambda i: (rows[i]["kld"]["mean"], rows[i]["bytes"]["stored"]))


def curse(chosen: tuple[float, float], again: tuple[float, float]) -> dict[str, float]:
    """Second measurement minus first, each (value, standard error), with a normal 95 % interval."""
    value = again[0] - chosen[0]
    half = 1.959964 * math.hypot(chosen[1], again[1])
    return {"value": value, "lo": value - half, "hi": value + half}


# -----------------------------------------------------------------------------


def identity(plan: SweepPlan, windows: Sequence[str]) -> dict[str, Any]:
    """All that a row depends on but its codec; windows by their hashes."""
    kept = ("model", "mode", "streams", "skip_layers", "length", "batch", "table_tokens", "seed")
    digest = hashlib.sha256("\n".join(windows).encode()).hexdigest()
    tables = Path(plan.calibration).read_bytes() if plan.calibration else b""
    return {
        **{name: getattr(plan, name) for name in kept},
        "windows": digest,
        "calibration": hashlib.sha256(tables).hexdigest() if plan.calibration else None,
    }


def specs_in(path: Path) -> tuple[str, ...]:
    """One SPEC a line; empty lines and those that begin with # are left out. UsageError where it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise _usage(
            f"cannot read the SPECs in {path}: {why}", "give a text file, one SPEC a line"
        ) from error
    return tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


def run_sweep(plan: SweepPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Measure all, and the chosen one again. Interrupted, the same command goes on where it stopped."""
    if plan.specs:
        plan = replace(plan, codecs=(*plan.codecs, *specs_in(plan.specs)), specs=None)
    specs = {str(spec): spec for spec in map(parse_spec, plan.codecs)}
    for spec in specs.values():
        spec.require(plan.streams)
    failed: dict[str, AssayError] = {}
    rows: list[dict[str, Any]] = []
    with session(
        plan.model,
        plan.text,
        windows=plan.windows,
        fresh=plan.fresh,
        length=plan.length,
        calibration=plan.calibration,
    ) as opened:
        opened.require_fresh(plan.windows, plan.fresh)
        rows_of = identity(plan, [w.sha256 for w in [*opened.windows, *opened.fresh]])
        kept = RowFile(plan.out, rows_of) if plan.out else Ledger({"sweep": rows_of})
        mode, layers = Mode(plan.mode), kept_layers(opened.bench.shape, plan.skip_layers)
        lab = opened.lab(opened.windows, mode, plan.batch)
        with fitters(opened.bench, plan.jobs) as pool:
            for name, spec in specs.items():

                def measured(lab: Lab = lab, spec: KvSpec = spec) -> dict[str, Any]:
                    return _row(lab, pool, spec, layers, plan, progress)

                try:
                    rows.append({"codec": name, **kept.get(name, measured)})
                except AssayError as error:
                    if error.finding_id == FINDING:
                        raise
                    failed[name] = error
            if not rows:
                raise next(iter(failed.values()))
            best = choose(rows)
            name = rows[best]["codec"]
            again = None
            if plan.fresh:
                other = opened.lab(opened.fresh, mode, plan.batch)
                again = kept.get(f"fresh|{name}", lambda: measured(other, specs[name]))
        text, shape = opened.text, opened.bench.shape
    kept.forget()
    on_front = front([(r["bytes"]["stored"], r["kld"]["mean"]) for r in rows])
    winner = _winner(rows[best], again)
    return Report(
        command="kv sweep",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "plan": plan.facts()},
        findings=[_failure(codec, error) for codec, error in failed.items()],
        results={
            "mode": plan.mode,
            "rows": rows,
            "front": [rows[i]["codec"] for i in on_front],
            "winner": winner,
            "failed": {codec: error.message for codec, error in failed.items()},
            "text": text,
            "cache": shape.to_json(),
        },
        environment=describe(),
        headline=_headline(winner),
        blocks=_blocks(rows, on_front),
        summary=f"{len(rows)} codecs on {plan.windows} windows of {plan.length} tokens, {plan.mode}; "
        f"{len(on_front)} on the front",
    )


def _row(
    lab: Lab, pool: Fitters, spec: KvSpec, layers: Sequence[int], plan: SweepPlan, progress: Progress
) -> dict[str, Any]:
    """One codec on the windows of a lab."""
    began = time.perf_counter()
    coders = pool.fit(spec, layers, plan.streams)
    fitted = time.perf_counter()
    lab.score_reference(progress)
    begun = time.perf_counter()
    measured = lab.measure(
        coders.by_stream,
        table_tokens=plan.table_tokens,
        measure_windows=4,
        progress=progress,
        label=str(spec),
    )
    summary = summarise(measured.seen, Margins(), Resampling(2000, plan.seed))
    figures = summary.to_json()
    return {
        "bytes": measured.bytes.to_json(),
        **{k: figures[k] for k in ("grade", "dppl_pct", "kld", "top1_pct", "tokens", "windows")},
        "kld_se": summary.kl.se,
        "fires": measured.engagement.fires,
        "fit_s": round(fitted - began, 2),
        "score_s": round(time.perf_counter() - begun, 2),
    }


def _winner(row: Mapping[str, Any], again: Mapping[str, Any] | None) -> dict[str, Any]:
    found: dict[str, Any] = {"codec": row["codec"], "same_windows": row, "fresh_windows": again}
    if again:
        found["winners_curse"] = curse(
            (row["kld"]["mean"], row["kld_se"]), (again["kld"]["mean"], again["kld_se"])
        )
    return found


def _failure(codec: str, error: AssayError) -> Finding:
    return Finding(
        "kv.sweep_failed",
        Severity.WARNING,
        f"{codec} could not be measured: {error.message}",
        remedies=(error.remedy,) if error.remedy else (),
    )


def _headline(winner: Mapping[str, Any]) -> list[Metric]:
    row, again = winner["same_windows"], winner["fresh_windows"]
    found = [Metric("chosen", f"{winner['codec']}: {_said(row)}")]
    if again:
        difference = winner["winners_curse"]
        found += [
            Metric("fresh windows", _said(again)),
            Metric(
                "winner's curse",
                f"{difference['value']:+.2g} nats [{difference['lo']:+.2g}, {difference['hi']:+.2g}]",
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
        note="◆ no other is smaller without a larger KL",
    )
    points = {i: Point(r["bytes"]["stored"] / 1024, r["kld"]["mean"]) for i, r in enumerate(rows)}
    others = [points[i] for i in points if i not in on_front]
    series = [Series("front", [points[i] for i in on_front])]
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
