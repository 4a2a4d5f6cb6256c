"""Configurations of a decomposition, run and kept, so that an interrupted one goes on.

One engine is open at a time. Every run is compared with a stored run without codec, its *anchor*:
final states of one engine by one path, scored once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from assay.engines.scoring import ScoreJob, ScoringEngine, ScoringPath, TokenizerFacts, Window
from assay.engines.specs import open_scorer
from assay.fidelity.budget import Budget, OutOfTime, size_for
from assay.fidelity.engaged import engaged
from assay.fidelity.kept_rows import KeptRows, engine_key, kept_states
from assay.fidelity.metrics.token_statistics import statistics_device, window_statistics
from assay.fidelity.names import fingerprint, label_of
from assay.fidelity.observation import WindowObservation, from_arrays, observation, to_arrays
from assay.fidelity.pace import WORTH_MEASURING, measure_pace
from assay.fidelity.reference import plan_windows, tokenizer_check
from assay.fidelity.score import key_of, require_path
from assay.fidelity.text.sources import read_text
from assay.progress import Progress, span
from assay.runs import Kept
from assay.verdict import Finding
from assay_lab.gap.configuration import Configuration
from assay_lab.gap.plan import GapPlan, planned_runs
from assay_lab.kv.cache_bytes import measured_bytes
from assay_lab.kv.calibration import read_calibration
from assay_lab.kv.measured import Measured, Scoring, kept_measurements, measure_kept
from assay_lab.kv.opening import LEAST_CODED
from assay_lab.options import GAP_MINUTES

RUN_COST = 1.7
"""How much longer a run takes than an engine alone: about two in three have a codec, which takes as
long again.
"""
IN_MODE = 4
"""Runs of the path in the mode of the total, where it is not the base mode: the reference twice,
the codec twice.
"""
PATH_SHARE = 0.75
"""Share of a budget that the path, its repetition and the floors may take; the rest is for the
phases.
"""
OVERRUN = 0.1
"""Share of a budget by which a run that is under way may exceed it: what is left is for the report.
"""


class RunCache:
    """Windows, stored runs and one open engine. Use as a context manager."""

    def __init__(self, plan: GapPlan, progress: Progress) -> None:
        self.plan = plan
        self.progress = progress
        self.budget = Budget.of(plan.budget, plan.quick, GAP_MINUTES)
        self.run_seconds: list[tuple[str, float]] = []
        """Mode and seconds of each configuration, its anchor included."""
        self.planned = 0
        """About how many configurations will be measured, where that was counted."""
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.measured: dict[str, Measured] = {}
        self.windows: dict[str, list[Window]] = {}
        self.text: dict[str, Any] = {}
        self._engine: ScoringEngine | None = None
        self._open: tuple[str, bool] | None = None
        self._check: Callable[[TokenizerFacts, str], None] | None = None
        self._keys: dict[str, dict[str, Any]] = {}
        self._states = kept_states()
        self._kept = kept_measurements()

    def __enter__(self) -> RunCache:
        try:
            self._read_text()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine that is open."""
        if self._engine:
            self._engine.close()
        self._engine = self._open = None

    def notices(self) -> list[Finding]:
        """What a report should say of the cache of kept values."""
        return [*self._states.notices("gap"), *self._kept.notices("gap")]

    def _read_text(self) -> None:
        with self.budget.stage("opening the reference"):
            tokenizer = self.engine(self.plan.reference).tokenizer
        self._fit()
        windows, facts = plan_windows(self.plan.comparison(self.plan.base), tokenizer)
        # What is decomposed comes first; what is left of the text is fresh.
        main = min(self.plan.windows, len(windows))
        self.windows = {"main": windows[:main], "fresh": windows[main:]}
        self.text = facts
        for path in filter(None, (self.plan.calibration, self.plan.other_calibration)):
            read_calibration(Path(path)).check_text(facts, windows)
        self._check = tokenizer_check(tokenizer.sha256, tokenizer.vocab_size)

    def _fit(self) -> None:
        """Take as many and as long windows as let the path fit into most of the budget; tell the
        expected time.

        Where not even the fewest fit, the total is measured in the base mode too: token by token
        takes most of the time.
        """
        plan, budget = self.plan, self.budget
        self.planned = sum(planned_runs(plan))
        if budget.seconds is None and plan.windows * plan.length * self.planned < WORTH_MEASURING:
            return
        opening = 3 * budget.took["opening the reference"]
        paces: dict[str, float] = {}

        def measure() -> tuple[int, int, str]:
            text = read_text(plan.text).text
            for mode in dict.fromkeys((plan.base, plan.mode)):
                compared = replace(plan.comparison(mode), windows=plan.windows)
                found = measure_pace(self.engine(plan.reference), compared, text)
                paces[mode] = RUN_COST * found.score + found.compare
            if budget.seconds is None:
                return plan.windows, plan.length, plan.mode
            size, cheaper = (plan.windows, plan.length), replace(plan, mode=plan.base)
            for one, share in ((plan, PATH_SHARE), (cheaper, PATH_SHARE)):
                if some := size_for(
                    share * (budget.left() - opening), path_cost(one), *size, LEAST_CODED
                ):
                    return *some, one.mode
            # All of the time, so that the phases are left out; OutOfTime where not even that is
            # enough.
            return *budget.size(
                path_cost(cheaper), *size, opening=opening, least=LEAST_CODED
            ), cheaper.mode

        def path_cost(plan: GapPlan) -> float:
            in_mode = IN_MODE if plan.mode != plan.base else 0
            return (planned_runs(plan)[0] - in_mode) * paces[plan.base] + in_mode * paces[plan.mode]

        about = ["gap plan", plan.facts(), budget.seconds]
        windows, length, mode = (
            measure() if budget.seconds is None else self._kept.have(about, measure)
        )
        budget.note_size((plan.windows, plan.length), (windows, length))
        if mode != plan.mode:
            budget.leave_out(
                f"the path {plan.mode}: the total is that of {mode}",
                f"what {plan.mode} adds to {mode}",
            )
            plan = replace(plan, mode=mode)
        phases = planned_runs(plan)[1]
        self.planned = sum(planned_runs(plan))
        if paces:  # a run that goes on knows its size and nothing of its speed
            tokens = windows * length
            path = opening + path_cost(plan) * tokens
            rest = min(phases * paces[plan.base] * tokens, max(0.0, budget.left() - path))
            budget.tell({"engine and codec": path, "phases": rest}, self.progress)
        self.plan = replace(plan, windows=windows, length=length, fresh=min(plan.fresh, windows))

    def _told(self) -> str:
        """Which of the planned runs this is, and how long it may be until the last of them."""
        done = len(self.run_seconds)
        if not done or done >= self.planned:
            return ""
        left = sum(seconds for _, seconds in self.run_seconds) / done * (self.planned - done)
        number = f"{done + 1} of about {self.planned}, " if self.budget.seconds is None else ""
        return f" ({number}about {span(min(left, max(0.0, self.budget.left())))} left)"

    def affords(
        self, what: str, unknown: str, runs: int, reserve: tuple[int, int] = (0, 0)
    ) -> bool:
        """Whether the budget allows so many more runs in the base mode, and after them `reserve` in
        it and in that of the total.
        """
        base, total = (self._a_run(mode) for mode in (self.plan.base, self.plan.mode))
        return self.budget.affords(what, unknown, (runs + reserve[0]) * base + reserve[1] * total)

    def _a_run(self, mode: str) -> float:
        """Mean seconds of the runs so far that had a mode; of all where none had."""
        took = [s for own, s in self.run_seconds if own == mode] or [s for _, s in self.run_seconds]
        return sum(took) / len(took) if took else 0.0

    def engine(self, spec: str, again: bool = False) -> ScoringEngine:
        """The engine, opened if it is not; any other is closed first.

        With `again` it is one that was opened for an independent run; others may use it after that.
        """
        if (
            self._open is None
            or self._open[0] != spec
            or again > self._open[1]
            or self._engine is None
        ):
            self.close()
            with self.progress(f"opening {label_of(spec)}", 1) as advance:
                self._engine = open_scorer(spec)
                advance()
            self._open = (spec, again)
            if self._check:
                self._check(self._engine.tokenizer, label_of(spec))
            self.facts.setdefault(spec, self._engine.describe())
        return self._engine

    def states(self, spec: str) -> bool:
        """Whether an engine gives final states, so that others can be compared with it."""
        return not spec.startswith("gguf:")

    def key(self, spec: str) -> dict[str, Any]:
        """What decides the numbers of an engine, the same all through the run."""
        if spec not in self._keys:
            self._keys[spec] = engine_key(spec)
        return self._keys[spec]

    def job(self, config: Configuration) -> ScoreJob:
        """How a configuration is scored, without its hook."""
        job = self.plan.comparison(config.mode).job
        other = config.again or config.other_batch
        return replace(job, batch=self.plan.other_batch) if other else job

    def anchor(self, config: Configuration, windows: str = "main") -> KeptRows:
        """The final states of an engine without codec, by the path of the configuration's mode."""
        plain = config.plain
        kept = self._states.within(self.key(plain.engine))
        kept = kept.within("again") if plain.again else kept
        job = self.job(plain)
        rows = KeptRows(kept, self._ordered(plain, windows), job)
        facts = kept.get("facts")
        if facts and not rows.read() and rows.read_head():
            self.facts.setdefault(plain.engine, facts)
            return rows
        engine = self.engine(plain.engine, plain.again)
        require_path(engine, job)
        with self.progress(
            f"scoring {label_of(plain.engine)}", len(self.windows[windows])
        ) as advance:
            rows.score(engine, advance)
        rows.keep_head()
        kept.put("facts", self.facts[plain.engine])
        return rows

    def between(self, anchor: Configuration, other: Configuration) -> Measured:
        """One stored run against another: two engines without codec."""
        windows = self.windows["main"]
        kept = self._kept_for(other, anchor).within("between")
        arrays = kept.get(key_of(windows))
        if arrays is None:
            device = statistics_device()
            sides = [self.anchor(config).rows(windows) for config in (anchor, other)]
            seen = [
                observation(a.window, a.first, window_statistics(a, b.to(device)))
                for a, b in zip(*sides, strict=True)
            ]
            kept.put(key_of(windows), to_arrays(seen))
            return Measured(seen)
        return Measured(from_arrays(arrays, windows))

    def measure(
        self, config: Configuration, anchor: Configuration, windows: str = "main"
    ) -> Measured:
        """Score a configuration against the anchor of another (or of itself). In the order of the
        windows.

        AssayError where the codec took no part in the numbers.
        """
        chosen, job = self._ordered(config, windows), self.job(config)

        def prepare(count: int) -> Scoring:
            rows = self.anchor(anchor, windows)
            return rows, self.engine(config.engine, config.again), self._hooked(config)

        def late() -> bool:
            budget = self.budget
            if budget.seconds is not None and budget.left() < -OVERRUN * budget.seconds:
                raise OutOfTime(
                    f"the budget of {span(budget.seconds)} ended while {config.label} was scored",
                    finding_id="fidelity.budget",
                    remedy="run it again: it goes on from there",
                )
            return False

        began, done = time.monotonic(), list[WindowObservation]()
        label = f"{config.label} | against {anchor.plain.label}"
        with self.progress(f"scoring {config.label}{self._told()}", len(chosen)) as advance:
            try:
                kept = self._kept_for(config, anchor)
                found = measure_kept(
                    chosen,
                    job.batch,
                    kept,
                    prepare,
                    on_window=done.append,
                    advance=advance,
                    enough=late,
                )
            except BaseException:
                if (
                    len(done) > 1
                ):  # what there is of a run that is cut short; an interval needs two windows
                    self.measured[f"{label}, first {len(done)} windows"] = Measured(done)
                raise
        self.run_seconds.append((config.mode, time.monotonic() - began))
        self.budget.took["runs"] = sum(seconds for _, seconds in self.run_seconds)
        seen = sorted(found.seen, key=lambda w: w.index)
        if not config.lossless:
            path = ScoringPath(job.path)
            engaged(seen, found.engagement, path=path, hooked=True, same=False, label=config.label)
        size = measured_bytes(found.engagement, self.plan.length - 1) if config.codec else None
        found = replace(found, seen=seen, bytes=size)
        self.measured[label] = found
        return found

    def try_out(self, config: Configuration) -> None:
        """Score one window and forget it; AssayError where the engine does not take the codec."""
        for _ in self.engine(config.engine).score_windows(
            self.windows["main"][:1], self._hooked(config)
        ):
            pass

    def _hooked(self, config: Configuration) -> ScoreJob:
        return config.hooked(self.job(config), self.plan.length, self.plan.seed)

    def _ordered(self, config: Configuration, windows: str) -> list[Window]:
        chosen = self.windows[windows]
        return chosen[::-1] if config.again else chosen

    def _kept_for(self, config: Configuration, anchor: Configuration) -> Kept:
        """What is kept of a configuration against an anchor."""
        tables = fingerprint(config.calibration) if config.calibration else None
        sides = [
            self.key(c.engine) | {"again": c.again, "job": asdict(self.job(c))}
            for c in (config, anchor.plain)
        ]
        return self._kept.within([config.facts(), self.plan.seed, tables, sides])
