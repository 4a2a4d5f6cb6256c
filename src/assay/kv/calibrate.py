"""`assay kv calibrate`: learn from text what codecs need to know of a model's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import ScoringEngine, Window
from assay.environment import describe
from assay.errors import UsageError
from assay.kv.calibration import Calibration, write_calibration
from assay.kv.capture import capture
from assay.kv.costs import measure_sensitivity
from assay.kv.model import cache_shape
from assay.kv.rope import Rotary
from assay.kv.session import scoring
from assay.kv.setup import Bench
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Metric, Report, Verdict

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CalibrationPlan:
    """What is calibrated: `tokens` sampled tokens out of `windows` windows of the text.

    On `sensitivity` of the windows, spread over all, the model's KL is measured with each layer and stream coded alone.
    """

    model: str
    text: tuple[str, ...]
    windows: int = 32
    length: int = 1024
    batch: int = 4
    tokens: int = 4096
    sensitivity: int = 0

    def __post_init__(self) -> None:
        if not self.text:
            raise UsageError(
                "calibration needs text that is never evaluated",
                remedy="name it with --text",
                finding_id="kv.usage",
            )
        if self.tokens < 256:
            raise UsageError(f"256 tokens or more are needed, got {self.tokens}", finding_id="kv.usage")
        if not 0 <= self.sensitivity <= self.windows:
            raise UsageError(
                f"the sensitivity cannot be measured on {self.sensitivity} of {self.windows} windows",
                remedy="give --sensitivity a number up to --windows",
                finding_id="kv.usage",
            )
        if self.sensitivity and self.model.startswith("vllm:"):
            raise UsageError(
                "the sensitivity of layers is measured with transformers",
                remedy="calibrate hf:MODEL; the file serves vLLM too",
                finding_id="kv.usage",
            )


def run_calibrate(plan: CalibrationPlan, out: Path, progress: Progress = NO_PROGRESS) -> Report:
    """Run the text through the model, and write one calibration file."""
    with scoring(plan.model, plan.text, windows=plan.windows, length=plan.length, calibration=None) as opened:
        windows, text = opened.windows, opened.text
        tensors, cache = _captured(opened.engine, windows, plan, progress)
        if plan.sensitivity:
            tensors["sensitivity"] = _sensitivity(opened.engine, windows, plan, tensors, progress)
        engine = opened.engine.describe()
    provenance = {
        "cache": cache,
        "engine": engine,
        "text": text,
        "windows": [w.sha256 for w in windows],
        "samples": int(tensors["positions"].numel()),
        "sensitivity_windows": plan.sensitivity,
        "environment": describe(),
    }
    write_calibration(out, Calibration(tensors, provenance))
    size = out.stat().st_size
    return Report(
        command="kv calibrate",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "out": str(out), "plan": asdict(plan)},
        results={**provenance, "bytes": size, "windows": len(windows)},
        environment=describe(),
        headline=[
            Metric("calibrated on", f"{provenance['samples']:,} tokens of {len(windows)} windows"),
            Metric("file", f"{size / 2**20:.1f} MiB"),
        ],
        summary=f"give it to codecs with --calibration {out}",
    )


def _captured(
    engine: ScoringEngine, windows: Sequence[Window], plan: CalibrationPlan, progress: Progress
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors of the file and the shape of the cache, from either engine."""
    if isinstance(engine, HfScorer):
        shape = cache_shape(engine.engine.model)
        tensors = capture(engine, windows, shape, tokens=plan.tokens, batch=plan.batch, progress=progress)
        return tensors, shape.to_json()
    from assay.kv.in_vllm.capture import capture_in_vllm

    return capture_in_vllm(engine, windows, tokens=plan.tokens, batch=plan.batch, progress=progress)


def _sensitivity(
    engine: Any,
    windows: Sequence[Window],
    plan: CalibrationPlan,
    tensors: dict[str, torch.Tensor],
    progress: Progress,
) -> torch.Tensor:
    model = engine.engine.model
    bench = Bench(cache_shape(model), Rotary(model, plan.length), Calibration(tensors, {}))
    chosen = windows[:: max(1, len(windows) // plan.sensitivity)][: plan.sensitivity]
    return measure_sensitivity(engine, bench, chosen, batch=plan.batch, progress=progress)
