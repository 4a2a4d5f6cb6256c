"""Open a model for codecs: load it, fit the work into a budget, cut the text, check the
calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from assay.engines import full_spec
from assay.engines.hf.scorer import HfScorer, check_positions
from assay.engines.ray_scorer import RayScorer
from assay.engines.scoring import ScoringEngine
from assay.engines.server.endpoint import without_credentials
from assay.engines.specs import open_scorer
from assay.engines.threads import begin_run
from assay.errors import UsageError
from assay.fidelity.budget import Budget, OutOfTime, size_for
from assay.fidelity.kept_rows import engine_key
from assay.fidelity.names import label_of
from assay.fidelity.pace import Pace, measure_pace
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.fidelity.text.sources import read_text
from assay.progress import NO_PROGRESS, Progress
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.calibration import Calibration, read_calibration, without_passages
from assay_lab.kv.evaluator import (
    CODEC_COST,
    CodecEvaluator,
    Fitting,
    Passages,
    ScoringSetup,
    memory_is_enough,
    positions_of,
)
from assay_lab.kv.hook_plan import Mode, path_of
from assay_lab.kv.layer_coders import LayerCoders, kept_layers
from assay_lab.kv.measured import kept_measurements
from assay_lab.kv.rotary import Rotary


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


@dataclass(frozen=True)
class ModelOnText:
    """A model, a text, and what of it is scored in which way.

    Attributes:
        windows: Windows to measure on, and `fresh` more for a second measurement.
        block: Tokens of *decode* that are fed together.
        any_engine: Whether vLLM is allowed beside transformers.
        skip_layers: Layers that stay exact; checked as soon as the model is loaded.
    """

    model: str
    text: Sequence[str]
    windows: int
    length: int
    mode: str = Mode.DECODE.value
    batch: int = 8
    block: int = 1
    fresh: int = 0
    calibration: str | None = None
    any_engine: bool = False
    skip_layers: Sequence[int] = ()

    @classmethod
    def of(cls, plan: Any, **more: Any) -> ModelOnText:
        """What a command's plan says, and what the command adds."""
        names = (f.name for f in fields(cls))
        return cls(**{n: getattr(plan, n) for n in names if hasattr(plan, n)} | more)

    @property
    def spec(self) -> str:
        """The model as an engine."""
        return engine_spec(self.model)

    def check(self) -> None:
        """UsageError for an engine that the command does not take."""
        kind = self.spec.partition(":")[0]
        if not (self.any_engine or kind == "hf"):
            raise UsageError(
                f"{kind}: is for `assay kv eval`, `calibrate` and `assay gap`; this"
                " command takes models of transformers",
                remedy="write hf:MODEL",
                finding_id="kv.usage",
            )
        if self.block > 1 and kind != "hf":
            raise UsageError(
                f"tokens are fed together (--block {self.block}) to models of transformers only",
                remedy="leave out --block",
                finding_id="kv.usage",
            )

    def key(self) -> list[Any]:
        """What an equal run is known by."""
        size = (self.windows, self.length, self.mode, self.batch, self.block, self.fresh)
        return [self.spec, self.text, *size, self.calibration]

    def plan(self) -> Plan:
        """The windows to cut, as a plan of a comparison."""
        windows, text = self.windows + self.fresh, tuple(self.text)
        return Plan(self.spec, (self.spec,), text=text, windows=windows, length=self.length)


@dataclass(frozen=True)
class Work:
    """The measurements to come, and the time for them.

    Attributes:
        codecs: How many codecs are measured, or a function of the cache's shape that says so. Their
            time is reported when the model is open; 0: the caller reports it.
        least: Codecs that must fit into the budget; 0: all of them.
        together: Whether 16 tokens of a decode may be fed together if one at a time does not fit.
    """

    budget: Budget | None = None
    codecs: int | Callable[[CacheShape], int] = 0
    least: int = 0
    together: bool = False

    def on(self, engine: ScoringEngine) -> Work:
        """With the number of codecs, now that the model is open."""
        if not callable(self.codecs):
            return self
        if not isinstance(engine, HfScorer):
            return replace(self, codecs=0)
        return replace(self, codecs=self.codecs(cache_shape(engine.engine.model)))


@contextmanager
def open_evaluator(
    request: ModelOnText, work: Work = Work(), progress: Progress = NO_PROGRESS
) -> Iterator[CodecEvaluator]:
    """Load a model, cut the text, and check the calibration against both.

    The model is closed at the end.

    Args:
        request: With a budget in `work`, its windows are as many and as long as fit.
        work: What will be measured.
        progress: Where progress and expected times go.

    Raises:
        UsageError: The text has too few windows, or the command does not take the engine.
        OutOfTime: Not even `work.least` codecs fit into the budget.
        AssayError: A device runs out of memory.
    """
    request.check()
    known = read_calibration(Path(request.calibration)) if request.calibration else None
    begin_run(request.key())
    with memory_is_enough(label_of(request.spec)):
        engine = open_scorer(request.spec)
        try:
            work = work.on(engine)
            request, pace = _sized(request, engine, work)
            passages = _cut(request, engine, known)
            setup = ScoringSetup(request.spec, Mode(request.mode), request.batch, request.block)
            fitting = _fitting(request, engine, known)
            evaluator = CodecEvaluator(engine, setup, passages, fitting, progress)
            if work.codecs and not callable(work.codecs):
                evaluator.expect(work.codecs, work.budget, pace)
            yield evaluator
        finally:
            engine.close()


def _cut(request: ModelOnText, engine: ScoringEngine, known: Calibration | None) -> Passages:
    """The windows of the text, checked against model and calibration."""
    found, facts = plan_windows(request.plan(), engine.tokenizer)
    if isinstance(engine, HfScorer):
        check_positions(engine.engine.model, found)
        kept_layers(cache_shape(engine.engine.model), request.skip_layers)
    if known:
        known.check_text(facts, found)
    measured = min(request.windows, len(found))
    if len(found) - measured < request.fresh:
        raise UsageError(
            f"the text has {len(found)} windows, {request.windows + request.fresh} are needed",
            remedy="give more text, or fewer windows (--windows, --fresh)",
            finding_id="kv.usage",
        )
    return Passages(found[:measured], found[measured:], facts)


def _fitting(request: ModelOnText, engine: ScoringEngine, known: Calibration | None) -> Fitting:
    """What coders are fitted on: here for a model of transformers in this process."""
    path = request.calibration
    return Fitting(
        _layer_coders(engine, request.length, known) if isinstance(engine, HfScorer) else None,
        path,
        without_passages(known.provenance) if known else None,
        sha256(Path(path).read_bytes()).hexdigest() if path else None,
        _asked_shape(engine, request.length, path),
    )


LEAST_CODED = 256
"""Tokens of a passage: codecs keep the first and the recent tokens exact, of a shorter one perhaps
all.
"""
TOGETHER = 16
"""Tokens of a decode that are fed together where one at a time does not fit into a budget."""


def _sized(
    request: ModelOnText, engine: ScoringEngine, work: Work
) -> tuple[ModelOnText, Pace | None]:
    """The request with as many windows, as long, as fit into the budget; the pace if measured."""
    budget = work.budget
    if budget is None or budget.seconds is None:
        return request, None
    by_tokens = replace(request.plan(), path=path_of(request.mode).value, batch=request.batch)
    try:
        windows, length, pace = _that_fit(by_tokens, request.windows, engine, work)
    except OutOfTime:
        decode = request.mode == Mode.DECODE.value and request.spec.startswith("hf:")
        if not (work.together and decode) or request.block > 1:
            raise
        # Tokens that are fed together see the cache as if each came alone, in fewer passes of the
        # model.
        budget.too_small = False
        budget.left_out.clear()
        request = replace(request, block=TOGETHER)
        by_blocks = replace(by_tokens, path="chunked", chunk=TOGETHER)
        windows, length, pace = _that_fit(by_blocks, request.windows, engine, work)
        budget.leave_out(
            "feeding tokens one at a time", f"the rounding of it: {TOGETHER} are fed together"
        )
    return replace(request, windows=windows, length=length), pace


def _that_fit(
    plan: Plan, windows: int, engine: ScoringEngine, work: Work
) -> tuple[int, int, Pace | None]:
    """Windows and length that fit; those of an equal command before, so that it goes on from there,
    and then no pace.
    """
    budget, pace = work.budget or Budget(), None
    codecs = 0 if callable(work.codecs) else work.codecs
    least = work.least or codecs

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


def _asked_shape(
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
    """Shape of the cache and positions of a model; AssayError where the calibration is not its
    own.
    """
    known = read_calibration(Path(calibration)) if calibration else None
    return _layer_coders(scorer, length, known).shape, positions_of(scorer)


def _layer_coders(scorer: HfScorer, length: int, calibration: Calibration | None) -> LayerCoders:
    shape = cache_shape(scorer.engine.model)
    if calibration:
        calibration.check_model(shape)
        first = scorer.engine.model.get_decoder().layers[0].self_attn
        if (weight := getattr(getattr(first, "o_proj", None), "weight", None)) is not None:
            calibration.check_weights(weight)
    return LayerCoders(shape, Rotary(scorer.engine.model, length), calibration)
