"""One model, its windows and its reference scores: many codecs are measured on them without loading it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import Engagement, HookSpec, ScoreJob, ScoringEngine, Window, WindowRows
from assay.fidelity.metrics import window_statistics
from assay.fidelity.observations import WindowObservation, observation
from assay.fidelity.observe import observe
from assay.kv.accounting import CacheBytes, measured_bytes
from assay.kv.hook import CodecHook, Mode
from assay.kv.hooks import path_of
from assay.kv.track import Coders
from assay.progress import NO_PROGRESS, Progress


@dataclass(frozen=True)
class Measured:
    """What one configuration of codecs came to."""

    seen: Sequence[WindowObservation]
    engagement: Engagement
    bytes: CacheBytes


class Trials:
    """An engine with windows that are scored by one path, the exact cache first; then with codecs, by `HookSpec`.

    decode: the second half of each window behind an exact prefix; inforward and snapshot: all tokens, by prefill;
    or tokens `scored_from`….
    """

    def __init__(
        self,
        engine: ScoringEngine,
        windows: Sequence[Window],
        mode: Mode,
        batch: int,
        scored_from: int | None = None,
    ) -> None:
        self.engine = engine
        self.windows = list(windows)
        self.mode = mode
        self.length = len(windows[0].tokens)
        first = scored_from or (self.length // 2 + 1 if mode is Mode.DECODE else 1)
        self.job = ScoreJob(path_of(mode), scored_from=first, batch=batch)
        self._reference: dict[int, WindowRows] = {}

    def score_reference(self, progress: Progress = NO_PROGRESS) -> None:
        """Score the windows with the exact cache, those that were not yet."""
        todo = [w for w in self.windows if w.index not in self._reference]
        if todo:
            with progress("scoring the exact cache", len(todo)) as advance:
                for rows in self.engine.score_windows(todo, self.job):
                    self._reference[rows.window.index] = rows
                    advance()

    def rows(self, windows: Sequence[Window]) -> Iterator[WindowRows]:
        """The rows of windows that were scored with the exact cache."""
        return (self._reference[window.index] for window in windows)

    def measure_hook(
        self,
        hook: HookSpec,
        *,
        table_tokens: int,
        progress: Progress = NO_PROGRESS,
        label: str = "",
        on_window: Callable[[WindowObservation], Any] = lambda seen: None,
    ) -> Measured:
        """Score the windows with a codec's hook. Interrupted, it raises; `on_window` has seen what was done."""
        self.score_reference(progress)
        job = replace(self.job, hook=hook)
        with progress(f"scoring {label}", len(self.windows)) as advance:
            seen = observe(self, self.engine, self.windows, job, on_window=on_window, advance=advance)
        return self._measured(seen, self.engine.engagement(), table_tokens)

    def _measured(
        self, seen: Sequence[WindowObservation], engagement: Engagement, table_tokens: int
    ) -> Measured:
        return Measured(seen, engagement, measured_bytes(engagement, self.length - 1, table_tokens))


class Lab(Trials):
    """The same with a model of transformers in this process, into which fitted coders go as they are."""

    def __init__(self, scorer: HfScorer, windows: Sequence[Window], mode: Mode, batch: int) -> None:
        super().__init__(scorer, windows, mode, batch)
        self.scorer = scorer

    def measure(
        self,
        coders: Coders,
        *,
        windows: Sequence[Window] | None = None,
        table_tokens: int,
        measure_windows: int = 8,
        progress: Progress = NO_PROGRESS,
        label: str = "",
        on_window: Callable[[WindowObservation], Any] = lambda seen: None,
    ) -> Measured:
        """Score the windows with `coders` in the cache. Interrupted, it raises; `on_window` has seen what was done."""
        self.score_reference(progress)
        chosen = self.windows if windows is None else list(windows)
        hook = CodecHook(coders, self.mode, self.length, measure_windows=measure_windows, windows=len(chosen))
        seen: list[WindowObservation] = []
        with progress(f"scoring {label}", len(chosen)) as advance:
            for rows in self.scorer.score_with(chosen, self.job, hook):
                reference = self._reference[rows.window.index]
                found = observation(rows.window, rows.first, window_statistics(reference, rows))
                seen.append(found)
                on_window(found)
                advance()
        return self._measured(seen, hook.engagement(), table_tokens)
