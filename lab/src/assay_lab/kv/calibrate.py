"""`assay kv calibrate`: learn from text what codecs need to know of a model's keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from assay.engines.hf.scorer import HfScorer, window_states
from assay.engines.scoring import Engagement, ScoreJob, ScoringEngine, Window
from assay.engines.vllm.spec import parse_vllm
from assay.environment import describe
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Metric, Report, Verdict
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.calibration import (
    Calibration,
    Sampler,
    kept_per_window,
    passages,
    without_passages,
    write_calibration,
)
from assay_lab.kv.evaluator import CodecEvaluator, Fitting, Passages, ScoringSetup
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.observed_cache import observed_cache
from assay_lab.kv.opening import ModelOnText, open_evaluator
from assay_lab.kv.sensitivity import alone, count_alone
from assay_lab.kv.spec import parse_spec
from assay_lab.kv.stream_coder import FittedCodec
from assay_lab.kv.transforms import Rotary
from assay_lab.options import CalibrationPlan

# Keys, values and queries of real text, captured from a model of transformers.


class Capture(Sampler):
    """A hook of transformers that keeps some keys (before RoPE) and values of every window, and
    sums moments of queries.
    """

    passes = 1

    def __init__(self, shape: CacheShape, length: int, keep: int, seed: int = 0) -> None:
        super().__init__(shape, length, keep, seed)
        self._rotary: Rotary | None = None
        self._model: Any = None

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Hooks on the queries' projection (and norm, where there is one); undone on leaving."""
        self._model, self._rotary = model, Rotary(model, self.length)
        handles = []
        for index, layer in enumerate(model.get_decoder().layers):
            attention = getattr(layer, "self_attn", None)
            module = getattr(attention, "q_norm", None) or getattr(attention, "q_proj", None)
            if module is None:
                raise AssayError(
                    f"{type(model).__name__} has no query projection in layer {index} that could be"
                    " watched",
                    finding_id="kv.unsupported",
                    remedy="codecs that need calibration take Llama, Qwen and Gemma models",
                )
            handles.append(module.register_forward_hook(self._watch(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def new_cache(self, batch: int, index: int) -> Any:
        """A cache that shows its keys and values as they come."""
        self.begin(batch)
        return observed_cache(self._model, self._on_update)

    def after_prefix(self, cache: Any) -> None:
        """Nothing to do: all is prefill."""

    def engagement(self) -> Any:
        """A capture is no codec."""
        return Engagement(fires=len(self.kept))

    def _on_update(
        self, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rotary is None or position:
            raise ValueError("calibration text goes through in one pass")
        self.on_states(layer, "k", self._rotary.at(layer, 0, keys.shape[-2]).remove(keys))
        self.on_states(layer, "v", values)
        return keys, values

    def _watch(self, layer: int) -> Any:
        heads, width = self.shape.query_heads, self.shape.head_dim

        def watch(_: Any, __: Any, output: torch.Tensor) -> None:
            self.on_queries(layer, queries_of(output, heads, width, self.length - 1))

        return watch


def queries_of(output: torch.Tensor, heads: int, width: int, tokens: int) -> torch.Tensor:
    """Queries [B, H, T, d] from what their projection or norm put out.

    Projections put out [B, T, H·d]; norms [B, T, H, d] (Qwen3) or [B, H, T, d] (Gemma 3).
    """
    if output.ndim == 3:
        output = output.unflatten(-1, (heads, width))
    by_token = tuple(output.shape[1:3]) == (tokens, heads)
    return output.transpose(1, 2) if by_token else output


def capture(
    scorer: Any,
    windows: Sequence[Window],
    shape: CacheShape,
    *,
    tokens: int,
    batch: int,
    progress: Progress = NO_PROGRESS,
) -> dict[str, torch.Tensor]:
    """Run the windows through the model and return the tensors of a calibration of about `tokens`
    samples.
    """
    length = len(windows[0].tokens)
    hook = Capture(shape, length, kept_per_window(tokens, len(windows), length))
    model = scorer.engine.model
    with (
        hook.attach(model),
        progress("capturing keys, values and queries", len(windows)) as advance,
    ):
        for _ in window_states(model, windows, ScoreJob(batch=batch), hook):
            advance()
    decoder = model.get_decoder()
    output = {index: layer.self_attn.o_proj.weight for index, layer in enumerate(decoder.layers)}
    return hook.tensors(Rotary(model, length), output)


# What an error in each layer and stream costs the model, measured: the sensitivity in a calibration
# file.
#
# Every layer and stream is coded alone, coarsely, while the calibration text goes through the model
# (*inforward*), as in `assay kv attribute`. Its KL over the mean error e M eᵀ that the coder makes
# of the calibration's samples is the sensitivity: nats for an error of 1 in that metric. For small
# errors KL grows in proportion to them, and single KLs nearly add up, so sensitivity · e M eᵀ is
# the cost of an error wherever it is made.

PROBE = "prerope+sinks(n=4)+pca(step=0.5, classes=1, rdo=0)"
"""Coarse, so that rounding in bf16 is small beside what it loses."""
_TOKENS = 2048


def measure_sensitivity(lab: CodecEvaluator) -> torch.Tensor:
    """Nats for an error of 1 a token in the metric of each stream, float32 [layers, 2] of keys and
    values.
    """
    spec, layer_coders = parse_spec(PROBE), lab.layer_coders
    found = torch.zeros(layer_coders.shape.layers, 2)
    lab.expect(count_alone(layer_coders.shape, spec, "stream"))
    for part in alone(lab, spec, "stream"):
        layer, stream = part["layer"], part["stream"]
        coder = layer_coders.fit_all(lambda _, s: spec.of(s), [layer], stream).by_stream[
            layer, stream
        ]
        found[layer, "kv".index(stream)] = part["kld"]["value"] / _mean_error(layer_coders, coder)
    return found


def _mean_error(layer_coders: LayerCoders, coder: FittedCodec) -> float:
    """Mean of e M eᵀ over samples behind the sinks."""
    if layer_coders.calibration is None:
        raise ValueError("errors are measured on the samples of a calibration")
    samples = layer_coders.calibration.samples(coder.site, before_rope=True, rotary=None)
    x = samples.need_x("the sensitivity")
    if samples.positions is not None:
        x = x[:, samples.positions >= coder.exact_first]
    x = x[:, :: max(1, x.shape[1] // _TOKENS)]
    e = (x - coder.reconstruct(x)).transpose(0, 1).flatten(1).double()
    return float(((e @ samples.joint_metric()) * e).sum(dim=1).mean())


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
