"""`assay compare`: reference → windows → scores → statistics → verdict, each handed to the next."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from assay.engines.ray_scorer import on_ray
from assay.engines.scoring import ScoringPath
from assay.engines.specs import check_spec, is_server, open_candidate
from assay.engines.threads import begin_run, interrupt_run
from assay.errors import AssayError
from assay.fidelity.budget import Budget
from assay.fidelity.candidate import compare_candidate
from assay.fidelity.compare_report import report, shared_results, unfinished
from assay.fidelity.memory import Memory, estimate_memory
from assay.fidelity.observation import on_disk, size_of
from assay.fidelity.open_reference import open_reference, windows_kept
from assay.fidelity.plan import QUICK_MINUTES, Plan
from assay.fidelity.reference import Reference
from assay.fidelity.result import CandidateResult
from assay.fidelity.routing import check_engines
from assay.fidelity.run import Run, Say, Side, plan_key, sides_of
from assay.fidelity.score import Candidate, require
from assay.fidelity.summary import per_window
from assay.fidelity.table.rows import RowFile
from assay.progress import NO_PROGRESS, Progress
from assay.run_lock import RunLock
from assay.runs import cache_dir
from assay.verdict import Finding, Report, Severity

IN_MEMORY = 256 << 20
"""Bytes of the figures of its tokens that a candidate keeps in memory while others are scored; more
goes to the disk.
"""
OnResult = Callable[[str, CandidateResult], Any]


@on_ray
def run_compare(
    plan: Plan,
    progress: Progress = NO_PROGRESS,
    *,
    say: Say = lambda line: None,
    on_result: OnResult = lambda spec, result: None,
) -> Report:
    """Compare every candidate of a plan with its reference.

    Scored windows are kept in the cache until the run ends, so an interrupted one goes on where it
    stopped; with `plan.keep` they stay. Of several candidates one that cannot be compared is a
    finding beside the results of the others.

    Args:
        plan: What is compared, how and by which margins.
        progress: Told of each window.
        say: Told of what a person may want to read meanwhile.
        on_result: Told the spec and the result of each candidate as it is measured.

    Returns:
        The report; of what was measured where the run is interrupted.

    Raises:
        AssayError: The reference, or the only candidate, cannot be scored.
    """
    for spec in plan.sides:
        check_spec(spec, ScoringPath(plan.path))
    if plan.routing:
        check_engines((plan.reference, *plan.sides), plan.ray)
    memory = estimate_memory(plan, progress)
    budget = Budget.of(plan.budget, plan.quick, QUICK_MINUTES)
    with RowFile(plan.rows) if plan.rows else nullcontext() as rows, RunLock() as lock:
        key = plan_key(plan)
        folder = lock.folder(cache_dir("compare") / key)
        begin_run(key)
        run = Run(plan, sides_of(plan), folder, budget, progress, say)
        return _compare(run, memory, rows, on_result)


def _compare(run: Run, memory: Memory | None, rows: RowFile | None, on_result: OnResult) -> Report:
    """Score the reference, then each side; report what was measured."""
    with _open_servers(run) as servers:
        try:
            with run.budget.limit():
                reference = open_reference(run.plan, run.folder, run.progress, run.budget)
        except KeyboardInterrupt:
            if not (done := windows_kept(run.folder)):
                raise
            interrupt_run()
            return unfinished(run, done)
        run = replace(run, plan=reference.plan or run.plan)
        try:
            found = _Measured(run, reference, rows, on_result)
            found.measure(servers)
        finally:
            reference.close()
    if found.interrupted:
        interrupt_run()
    if found.complete and not run.plan.keep:
        shutil.rmtree(run.folder, ignore_errors=True)
    return report(run, reference, found.results, found.failed, found.interrupted, memory)


@contextmanager
def _open_servers(run: Run) -> Iterator[dict[str, Candidate]]:
    """The servers among the sides, open; AssayError for one that cannot be compared, before
    anything is scored. Those that were not taken are closed at the end.
    """
    servers: dict[str, Candidate] = {}
    try:
        for side in run.sides:
            if is_server(side.spec):
                servers[side.spec] = open_candidate(side.spec)
                require(servers[side.spec], run.plan.job, run.plan.length)
        yield servers
    finally:
        for opened in servers.values():
            opened.close()


@dataclass
class _Measured:
    """The results of a run as they come, and what could not be measured."""

    run: Run
    reference: Reference
    rows: RowFile | None
    on_result: OnResult
    results: list[CandidateResult] = field(default_factory=list)
    failed: list[Finding] = field(default_factory=list)
    interrupted: bool = False

    @property
    def complete(self) -> bool:
        """Whether nothing is left that the same command would go on with."""
        left = any("passages" in item["unknown"] for item in self.run.budget.left_out)
        return not (self.interrupted or self.failed or left)

    def measure(self, servers: dict[str, Candidate]) -> None:
        """Measure each side, with an equal share of the time that is left; then the floors."""
        budget = self.run.budget
        try:
            for side in self.run.sides:
                seconds = budget.left() / (len(self.run.sides) - side.number)
                if seconds <= 0:
                    budget.leave_out(side.label, f"anything about {side.label}")
                    continue
                self._side(side, servers, seconds)
                if self.interrupted:
                    return
            if self.results:
                with budget.limit():
                    self.results = with_floors(self.results, self.reference, budget)
        except KeyboardInterrupt:  # while an engine was opened, or floors were measured
            self.interrupted = True

    def _side(self, side: Side, servers: dict[str, Candidate], seconds: float) -> None:
        try:
            with self.run.budget.stage(side.label):
                with self.run.budget.limit():
                    engine = servers.pop(side.spec, None) or open_candidate(side.spec)
                result, self.interrupted = compare_candidate(
                    self.run, self.reference, side, engine, seconds
                )
        except AssayError as error:
            if self.run.single:
                raise
            self.failed.append(_not_compared(error, side.label))
            return
        if result is None:
            return
        if self.rows:
            body = {"candidate": result.label, "per_window": per_window(result.seen, result.blocks)}
            self.rows.add(shared_results(self.run.plan, self.reference) | {"candidates": [body]})
        if len(self.run.sides) > 1 and size_of(result.seen) > IN_MEMORY:
            result = replace(result, seen=on_disk(result.seen, self.run.folder))
        self.results.append(result)
        self.on_result(side.spec, result)


def with_floors(
    results: Sequence[CandidateResult], reference: Reference, budget: Budget
) -> list[CandidateResult]:
    """The results with the floors, where these were left for later and there is time for them."""
    if reference.floors_later is None:
        return list(results)
    seconds, measure = reference.floors_later
    if seconds > budget.left():
        budget.leave_out("the floors", "whether a small KL is more than rounding would give")
        return list(results)
    with budget.stage("floors"):
        floors = measure()
    return [replace(result, floors=floors) for result in results]


def _not_compared(error: AssayError, label: str) -> Finding:
    """The finding of one candidate of several that could not be compared."""
    found = error.to_finding()
    title = found.title if label in found.title else f"{label}: {found.title}"
    return replace(
        found, title=title, severity=Severity.ERROR, evidence={**found.evidence, "candidate": label}
    )
