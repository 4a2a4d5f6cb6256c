"""What an error in each layer and stream costs the model, measured: the sensitivity in a calibration file.

Every layer and stream is coded alone, coarsely, while the calibration text goes through the model (*inforward*), as in
`assay kv attribute`. Its KL over the mean error e M eᵀ that the coder makes of the calibration's samples is the
sensitivity: nats for an error of 1 in that metric. For small errors KL grows in proportion to them, and single KLs
nearly add up, so sensitivity · e M eᵀ is the cost of an error wherever it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Window
from assay.kv.attribution import AttributionPlan, alone
from assay.kv.hook import Mode
from assay.kv.ledger import Ledger
from assay.kv.session import Session
from assay.kv.spec import parse_spec
from assay.progress import NO_PROGRESS, Progress

if TYPE_CHECKING:
    import torch

    from assay.kv.fitted import FittedCodec
    from assay.kv.setup import Bench

PROBE = "prerope+sinks(n=4)+pca(step=0.5, classes=1, rdo=0)"
"""Coarse, so that rounding in bf16 is small beside what it loses."""
_TOKENS = 2048


def measure_sensitivity(
    scorer: Any, bench: Bench, windows: Sequence[Window], *, batch: int, progress: Progress = NO_PROGRESS
) -> torch.Tensor:
    """Nats for an error of 1 a token in the metric of each stream, float32 [layers, 2] of keys and values."""
    import torch

    spec = parse_spec(PROBE)
    opened = Session(scorer, bench, windows, (), {})
    plan = AttributionPlan("", PROBE, windows=len(windows), length=len(windows[0].tokens), batch=batch)
    ledger = Ledger({"sensitivity": [w.sha256 for w in windows], "model": bench.shape.to_json()})
    found = alone(opened, opened.lab(windows, Mode.INFORWARD, batch), spec, plan, ledger, progress)
    ledger.forget()
    costs = torch.zeros(bench.shape.layers, 2)
    for part in found:
        layer, stream = part["layer"], part["stream"]
        coder = bench.fit_all(lambda _, s: spec.of(s), [layer], stream).by_stream[layer, stream]
        costs[layer, "kv".index(stream)] = part["kld"]["value"] / _mean_error(bench, coder)
    return costs


def _mean_error(bench: Bench, coder: FittedCodec) -> float:
    """Mean of e M eᵀ over samples behind the sinks."""
    if bench.calibration is None:
        raise ValueError("errors are measured on the samples of a calibration")
    samples = bench.calibration.samples(coder.site, before_rope=True, rotary=None)
    x = samples.need_x("the sensitivity")
    if samples.positions is not None:
        x = x[:, samples.positions >= coder.exact_first]
    x = x[:, :: max(1, x.shape[1] // _TOKENS)]
    e = (x - coder.reconstruct(x)).transpose(0, 1).flatten(1).double()
    return float(((e @ samples.joint_metric()) * e).sum(dim=1).mean())
