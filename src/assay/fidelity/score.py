"""Score a candidate on the reference's windows, by the best way that the candidate offers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from assay.engines.scoring import ScoreJob, ScoringEngine, StateRows, Window, WindowRows
from assay.engines.server.candidate import ServerCandidate
from assay.errors import AssayError
from assay.fidelity.metrics.bounds import choose_ids, window_bounds
from assay.fidelity.metrics.token_statistics import RowStatistics, window_statistics
from assay.runs import Kept

if TYPE_CHECKING:
    from assay.engines.server.topk import TopkLogprobs
from assay.fidelity.observation import WindowObservation, from_arrays, observation, to_arrays

Candidate = ScoringEngine | ServerCandidate


_STATISTICS = "assay.fidelity.metrics.token_statistics:batch_statistics"


@runtime_checkable
class _Reduces(Protocol):
    """An engine that computes statistics where it runs, so that no states of its own have to
    travel.
    """

    def reduce_windows(
        self, windows: Sequence[Window], references: Iterator[StateRows], job: ScoreJob, target: str
    ) -> Iterator[tuple[Window, Mapping[str, torch.Tensor]]]: ...


@runtime_checkable
class Spreads(Protocol):
    """An engine in several processes, each of which measures a part of the windows."""

    def observe_windows(
        self, rows: Iterator[WindowRows], windows: Sequence[Window], job: ScoreJob, target: str
    ) -> Iterator[WindowObservation]:
        """What `target(rows, engine, windows, job)` sees of each window where a part of it runs, in
        order.
        """
        ...


def measure(
    rows: Iterator[WindowRows],
    candidate: Candidate,
    windows: Sequence[Window],
    job: ScoreJob,
    left: Callable[[], float] = lambda: inf,
) -> Generator[WindowObservation, None, None]:
    """Observations of `windows`, in order; `rows` are the reference's rows of them.

    A server is bounded by a few ids. An engine that reduces gets the reference's states, where it
    has states; from any other come the rows themselves.
    """
    if isinstance(candidate, ServerCandidate):
        yield from _by_ids(rows, candidate, job, left)
        return
    if isinstance(candidate, Spreads):
        yield from candidate.observe_windows(rows, windows, job, f"{__name__}:measure")
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


def _by_ids(
    rows: Iterator[WindowRows], candidate: ServerCandidate, job: ScoreJob, left: Callable[[], float]
) -> Iterator[WindowObservation]:
    """Bounds from log-probabilities of the reference's likeliest ids; `job.batch` requests are
    under way at once, or 8.

    It ends early where no time is `left` (seconds) while an answer is waited for.
    """
    at_once = job.batch or 8
    pool = ThreadPoolExecutor(at_once)
    asked: deque[tuple[WindowRows, Future[TopkLogprobs]]] = deque()

    def oldest() -> WindowObservation:
        row, scores = asked.popleft()
        seconds = left()
        scored = scores.result(None if seconds == inf else max(0.0, seconds))
        return observation(row.window, row.first, window_bounds(row, scored))

    try:
        for row in rows:
            chosen = choose_ids(row, candidate.ids)
            asked.append((row, pool.submit(candidate.score_topk, row.window, chosen, row.first)))
            if len(asked) > at_once:
                yield oldest()
        while asked:
            yield oldest()
    except TimeoutError:
        return
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class ReferenceRows(Protocol):
    """The reference's side of a comparison, scored already or along with the candidate."""

    def rows(self, windows: Sequence[Window]) -> Iterator[WindowRows]:
        """The rows of the given windows, in order."""
        ...


@dataclass(frozen=True)
class LiveRows:
    """Rows that an engine scores as they are asked for, where they are too large to keep."""

    engine: ScoringEngine
    job: ScoreJob

    def rows(self, windows: Sequence[Window]) -> Iterator[WindowRows]:
        """The rows of the given windows, in order."""
        return self.engine.score_windows(windows, self.job)


def batches(windows: Sequence[Window], size: int) -> list[Sequence[Window]]:
    """The windows in the groups that are scored together: a group is kept whole, since rounding
    depends on company.

    Of an engine that chooses its batch itself (size 0) four windows are a group.
    """
    size = size or 4
    return [windows[lo : lo + size] for lo in range(0, len(windows), size)]


def key_of(part: Sequence[Window]) -> list[str]:
    """The key under which a group of windows is kept; its number is that of what is kept of a
    token.
    """
    return ["2", *(window.sha256 for window in part)]


def read_kept(kept: Kept, part: Sequence[Window]) -> list[WindowObservation] | None:
    """What is kept of windows that are scored together; None where they are still to be scored."""
    arrays = kept.get(key_of(part))
    return None if arrays is None else from_arrays(arrays, part)


def observe(
    reference: ReferenceRows,
    candidate: Candidate,
    windows: Sequence[Window],
    job: ScoreJob,
    *,
    kept: Kept | None = None,
    on_window: Callable[[WindowObservation], Any] = lambda seen: None,
    enough: Callable[[], bool] = lambda: False,
    left: Callable[[], float] = lambda: inf,
) -> list[WindowObservation]:
    """Observations of all windows, in order; of the first ones where `enough` ends it between two
    batches, or no time is `left`.

    With `kept`, every batch is kept as it is done, and what is there already is not scored again.
    `on_window` sees each observation as it comes, those that were kept first.
    """
    require(candidate, job, len(windows[0].tokens))
    seen: dict[int, WindowObservation] = {}
    todo = []
    # A server answers for one window at a time.
    for part in batches(windows, 1 if isinstance(candidate, ServerCandidate) else job.batch):
        known = read_kept(kept, part) if kept else None
        if known is None:
            todo.append(part)
        for found in known or ():
            seen[found.index] = found
            on_window(found)
        if enough():
            return [seen[w.index] for w in windows if w.index in seen]
    rows = [window for part in todo for window in part]
    if not rows:
        return [seen[w.index] for w in windows]
    # Closed however it ends: an engine says what took part when its rows have come to an end.
    with closing(measure(iter(reference.rows(rows)), candidate, rows, job, left)) as scored:
        for part in todo:
            done = []
            for found in islice(scored, len(part)):
                done.append(found)
                seen[found.index] = found
                if kept and len(done) == len(part):
                    kept.put(key_of(part), to_arrays(done))
                on_window(found)
            if enough():
                break
        else:
            for _ in scored:
                pass
    return [seen[w.index] for w in windows if w.index in seen]


def require(candidate: Candidate, job: ScoreJob, length: int) -> None:
    """AssayError where the candidate cannot score windows of `length` tokens as `job` asks."""
    if isinstance(candidate, ServerCandidate):
        candidate.require(job, length)
    else:
        require_path(candidate, job)


def require_path(engine: ScoringEngine, job: ScoreJob) -> None:
    """AssayError where the engine cannot score whole distributions by the path of `job`."""
    ability, name = engine.ability, engine.describe().get("engine", "this engine")
    if not ability.full_vocabulary or job.path not in ability.paths:
        what = f"by the {job.path} path" if ability.full_vocabulary else "whole distributions"
        raise AssayError(
            f"{name} cannot score {what}: {ability.reason or 'it offers no way to'}",
            finding_id="fidelity.missing_capability",
            remedy=(
                f"paths it offers: {', '.join(sorted(ability.paths)) or 'none'}; or use another"
                " engine"
            ),
        )
