"""The diagnosis of one stream (K or V) of one layer, as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from assay_lab.kv.diagnose.capture import Decoded, Traffic
from assay_lab.kv.diagnose.metrics import output_error, score_error
from assay_lab.kv.diagnose.stages import (
    Distribution,
    StageError,
    coded,
    distribution,
    outlier_share,
    relative_mse,
    span,
    stage_errors,
)

if TYPE_CHECKING:
    import torch

    from assay_lab.kv.stream_coder import FittedCodec


def diagnose_stream(
    fitted: FittedCodec, traffic: Traffic, decoded: Decoded, layer: int, stream: str
) -> dict[str, Any]:
    """`results.layers[]` of one stream: figures over all heads, then those of each, then the
    stages.

    `decoded` gives what the codec predicts from, and takes what came back.
    """
    keys = traffic.rotated(layer, traffic.keys[layer])
    if stream == "k":
        x = traffic.keys[layer].float() if fitted.before_rope else keys
    else:
        x = traffic.values[layer].float()
    predictors = decoded.predictors(fitted)
    back = coded(fitted, x, predictors)
    decoded.put((layer, stream), fitted, back)
    lo, hi = span(fitted, x.shape[2])
    inside, outside = x[:, :, lo:hi], back[:, :, lo:hi]
    mse, far = relative_mse(inside, outside), outlier_share(inside)
    heads: list[dict[str, Any]] = [
        {
            "head": h,
            "relative_mse": float(mse[h]),
            "outlier_share": float(far[h]),
            "residual": to_json(distribution((outside - inside)[:, h])),
        }
        for h in range(x.shape[1])
    ]
    for head, found in zip(
        heads, _attention(traffic, layer, stream, keys, x, back, fitted), strict=True
    ):
        head["attention"] = found
    stages = stage_errors(fitted, x, predictors)
    return {
        "layer": layer,
        "stream": stream,
        "coded_tokens": hi - lo,
        "relative_mse": _mean(heads, "relative_mse"),
        "outlier_share": _mean(heads, "outlier_share"),
        "attention": {
            name: sum(h["attention"][name] for h in heads) / len(heads)
            for name in heads[0]["attention"]
        },
        "residual": to_json(distribution(outside - inside)),
        "bits_per_value": (
            8
            * len(fitted.encode(x[0], None if predictors is None else predictors[0]))
            / x[0].numel()
        ),
        "rank": next((s.figures["rank"] for s in stages if "rank" in s.figures), None),
        "coded_apart": next(
            (s.figures["outliers"] for s in stages if "outliers" in s.figures), None
        ),
        "stages": [_stage(s) for s in stages],
        "heads": heads,
    }


def _attention(
    traffic: Traffic,
    layer: int,
    stream: str,
    keys: torch.Tensor,
    x: torch.Tensor,
    back: torch.Tensor,
    fitted: FittedCodec,
) -> list[dict[str, float]]:
    reads = traffic.reads(layer)
    if stream == "v":
        lost = output_error(reads, keys, x, back)
        return [{"output_error": float(value)} for value in lost]
    # Rotated again only where it was coded before RoPE, so that an exact cache differs by nothing.
    found = score_error(reads, keys, traffic.rotated(layer, back) if fitted.before_rope else back)
    return [
        {"score_error": float(rms), "attention_kl": float(kl)}
        for rms, kl in zip(found.rms, found.kl, strict=True)
    ]


def to_json(found: Distribution | None) -> dict[str, Any] | None:
    """Plain JSON."""
    return None if found is None else asdict(found)


def _stage(stage: StageError) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "relative_mse": stage.relative_mse,
        "added": stage.added,
        "values": to_json(stage.values),
        **stage.figures,
    }


def _mean(heads: list[dict[str, Any]], name: str) -> float:
    return float(sum(h[name] for h in heads)) / len(heads)
