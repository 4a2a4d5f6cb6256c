"""A loaded model with its windows: what every command of the laboratory starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.engines.hf.scorer import HfScorer
from assay.engines.opening import open_scorer
from assay.engines.scoring import ScoringEngine, Window
from assay.engines.server.endpoint import without_credentials
from assay.errors import UsageError
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
from assay.kv.calibration import read_calibration
from assay.kv.hook import Mode
from assay.kv.lab import Lab
from assay.kv.model import cache_shape
from assay.kv.rope import Rotary
from assay.kv.setup import Bench, open_calibration


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
    return model if model.startswith(("hf:", "vllm:")) else f"hf:{model}"


@contextmanager
def scoring(
    model: str, text: Sequence[str], *, windows: int, length: int, calibration: str | None
) -> Iterator[Scoring]:
    """Open an engine and cut the text, which must not have been calibrated on. It is closed at the end."""
    known = read_calibration(Path(calibration)) if calibration else None
    spec = engine_spec(model)
    engine = open_scorer(spec)
    try:
        plan = Plan(spec, (spec,), tuple(text), windows=windows, length=length)
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
        plan = Plan(spec, (spec,), tuple(text), windows=windows + fresh, length=length)
        found, facts = plan_windows(plan, scorer.tokenizer)
        shape = cache_shape(scorer.engine.model)
        known = open_calibration(calibration, shape, facts, [w.sha256 for w in found])
        bench = Bench(shape, Rotary(scorer.engine.model, length), known)
        measured = min(windows, len(found))
        yield Session(scorer, bench, found[:measured], found[measured:], facts)
    finally:
        scorer.close()
