"""What an error in each layer and stream costs the model, measured: the sensitivity of a
calibration.

Every layer and stream is coded alone, coarsely, while the calibration text goes through the model
(*inforward*), as in `assay kv attribute`. Its KL over the mean error e M eᵀ that the coder makes
of the calibration's samples is the sensitivity: nats for an error of 1 in that metric. For small
errors KL grows in proportion to them, and single KLs nearly add up, so sensitivity · e M eᵀ is
the cost of an error wherever it is made.
"""

from __future__ import annotations

import torch

from assay_lab.kv.attribute import alone, count_alone
from assay_lab.kv.evaluator import CodecEvaluator
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.spec import parse_spec
from assay_lab.kv.stream_coder import FittedCodec

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
