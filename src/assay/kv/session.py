"""A loaded model with its windows, its coders' bench and its lab: what every command of the laboratory starts from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import Window
from assay.fidelity.plan import Plan
from assay.fidelity.reference import plan_windows
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


def engine_spec(model: str) -> str:
    """A model as an engine of transformers, whether or not it is written as one."""
    return model if model.startswith("hf:") else f"hf:{model}"


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
    """Load the model and cut the text; the calibration is checked against both. Everything is closed at the end."""
    spec = engine_spec(model)
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
