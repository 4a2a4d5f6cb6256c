"""Score a reference and a candidate on the same windows, and keep what was seen of each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from assay.engines.id_scoring import IdScorer
from assay.engines.scoring import ScoreJob, ScoringEngine, Window, WindowRows
from assay.errors import AssayError
from assay.fidelity.measure import Candidate, measure
from assay.fidelity.observations import WindowObservation, load_kept, save
from assay.progress import Advance


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


def observe(
    reference: ReferenceRows,
    candidate: Candidate,
    windows: Sequence[Window],
    job: ScoreJob,
    *,
    keep_in: Path | None = None,
    on_window: Callable[[WindowObservation], Any] = lambda seen: None,
    advance: Advance = lambda: None,
) -> list[WindowObservation]:
    """Observations of all windows, in order.

    With `keep_in`, every window is written there as it is done, and what is there already is not scored again.
    `on_window` sees each observation as it comes, those that were kept first.
    """
    require(candidate, job, len(windows[0].tokens))
    seen: dict[int, WindowObservation] = {}
    for window in windows:
        kept = load_kept(keep_in / f"{window.index:06d}.npz") if keep_in else None
        if kept:
            seen[window.index] = kept
            on_window(kept)
            advance()
    todo = [w for w in windows if w.index not in seen]
    if todo:
        for found in measure(iter(reference.rows(todo)), candidate, todo, job):
            if keep_in:
                save(keep_in / f"{found.index:06d}.npz", found)
            seen[found.index] = found
            on_window(found)
            advance()
    return [seen[w.index] for w in windows]


def require(candidate: Candidate, job: ScoreJob, length: int) -> None:
    """AssayError where the candidate cannot score windows of `length` tokens as `job` asks."""
    if isinstance(candidate, IdScorer):
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
            remedy=f"paths it offers: {', '.join(sorted(ability.paths)) or 'none'}; or use another engine",
        )
