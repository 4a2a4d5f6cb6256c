"""A model with windows of text, its exact cache scored once, and codecs measured against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from assay.engines.device import memory_error, out_of_memory
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import EngineHook, HookSpec, ScoreJob, ScoringEngine, ScoringPath, Window
from assay.fidelity.budget import Budget
from assay.fidelity.kept_rows import KeptRows, engine_key, kept_states
from assay.fidelity.names import label_of
from assay.fidelity.observation import WindowObservation
from assay.fidelity.pace import WORTH_MEASURING, Pace, measure_pace
from assay.fidelity.plan import Plan
from assay.fidelity.windows import blocks_of
from assay.progress import NO_PROGRESS, Progress, span
from assay.verdict import Finding
from assay_lab.kv.cache_bytes import NOTE, measured_bytes
from assay_lab.kv.cache_hook import CodecHook
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.hook_plan import HookPlan, Mode, hook_spec, path_of
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.measured import (
    Measured,
    Scoring,
    joined,
    kept_measurements,
    measure_kept,
    pieces_of,
)
from assay_lab.options import TABLE_TOKENS


@dataclass(frozen=True)
class ScoringSetup:
    """How a model is scored with codecs in its cache.

    decode: the second half of each window behind an exact prefix; inforward and snapshot: all
    tokens, by prefill; or tokens `scored_from` …. `block` tokens of *decode* are fed together: each
    sees the cache as if it came alone (`assay_lab.kv.cache_hook`), and a GPU is busy.
    """

    spec: str
    mode: Mode
    batch: int
    block: int = 1
    scored_from: int | None = None

    def job(self, length: int) -> ScoreJob:
        """The job that scores windows of `length` tokens."""
        first = self.scored_from or (length // 2 + 1 if self.mode is Mode.DECODE else 1)
        if self.block > 1 and self.mode is Mode.DECODE:
            return ScoreJob(
                ScoringPath.CHUNKED, scored_from=first, batch=self.batch, chunk=self.block
            )
        return ScoreJob(path_of(self.mode), scored_from=first, batch=self.batch)


@dataclass(frozen=True)
class Passages:
    """Windows of a text, `fresh` ones for a second measurement, and what is known of the text."""

    windows: Sequence[Window]
    fresh: Sequence[Window] = ()
    text: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fitting:
    """What coders are fitted on.

    `layer_coders` fits them in this process, for a model of transformers; without it the engine
    fits them where it runs, with the file `calibration`. `about` is what else decides what coders
    are, such as the hash of a calibration. `remote` has shape and positions of a model of
    transformers in other processes.
    """

    layer_coders: LayerCoders | None = None
    calibration: str | None = None
    provenance: Mapping[str, Any] | None = None
    about: Any = None
    remote: tuple[CacheShape, int | None] | None = None


class CodecEvaluator:
    """A model with windows that are scored by one mode; what measures scores the exact cache first,
    once.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        setup: ScoringSetup,
        passages: Passages,
        fitting: Fitting | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self.engine, self.setup, self.progress = engine, setup, progress
        self.fitting = fitting or Fitting()
        self.windows, self.fresh = list(passages.windows), list(passages.fresh)
        self.text = dict(passages.text)
        self.length = len(self.windows[0].tokens)
        self.job = setup.job(self.length)
        self.partial: Measured | None = None
        """What the last measurement came to, or has come to so far."""
        self._planned, self._budget, self._stage = 0, Budget(), "measurements"
        self._seconds: list[float] = []
        key = engine_key(setup.spec)
        self._states = kept_states().within(key)
        self._kept = kept_measurements().within([key, self.fitting.about])
        self.reference = KeptRows(self._states, self.windows, self.job)

    @property
    def layer_coders(self) -> LayerCoders:
        """What fits coders; ValueError for an engine that fits them where it runs."""
        if self.fitting.layer_coders is None:
            raise ValueError("the engine fits its coders where it runs")
        return self.fitting.layer_coders

    @property
    def shape(self) -> CacheShape:
        """That of the cache of a model of transformers."""
        return self.fitting.remote[0] if self.fitting.remote else self.layer_coders.shape

    @property
    def context(self) -> int | None:
        """Positions that the model has, None if unknown."""
        if self.fitting.remote:
            return self.fitting.remote[1]
        if not isinstance(self.engine, HfScorer):
            return self.engine.describe().get("max_model_len")
        return positions_of(self.engine)

    @property
    def blocks(self) -> list[int] | None:
        """The cluster of each window by its index; None if their places in the text are unknown."""
        if not (places := self.text.get("places")):
            return None
        own = blocks_of([places[w.index] for w in self.windows])
        known = dict(zip((w.index for w in self.windows), own, strict=True))
        return [known.get(i, -1) for i in range(max(known) + 1)]

    def apart(self) -> CodecEvaluator:
        """The same model and windows, for a measurement beside others on a cluster."""
        found = self.on(self.windows)
        found.engine, found.progress = copy(self.engine), NO_PROGRESS
        return found

    def on(self, windows: Sequence[Window], batch: int | None = None) -> CodecEvaluator:
        """The same model on other windows."""
        setup = replace(self.setup, batch=batch or self.setup.batch, scored_from=None)
        passages = Passages(windows, text=self.text)
        return CodecEvaluator(self.engine, setup, passages, self.fitting, self.progress)

    def expect(self, count: int, budget: Budget | None = None, pace: Pace | None = None) -> None:
        """Report how long the exact cache and `count` measurements will take, by the model's own
        speed. Short work is not reported.
        """
        self._planned, self._budget = count, budget or self._budget
        budget, self._stage = self._budget, "the codec" if count == 1 else f"{count} measurements"
        tokens = len(self.windows) * self.length
        if pace is None:
            if budget.seconds is not None or tokens * (1 + count) < WORTH_MEASURING:
                return  # a run that goes on knows its size and nothing of its speed
            spec, job = self.setup.spec, self.job
            plan = Plan(spec, (spec,), windows=len(self.windows), length=self.length)
            plan = replace(plan, path=job.path.value, chunk=job.chunk, batch=job.batch)
            some = [token for window in self.windows[:12] for token in window.tokens]
            pace = measure_pace(self.engine, plan, self.engine.tokenizer.decode(some[:2000]))
        missing = len(self.reference.read()) * self.length
        a_codec = (CODEC_COST * pace.score + pace.compare) * tokens
        exact = missing * pace.score
        expected = {
            "the exact cache": exact,
            self._stage: min(count * a_codec, max(0.0, budget.left() - exact)),
        }
        budget.tell(expected, self.progress)

    def _left(self) -> str:
        """Which of the planned measurements this is, and how long it will be until the last of
        them.
        """
        done, count = len(self._seconds), self._planned
        if count < 2 or done >= count:
            return ""
        left = f", about {span(sum(self._seconds) / done * (count - done))} left" if done else ""
        return f" ({done + 1} of {count}{left})"

    def score_reference(self) -> None:
        """Score the windows with the exact cache, those that are not kept."""
        if missing := self.reference.read():
            with self.progress("scoring the exact cache", len(missing)) as advance:
                self.reference.score(self.engine, advance)
        else:
            self.reference.score(self.engine)

    def measure(
        self,
        codec: str,
        *,
        label: str = "",
        coders: Callable[[], CoderSet] | None = None,
        table_tokens: int | None = None,
        measure_windows: int = 8,
        enough: Callable[[Sequence[WindowObservation]], bool] = lambda seen: False,
        **placed: Any,
    ) -> Measured:
        """Score the windows with a codec in the cache, and encode `measure_windows` of them for
        real.

        `placed` are fields of `HookPlan` that say in which layers and streams it works. `coders`
        fits them otherwise than the plan would. Interrupted, it raises and `partial` holds what has
        been seen. `table_tokens` share the tables: by default as many as the model's context, up to
        32,768. `enough` ends it between two batches.
        """
        plan = HookPlan(
            codec,
            self.setup.mode.value,
            self.length,
            calibration=self.fitting.calibration,
            measure_windows=measure_windows,
            **placed,
        )
        about = {**plan.to_config(), "calibration": None, "job": asdict(self.job)}
        share = table_tokens or min(TABLE_TOKENS, self.context or TABLE_TOKENS)
        seen: list[WindowObservation] = []
        began = time.monotonic()

        def prepare(windows: int) -> Scoring:
            nonlocal began
            hook = self._hook(plan, windows, coders)
            with self._budget.stage("the exact cache"):
                self.score_reference()
            began = time.monotonic()
            return self.reference, self.engine, replace(self.job, hook=hook)

        self.partial = None
        kept = self._kept.within(about)
        try:
            with (
                memory_is_enough(f"{label_of(self.setup.spec)} with {codec}"),
                self.progress(
                    f"scoring {label or codec}{self._left()}", len(self.windows)
                ) as advance,
            ):
                found = measure_kept(
                    self.windows,
                    self.job.batch,
                    kept,
                    prepare,
                    on_window=seen.append,
                    advance=advance,
                    enough=lambda: enough(seen),
                )
        except BaseException:
            if seen:
                pieces = pieces_of(self.windows, kept.get("pieces", []))
                self.partial = self._sized(joined(seen, pieces), share)
            raise
        self._seconds.append(time.monotonic() - began)
        self._budget.took[self._stage] = sum(self._seconds)
        self.partial = self._sized(found, share)
        return self.partial

    def _hook(
        self, plan: HookPlan, windows: int, coders: Callable[[], CoderSet] | None
    ) -> HookSpec | EngineHook:
        """The hook of `plan` for so many windows, fitted here where the model is here."""
        if self.fitting.layer_coders is None:
            return hook_spec(self.setup.spec, **plan.to_config() | {"windows": windows})
        fitted = coders() if coders else plan.coders(self.layer_coders)
        return CodecHook(
            fitted.by_stream,
            self.setup.mode,
            self.length,
            measure_windows=plan.measure_windows,
            windows=windows,
        )

    def _sized(self, measured: Measured, table_tokens: int) -> Measured:
        """With the bytes of the cache, where streams were encoded."""
        facts = measured.engagement.notes.get(NOTE, {}).get("streams")
        if not facts:
            return measured
        return replace(
            measured, bytes=measured_bytes(measured.engagement, self.length - 1, table_tokens)
        )

    def notices(self) -> list[Finding]:
        """What a report should say of the cache of kept values."""
        return [*self._states.notices("kv"), *self._kept.notices("kv")]


CODEC_COST = 2.0
"""A codec is taken to make scoring so much slower; where it is more, the clock ends the run
earlier.
"""


def positions_of(scorer: HfScorer) -> int | None:
    """Positions that a model of transformers has, None if its configuration does not say."""
    return getattr(scorer.engine.model.config.get_text_config(), "max_position_embeddings", None)


@contextmanager
def memory_is_enough(where: str) -> Iterator[None]:
    """AssayError where a device has no memory left for what is done inside."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise memory_error(
            where, "this device", "give a smaller --batch or a smaller --length"
        ) from error
