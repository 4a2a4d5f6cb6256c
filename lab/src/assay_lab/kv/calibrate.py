"""`assay kv calibrate`: one file of what codecs need to know of a model's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import ScoringEngine, Window
from assay.engines.vllm.spec import parse_vllm
from assay.environment import describe
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Metric, Report, Verdict
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.calibration import Calibration, passages, without_passages, write_calibration
from assay_lab.kv.capture import capture
from assay_lab.kv.evaluator import CodecEvaluator, Fitting, Passages, ScoringSetup
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.layer_sensitivity import measure_sensitivity
from assay_lab.kv.opening import ModelOnText, open_evaluator
from assay_lab.options import CalibrationPlan


def run_calibrate(plan: CalibrationPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Run the text through the model, and write one calibration file."""
    if plan.sensitivity and plan.model.startswith("vllm:"):
        raise plan.usage(
            "the sensitivity of layers is measured with transformers",
            "calibrate hf:MODEL; the file serves vLLM too",
        )
    if plan.model.startswith("vllm:") and (ranks := parse_vllm(plan.model).ranks) > 1:
        raise plan.usage(
            f"a calibration holds all heads of all layers, which {ranks} ranks share",
            "calibrate with one rank, or hf:MODEL; the file serves any number of ranks",
        )
    request = ModelOnText(plan.model, plan.text, plan.windows, plan.length, any_engine=True)
    with open_evaluator(request, progress=progress) as opened:
        windows, text = opened.windows, opened.text
        tensors, cache = captured(opened.engine, windows, plan, progress)
        if plan.sensitivity:
            tensors["sensitivity"] = measure_sensitivity(_probing(opened, plan, tensors))
        engine = opened.engine.describe()
    provenance = {
        "cache": cache,
        "engine": engine,
        "text": text,
        "windows": [w.sha256 for w in windows],
        "passages": passages(windows),
        "samples": int(tensors["positions"].numel()),
        "sensitivity_windows": plan.sensitivity,
        "environment": describe(),
    }
    write_calibration(plan.out, Calibration(tensors, provenance))
    size = plan.out.stat().st_size
    return Report(
        command="kv calibrate",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "out": str(plan.out), "plan": plan.facts()},
        results={**without_passages(provenance), "bytes": size, "windows": len(windows)},
        environment=describe(),
        headline=[
            Metric("calibrated on", f"{provenance['samples']:,} tokens of {len(windows)} windows"),
            Metric("file", f"{size / 2**20:.1f} MiB"),
        ],
        summary=f"give it to codecs with --calibration {plan.out}",
    )


def captured(
    engine: ScoringEngine,
    windows: Sequence[Window],
    plan: CalibrationPlan,
    progress: Progress = NO_PROGRESS,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors of the file and the shape of the cache, from either engine."""
    if isinstance(engine, HfScorer):
        shape = cache_shape(engine.engine.model)
        tensors = capture(
            engine, windows, shape, tokens=plan.tokens, batch=plan.batch, progress=progress
        )
        return tensors, shape.to_json()
    from assay_lab.kv.vllm.capture import capture_in_vllm

    return capture_in_vllm(engine, windows, tokens=plan.tokens, batch=plan.batch, progress=progress)


def _probing(
    opened: CodecEvaluator, plan: CalibrationPlan, tensors: dict[str, torch.Tensor]
) -> CodecEvaluator:
    """An evaluator on some of the windows, spread over all, whose coders are fitted to what was
    just captured.
    """
    windows = opened.windows
    some = windows[:: max(1, len(windows) // plan.sensitivity)][: plan.sensitivity]
    return CodecEvaluator(
        opened.engine,
        ScoringSetup(opened.setup.spec, Mode.INFORWARD, plan.batch),
        Passages(some),
        Fitting(
            replace(opened.layer_coders, calibration=Calibration(tensors, {})),
            about=["captured from", [w.sha256 for w in windows], plan.tokens],
        ),
        opened.progress,
    )
