"""From a reference's rows and a candidate to what is seen of every window, by the best way that the candidate offers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from assay.engines.id_scoring import IdScorer
from assay.engines.scoring import ScoreJob, ScoringEngine, StateRows, Window, WindowRows
from assay.fidelity.bounds import choose_ids, window_bounds
from assay.fidelity.metrics import RowStatistics, window_statistics
from assay.fidelity.observations import WindowObservation, observation

if TYPE_CHECKING:
    import torch

    from assay.engines.server.chosen import ChosenScores

Candidate = ScoringEngine | IdScorer
_STATISTICS = "assay.fidelity.metrics:batch_statistics"


@runtime_checkable
class _Reduces(Protocol):
    """An engine that computes statistics where it runs, so that no states of its own have to travel."""

    def reduce_windows(
        self, windows: Sequence[Window], references: Iterator[StateRows], job: ScoreJob, target: str
    ) -> Iterator[tuple[Window, Mapping[str, torch.Tensor]]]: ...


def measure(
    rows: Iterator[WindowRows], candidate: Candidate, windows: Sequence[Window], job: ScoreJob
) -> Iterator[WindowObservation]:
    """Observations of `windows`, in order; `rows` are the reference's rows of them.

    A server is bounded by a few ids. An engine that reduces gets the reference's states, where it has states; from
    any other come the rows themselves.
    """
    if isinstance(candidate, IdScorer):
        yield from _by_ids(rows, candidate, job)
        return
    first = next(rows, None)
    rows = chain([] if first is None else [first], rows)
    if isinstance(candidate, _Reduces) and isinstance(first, StateRows):
        yield from _by_reduction(rows, candidate, windows, job)
        return
    for reference, own in zip(rows, candidate.score_windows(windows, job), strict=True):
        yield observation(reference.window, reference.first, window_statistics(reference, own))


def _by_reduction(
    rows: Iterator[WindowRows], candidate: _Reduces, windows: Sequence[Window], job: ScoreJob
) -> Iterator[WindowObservation]:
    states = (row for row in rows if isinstance(row, StateRows))
    for window, values in candidate.reduce_windows(windows, states, job, _STATISTICS):
        yield observation(window, job.scored_from, RowStatistics(**values))


def _by_ids(rows: Iterator[WindowRows], candidate: IdScorer, job: ScoreJob) -> Iterator[WindowObservation]:
    """Bounds from log-probabilities of the reference's likeliest ids; `job.batch` requests are under way at once."""
    pool = ThreadPoolExecutor(job.batch)
    asked: deque[tuple[WindowRows, Future[ChosenScores]]] = deque()

    def oldest() -> WindowObservation:
        row, scores = asked.popleft()
        return observation(row.window, row.first, window_bounds(row, scores.result()))

    try:
        for row in rows:
            chosen = choose_ids(row, candidate.ids)
            asked.append((row, pool.submit(candidate.score_ids, row.window, chosen, row.first)))
            if len(asked) > job.batch:
                yield oldest()
        while asked:
            yield oldest()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
