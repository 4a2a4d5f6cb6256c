"""One model, its windows and its reference scores: many codecs are measured on them without loading it again."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from assay.engines.base import full_spec
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import Engagement, HookSpec, ScoreJob, ScoringEngine, Window, WindowRows
from assay.engines.server.endpoint import without_credentials
from assay.engines.specs import open_scorer
from assay.errors import UsageError
from assay.fidelity.metrics import window_statistics
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.fidelity.score import WindowObservation, observation, observe
from assay.lab.kv.accounting import CacheBytes, measured_bytes
from assay.lab.kv.cache_hook import CodecHook, Mode
from assay.lab.kv.calibration import read_calibration
from assay.lab.kv.codec import cache_shape
from assay.lab.kv.fit import Bench, open_calibration
from assay.lab.kv.hook_plan import path_of
from assay.lab.kv.live_stream import Coders
from assay.lab.kv.rope import Rotary
from assay.progress import NO_PROGRESS, Progress
from assay.runs import cache_dir, write_atomically


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


# -----------------------------------------------------------------------------
# A loaded model with its windows: what every command of the laboratory starts from.


@dataclass(frozen=True)
class Session:
    """`windows` are those to measure on, `fresh` the ones after them, for a second measurement."""

    scorer: HfScorer
    bench: Bench
    windows: Sequence[Window]
    fresh: Sequence[Window]
    text: dict[str, Any]

    def lab(self, windows: Sequence[Window], mode: Mode, batch: int) -> Lab:
        """A lab on some of the windows."""
        return Lab(self.scorer, windows, mode, batch)

    def require_fresh(self, windows: int, fresh: int) -> None:
        """UsageError where the text has fewer fresh windows than that, behind the `windows` to measure on."""
        if len(self.fresh) < fresh:
            raise UsageError(
                f"the text has {len(self.windows) + len(self.fresh)} windows, {windows + fresh} are needed",
                remedy="give more text, or fewer windows (--windows, --fresh)",
                finding_id="kv.usage",
            )


@dataclass(frozen=True)
class Scoring:
    """Any engine that takes codecs, with the windows that it scores. `calibration` is the provenance of a file."""

    engine: ScoringEngine
    windows: Sequence[Window]
    text: dict[str, Any]
    calibration: Mapping[str, Any] | None = None


def engine_spec(model: str) -> str:
    """A model as an engine: of transformers, unless it is written as one of vLLM. UsageError for any other engine."""
    if model.startswith(("gguf:", "run:", "hub:", "http://", "https://")):
        raise UsageError(
            f"codecs do not go into the KV cache of {without_credentials(model)}",
            remedy="write hf:MODEL, the folder of a checkpoint, or vllm:MODEL",
            finding_id="kv.usage",
        )
    return full_spec(model)


@contextmanager
def scoring(
    model: str, text: Sequence[str], *, windows: int, length: int, calibration: str | None
) -> Iterator[Scoring]:
    """Open an engine and cut the text, which must not have been calibrated on. It is closed at the end."""
    known = read_calibration(Path(calibration)) if calibration else None
    spec = engine_spec(model)
    engine = open_scorer(spec)
    try:
        plan = Plan(spec, (spec,), text=tuple(text), windows=windows, length=length)
        found, facts = plan_windows(plan, engine.tokenizer)
        if known:
            known.check_text(facts, [w.sha256 for w in found])
        yield Scoring(engine, found, facts, known.provenance if known else None)
    finally:
        engine.close()


@contextmanager
def session(
    model: str,
    text: Sequence[str],
    *,
    windows: int,
    fresh: int = 0,
    length: int,
    calibration: str | None,
) -> Iterator[Session]:
    """Load a model of transformers and cut the text; the calibration is checked against both. All is closed at the end."""
    spec = engine_spec(model)
    if not spec.startswith("hf:"):
        raise UsageError(
            f"{spec.partition(':')[0]}: is for `assay kv eval`, `calibrate` and `assay gap`; this command takes models of transformers",
            remedy="write hf:MODEL",
            finding_id="kv.usage",
        )
    scorer = HfScorer.load(spec)
    try:
        plan = Plan(spec, (spec,), text=tuple(text), windows=windows + fresh, length=length)
        found, facts = plan_windows(plan, scorer.tokenizer)
        shape = cache_shape(scorer.engine.model)
        known = open_calibration(calibration, shape, facts, [w.sha256 for w in found])
        bench = Bench(shape, Rotary(scorer.engine.model, length), known)
        measured = min(windows, len(found))
        yield Session(scorer, bench, found[:measured], found[measured:], facts)
    finally:
        scorer.close()


# -----------------------------------------------------------------------------
# Measurements of a long run, kept as they come, so that an interrupted one goes on where it stopped.


class Ledger:
    """A folder of JSON values by key, one for each distinct `plan`."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self._folder = cache_dir("kv") / digest
        self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, measure: Callable[[], Any]) -> Any:
        """The value of `key`: read where it was measured before, else measured and kept."""
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
        value = measure()
        self._folder.mkdir(
            parents=True, exist_ok=True
        )  # the same run beside this one may be done and have deleted it
        write_atomically(path, json.dumps(value))
        return value

    def forget(self) -> None:
        """Delete everything: the run is done."""
        shutil.rmtree(self._folder, ignore_errors=True)
