"""The laboratory: a model with windows of text, its exact cache scored once, and codecs that are
measured against it.

Everything that is scored is kept by what decides it (`assay.runs.Kept`): the exact cache for all
commands alike, and the windows of every codec, so that an interrupted command goes on and an equal
measurement is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any

from assay.engines import full_spec
from assay.engines.hf.scorer import HfScorer, check_positions
from assay.engines.machine import begin_run, interrupt_run, memory_error, out_of_memory
from assay.engines.ray_scorer import RayScorer
from assay.engines.scoring import (
    Engagement,
    EngineHook,
    HookSpec,
    ScoreJob,
    ScoringEngine,
    ScoringPath,
    Window,
)
from assay.engines.server.http import without_credentials
from assay.engines.specs import open_scorer
from assay.errors import AssayError, UsageError
from assay.fidelity.budget import Budget, OutOfTime, size_for
from assay.fidelity.kept_rows import KeptRows, engine_key, kept_states
from assay.fidelity.names import label_of
from assay.fidelity.observation import WindowObservation
from assay.fidelity.pace import WORTH_MEASURING, Pace, measure_pace
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.fidelity.score import ReferenceRows, batches, key_of, observe, read_kept
from assay.fidelity.text.sources import read_text
from assay.fidelity.windows import blocks_of
from assay.progress import NO_PROGRESS, Progress, span
from assay.runs import Kept, cache_path, source_digest
from assay.verdict import Finding, Severity, Verdict
from assay_lab.kv.cache_hook import (
    NOTE,
    CacheBytes,
    CodecHook,
    HookPlan,
    Mode,
    hook_spec,
    measured_bytes,
    path_of,
)
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.calibration import Calibration, read_calibration, without_passages
from assay_lab.kv.fit import Bench, CoderSet, kept_layers
from assay_lab.kv.transforms import Rotary
from assay_lab.options import TABLE_TOKENS

MEASURED_BYTES = 2 << 30
"""What kept observations may take on the disk."""


@dataclass(frozen=True)
class Measured:
    """What one configuration came to.

    `bytes` is None where no stream was encoded. `windows` are the numbers of those whose streams
    were, where these are the first ones. `seconds` were spent on fitting and on scoring.
    """

    seen: Sequence[WindowObservation]
    engagement: Engagement = field(default_factory=Engagement)
    bytes: CacheBytes | None = None
    windows: tuple[int, ...] = ()
    seconds: tuple[float, float] = (0.0, 0.0)


def kept_measurements() -> Kept:
    """The folder of kept observations, trimmed."""
    kept = Kept(
        cache_path("measured"), source_digest("engines", "fidelity", Path(__file__).parents[1])
    )
    kept.trim(MEASURED_BYTES)
    return kept


Scoring = tuple[ReferenceRows, ScoringEngine, ScoreJob]
"""A reference that has been scored, and how an engine scores windows against it."""


def measure_kept(
    windows: Sequence[Window],
    batch: int,
    kept: Kept,
    prepare: Callable[[int], Scoring],
    *,
    on_window: Callable[[WindowObservation], Any] = lambda seen: None,
    advance: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> Measured:
    """Score windows, of which those that `kept` holds are read; `prepare` is called only if so many
    are left to score.

    What took part is kept in pieces, one for each call that scored something, interrupted ones
    included, with the hashes of its windows: a piece of another text has no part in what is
    measured here.
    """
    pieces: list[dict[str, Any]] = kept.get("pieces", [])
    told = {sha256 for piece in pieces for sha256 in piece["of"]}
    seen: dict[int, WindowObservation] = {}
    todo: list[Window] = []
    for part in batches(windows, batch):
        if not told.issuperset(
            w.sha256 for w in part
        ):  # a run that was killed before it could say what took part
            kept.forget(key_of(part))
        found = read_kept(kept, part)
        todo += [] if found else part
        for window in found or ():
            seen[window.index] = window
            on_window(window)
            advance()
    if todo:
        began = time.perf_counter()
        reference, engine, job = prepare(len(todo))
        fitted, began = time.perf_counter() - began, time.perf_counter()
        new: list[int] = []

        def note(window: WindowObservation) -> None:
            seen[window.index] = window
            new.append(window.index)
            on_window(window)

        try:
            observe(
                reference,
                engine,
                todo,
                job,
                kept=kept,
                on_window=note,
                advance=advance,
                enough=enough,
            )
        finally:
            if new:
                seconds = [fitted, time.perf_counter() - began]
                of = [w.sha256 for w in todo if w.index in new]
                pieces.append(
                    {**asdict(engine.engagement()), "windows": new, "of": of, "seconds": seconds}
                )
                kept.put("pieces", pieces)
    return _joined([seen[w.index] for w in windows if w.index in seen], _of(windows, pieces))


def _of(windows: Sequence[Window], pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pieces in which some of these windows took part."""
    asked = {window.sha256 for window in windows}
    return [piece for piece in pieces if not asked.isdisjoint(piece["of"])]


def _joined(seen: Sequence[WindowObservation], pieces: Sequence[Mapping[str, Any]]) -> Measured:
    """What took part in all pieces together."""
    layers: dict[int, int] = {}
    streams: dict[str, list[Any]] = {}
    windows: list[int] = []
    for piece in pieces:
        for layer, fires in piece["per_layer"].items():
            layers[int(layer)] = layers.get(int(layer), 0) + fires
        facts = piece["notes"].get(NOTE, {}).get("streams", {})
        for name, found in facts.items():
            streams.setdefault(name, []).extend(found)
        windows += piece["windows"][: min(map(len, facts.values()), default=0)]
    notes = dict(pieces[-1]["notes"]) if pieces else {}
    if NOTE in notes:
        notes[NOTE] = {**notes[NOTE], "streams": streams}
    counts = ([p[name] for p in pieces if p[name] is not None] for name in ("fires", "bytes_read"))
    fires, read = (sum(found) if found else None for found in counts)
    fit, score = (sum(p["seconds"][i] for p in pieces) for i in (0, 1))
    return Measured(
        seen, Engagement(fires, read, layers, notes), None, tuple(windows), (fit, score)
    )


class Lab:
    """A model with windows that are scored by one mode; what measures scores the exact cache first,
    once.

    decode: the second half of each window behind an exact prefix; inforward and snapshot: all
    tokens, by prefill; or tokens `scored_from` …. `bench` is what coders are fitted on, for a model
    of transformers in this process; other engines fit them where they run. `about` is what else
    decides what coders are, such as the hash of a calibration. `fresh` are further windows of the
    text, for a second measurement. `block` tokens of *decode* are fed together: each sees the cache
    as if it came alone (`assay_lab.kv.cache_hook`), and a GPU is busy.
    """

    def __init__(
        self,
        engine: ScoringEngine,
        spec: str,
        windows: Sequence[Window],
        mode: Mode,
        batch: int,
        *,
        bench: Bench | None = None,
        calibration: str | None = None,
        provenance: Mapping[str, Any] | None = None,
        about: Any = None,
        fresh: Sequence[Window] = (),
        text: Mapping[str, Any] | None = None,
        scored_from: int | None = None,
        block: int = 1,
        elsewhere: tuple[CacheShape, int | None] | None = None,
        progress: Progress = NO_PROGRESS,
    ) -> None:
        self.engine = engine
        self.spec = spec
        self.windows = list(windows)
        self.fresh = list(fresh)
        self.mode = mode
        self.batch = batch
        self.calibration = calibration
        self.provenance = provenance
        """That of the calibration."""
        self.text = dict(text or {})
        self.length = len(windows[0].tokens)
        self.progress = progress
        self.partial: Measured | None = None
        """What the last measurement came to, or has come to so far."""
        self._bench = bench
        self._elsewhere = elsewhere
        """Shape and positions of a model that is not in this process."""
        self._planned, self._budget, self._stage = 0, Budget(), "measurements"
        self._seconds: list[float] = []
        first = scored_from or (self.length // 2 + 1 if mode is Mode.DECODE else 1)
        self.job = ScoreJob(path_of(mode), scored_from=first, batch=batch)
        if block > 1 and mode is Mode.DECODE:
            self.job = replace(self.job, path=ScoringPath.CHUNKED, chunk=block)
        self.block = block
        self._key = engine_key(spec)
        self._states = kept_states().within(self._key)
        self.about = about
        self._kept = kept_measurements().within([self._key, about])
        self.reference = KeptRows(self._states, self.windows, self.job)

    @property
    def bench(self) -> Bench:
        """What coders are fitted on; ValueError for an engine that fits them where it runs."""
        if self._bench is None:
            raise ValueError("the engine fits its coders where it runs")
        return self._bench

    @property
    def shape(self) -> CacheShape:
        """That of the cache of a model of transformers."""
        return self._elsewhere[0] if self._elsewhere else self.bench.shape

    @property
    def context(self) -> int | None:
        """Positions that the model has, None where nobody knows."""
        if self._elsewhere:
            return self._elsewhere[1]
        if not isinstance(self.engine, HfScorer):
            return self.engine.describe().get("max_model_len")
        return _positions(self.engine)

    @property
    def blocks(self) -> list[int] | None:
        """The cluster of each window by its index; None where nobody knows where in the text the
        windows lie.
        """
        if not (places := self.text.get("places")):
            return None
        own = blocks_of([places[w.index] for w in self.windows])
        known = dict(zip((w.index for w in self.windows), own, strict=True))
        return [known.get(i, -1) for i in range(max(known) + 1)]

    def apart(self) -> Lab:
        """The same model and windows, for a measurement beside others on a cluster."""
        found = self.on(self.windows)
        found.engine, found.progress = copy(self.engine), NO_PROGRESS
        return found

    def on(self, windows: Sequence[Window], batch: int | None = None) -> Lab:
        """The same model on other windows."""
        return Lab(
            self.engine,
            self.spec,
            windows,
            self.mode,
            batch or self.batch,
            bench=self._bench,
            calibration=self.calibration,
            provenance=self.provenance,
            about=self.about,
            text=self.text,
            block=self.block,
            elsewhere=self._elsewhere,
            progress=self.progress,
        )

    def expect(self, count: int, budget: Budget | None = None, pace: Pace | None = None) -> None:
        """Tell how long the exact cache and `count` measurements will take, by the model's own
        speed.

        Nothing is told of work that is done in a moment.
        """
        self._planned, self._budget = count, budget or self._budget
        budget, self._stage = self._budget, "the codec" if count == 1 else f"{count} measurements"
        tokens = len(self.windows) * self.length
        if pace is None:
            if budget.seconds is not None or tokens * (1 + count) < WORTH_MEASURING:
                return  # a run that goes on knows its size and nothing of its speed
            plan = Plan(self.spec, (self.spec,), windows=len(self.windows), length=self.length)
            plan = replace(plan, path=self.job.path.value, chunk=self.job.chunk, batch=self.batch)
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
            self.mode.value,
            self.length,
            calibration=self.calibration,
            measure_windows=measure_windows,
            **placed,
        )
        about = {**plan.to_config(), "calibration": None, "job": asdict(self.job)}
        share = table_tokens or min(TABLE_TOKENS, self.context or TABLE_TOKENS)
        seen: list[WindowObservation] = []

        began = time.monotonic()

        def prepare(windows: int) -> Scoring:
            nonlocal began
            hook: HookSpec | EngineHook
            if self._bench is None:
                hook = hook_spec(self.spec, **plan.to_config() | {"windows": windows})
            else:
                fitted = (coders() if coders else plan.coders(self._bench)).by_stream
                hook = CodecHook(
                    fitted, self.mode, self.length, measure_windows=measure_windows, windows=windows
                )
            with self._budget.stage("the exact cache"):
                self.score_reference()
            began = time.monotonic()
            return self.reference, self.engine, replace(self.job, hook=hook)

        self.partial = None
        kept = self._kept.within(about)
        try:
            with (
                memory_is_enough(f"{label_of(self.spec)} with {codec}"),
                self.progress(
                    f"scoring {label or codec}{self._left()}", len(self.windows)
                ) as advance,
            ):
                found = measure_kept(
                    self.windows,
                    self.batch,
                    kept,
                    prepare,
                    on_window=seen.append,
                    advance=advance,
                    enough=lambda: enough(seen),
                )
        except BaseException:
            if seen:
                pieces = _of(self.windows, kept.get("pieces", []))
                self.partial = self._sized(_joined(seen, pieces), share)
            raise
        self._seconds.append(time.monotonic() - began)
        self._budget.took[self._stage] = sum(self._seconds)
        self.partial = self._sized(found, share)
        return self.partial

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


# Open a model, and end a command that was cut short with what it has.


def engine_spec(model: str) -> str:
    """A model as an engine: of transformers, unless it is written as one of vLLM. UsageError for
    any other engine.
    """
    if model.startswith(("gguf:", "run:", "hub:", "http://", "https://")):
        raise UsageError(
            f"codecs do not go into the KV cache of {without_credentials(model)}",
            remedy="write hf:MODEL, the folder of a checkpoint, or vllm:MODEL",
            finding_id="kv.usage",
        )
    return full_spec(model)


def open_planned(plan: Any, **more: Any) -> AbstractContextManager[Lab]:
    """`open_lab` as a command's plan says, and with what the command adds."""
    names = ("windows", "length", "mode", "batch", "block", "fresh", "calibration")
    return open_lab(
        plan.model, plan.text, **{n: getattr(plan, n) for n in names if hasattr(plan, n)} | more
    )


@contextmanager
def open_lab(
    model: str,
    text: Sequence[str],
    *,
    windows: int,
    length: int,
    mode: str = Mode.DECODE.value,
    batch: int = 8,
    block: int = 1,
    fresh: int = 0,
    calibration: str | None = None,
    any_engine: bool = False,
    budget: Budget | None = None,
    together: bool = False,
    codecs: int | Callable[[CacheShape], int] = 0,
    least_codecs: int = 0,
    skip_layers: Sequence[int] = (),
    progress: Progress = NO_PROGRESS,
) -> Iterator[Lab]:
    """Load a model, cut the text, and check the calibration against both; the model is given back
    at the end.

    UsageError where the text has fewer `fresh` windows than that behind those to measure on, and
    for another engine than transformers unless `any_engine`. With a `budget` in which `codecs` are
    measured the windows are as many and as long as fit; OutOfTime where not even `least_codecs` (0:
    all of them) do. The time that `codecs` take is told (0: by who knows their number later; a
    function has it from the shape of the cache). `together` allows to feed 16 tokens of a decode
    together where one at a time does not fit. A device that runs out of memory is an AssayError.
    """
    spec = engine_spec(model)
    if not (any_engine or spec.startswith("hf:")):
        raise UsageError(
            f"{spec.partition(':')[0]}: is for `assay kv eval`, `calibrate` and `assay gap`; this"
            " command takes models of transformers",
            remedy="write hf:MODEL",
            finding_id="kv.usage",
        )
    if block > 1 and not spec.startswith("hf:"):
        raise UsageError(
            f"tokens are fed together (--block {block}) to models of transformers only",
            remedy="leave out --block",
            finding_id="kv.usage",
        )
    known = read_calibration(Path(calibration)) if calibration else None
    begin_run([spec, text, windows, length, mode, batch, block, fresh, calibration])
    with memory_is_enough(label_of(spec)):
        engine = open_scorer(spec)
        try:
            plan = Plan(spec, (spec,), text=tuple(text), windows=windows + fresh, length=length)
            pace = None
            if callable(codecs):
                codecs = (
                    codecs(cache_shape(engine.engine.model)) if isinstance(engine, HfScorer) else 0
                )
            if budget and budget.seconds is not None:
                plan = replace(plan, path=path_of(mode).value, batch=batch)
                needed = codecs, least_codecs or codecs
                try:
                    windows, length, pace = _fitting(plan, windows, engine, budget, *needed)
                except OutOfTime:
                    if (
                        not together
                        or block > 1
                        or mode != Mode.DECODE.value
                        or not spec.startswith("hf:")
                    ):
                        raise
                    # Tokens that are fed together see the cache as if each came alone, in fewer
                    # passes of the model.
                    budget.too_small, block, plan = (
                        False,
                        TOGETHER,
                        replace(plan, path="chunked", chunk=TOGETHER),
                    )
                    budget.left_out.clear()
                    windows, length, pace = _fitting(plan, windows, engine, budget, *needed)
                    budget.leave_out(
                        "feeding tokens one at a time",
                        f"the rounding of it: {TOGETHER} are fed together",
                    )
                    plan = replace(plan, path=path_of(mode).value)
                plan = replace(plan, windows=windows + fresh, length=length)
            found, facts = plan_windows(plan, engine.tokenizer)
            if isinstance(engine, HfScorer):
                check_positions(engine.engine.model, found)
                kept_layers(cache_shape(engine.engine.model), skip_layers)
            if known:
                known.check_text(facts, found)
            measured = min(windows, len(found))
            if len(found) - measured < fresh:
                raise UsageError(
                    f"the text has {len(found)} windows, {windows + fresh} are needed",
                    remedy="give more text, or fewer windows (--windows, --fresh)",
                    finding_id="kv.usage",
                )
            lab = Lab(
                engine,
                spec,
                found[:measured],
                Mode(mode),
                batch,
                bench=_bench(engine, length, known) if isinstance(engine, HfScorer) else None,
                calibration=calibration,
                provenance=without_passages(known.provenance) if known else None,
                about=sha256(Path(calibration).read_bytes()).hexdigest() if calibration else None,
                fresh=found[measured:],
                text=facts,
                block=block,
                elsewhere=_looked_at(engine, length, calibration),
                progress=progress,
            )
            if codecs:
                lab.expect(codecs, budget, pace)
            yield lab
        finally:
            engine.close()


LEAST_CODED = 256
"""Tokens of a passage: codecs keep the first and the recent tokens exact, of a shorter one perhaps
all.
"""
TOGETHER = 16
"""Tokens of a decode that are fed together where one at a time does not fit into a budget."""
CODEC_COST = 2.0
"""A codec is taken to make scoring so much slower; where it is more, the clock ends the run
earlier.
"""


def _fitting(
    plan: Plan, windows: int, engine: ScoringEngine, budget: Budget, codecs: int, least: int
) -> tuple[int, int, Pace | None]:
    """Windows and length that fit; those of an equal command before, so that it goes on from there,
    and then no speed.
    """
    pace: Pace | None = None

    def measure() -> tuple[int, int]:
        nonlocal pace
        pace = measure_pace(engine, plan, read_text(plan.text).text)
        share = plan.windows / windows  # with those that take no part in the choice
        costs = [
            share * (1 + n * CODEC_COST) * pace.score + n * pace.compare
            for n in range(codecs, least - 1, -1)
        ]
        costs.append((1 + least * CODEC_COST) * pace.score + least * pace.compare)
        # Where not all of a sweep's codecs fit, the first ones are measured, and the others are
        # left out by name; last of all without the windows for a second look, of which as many are
        # taken in the end as there is time for.
        fits = (c for c in costs if size_for(budget.left(), c, windows, plan.length, LEAST_CODED))
        return budget.size(next(fits, costs[-1]), windows, plan.length, least=LEAST_CODED)

    about = ["size", engine_key(plan.reference), plan.facts(), codecs, least, budget.seconds]
    found = kept_measurements().have(about, measure)
    budget.note_size((windows, plan.length), (found[0], found[1]))
    return found[0], found[1], pace


def _looked_at(
    engine: ScoringEngine, length: int, calibration: str | None
) -> tuple[CacheShape, int | None] | None:
    """`look_at` of a model of transformers in the workers of a cluster; None for any other."""
    if not (isinstance(engine, RayScorer) and engine.spec.startswith("hf:")):
        return None
    path = str(Path(calibration).resolve()) if calibration else None
    found: tuple[CacheShape, int | None] = engine.ask(f"{__name__}:look_at", length, path)
    return found


def look_at(
    scorer: HfScorer, length: int, calibration: str | None
) -> tuple[CacheShape, int | None]:
    """Shape of the cache and positions of a model; AssayError where the calibration is not its own."""
    known = read_calibration(Path(calibration)) if calibration else None
    return _bench(scorer, length, known).shape, _positions(scorer)


def _positions(scorer: HfScorer) -> int | None:
    return getattr(scorer.engine.model.config.get_text_config(), "max_position_embeddings", None)


def _bench(scorer: HfScorer, length: int, calibration: Calibration | None) -> Bench:
    shape = cache_shape(scorer.engine.model)
    if calibration:
        calibration.check_model(shape)
        first = scorer.engine.model.get_decoder().layers[0].self_attn
        if (weight := getattr(getattr(first, "o_proj", None), "weight", None)) is not None:
            calibration.check_weights(weight)
    return Bench(shape, Rotary(scorer.engine.model, length), calibration)


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


class Unfinished:
    """Whether a command was cut short: by Ctrl-C, or by an error once `measured` says that there is
    something to show.

    Used as a context manager around what measures; what is after it reports what there is.
    """

    def __init__(self, measured: Callable[[], Any]) -> None:
        self._measured = measured
        self.interrupted = False
        self.error: AssayError | None = None

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, KeyboardInterrupt):
            self.interrupted = True
        elif isinstance(error, AssayError) and self._measured():
            self.error = error
        if self:
            interrupt_run()
        return self.interrupted or self.error is not None

    def __bool__(self) -> bool:
        return self.interrupted or self.error is not None

    def verdict(self, whole: Verdict) -> Verdict:
        """The verdict of what there is: what was cut short cannot pass."""
        if self.error:
            return whole if whole is Verdict.FAIL else self.error.verdict
        return Verdict.INCONCLUSIVE if self.interrupted and whole is Verdict.PASS else whole

    def findings(self, area: str = "kv") -> list[Finding]:
        """Why there is no more."""
        if self.error:
            return [self.error.to_finding()]
        if not self.interrupted:
            return []
        text = "interrupted: what was scored is kept, the same command goes on from there"
        return [Finding(f"{area}.interrupted", Severity.INFO, text)]
