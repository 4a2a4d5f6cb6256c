"""What a codec may learn from at its place in the model: one stream of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from assay.errors import AssayError

Tables: TypeAlias = dict[str, np.ndarray[Any, Any]]
"""What a coder learnt, by name: what a calibration file keeps and what is billed as tables."""


@dataclass(frozen=True)
class LayerStream:
    """One stream of one layer: where a codec is put."""

    stream: str
    layer: int
    layers: int
    heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Values of one token over all KV heads."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Samples:
    """What a codec may learn from, of one site. Leave out what is not known.

    `x` [heads, tokens, head_dim]: keys or values, as the codec will see them (before RoPE where it
    is put there). `positions` [tokens]: position of each in its window, so that sinks can be left
    out. `metric` [heads, head_dim, head_dim], or [width, width] over all heads: the error that
    counts is e M eᵀ. For keys the second moment of the queries that read them
    (`assay_lab.kv.calibration`), for values the Gram matrix of the output projection. `predictors`
    [predictor heads, tokens, predictor head_dim]: what the decoder has before it decodes these
    tokens, the heads of the streams `predictor_keys` (layer, stream) one after the other, keys
    before RoPE. `sensitivity`: KL of the model in nats for an error of e M eᵀ = 1 a token in this
    stream alone. `levels` by bits [2^bits]: ready levels for unit residuals, in place of those that
    samples would give.
    """

    site: LayerStream
    x: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    metric: torch.Tensor | None = None
    predictors: torch.Tensor | None = None
    predictor_keys: tuple[tuple[int, str], ...] = ()
    sensitivity: float | None = None
    levels: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def need_x(self, who: str) -> torch.Tensor:
        """The sampled tokens as float32; AssayError where there are none."""
        if self.x is None or self.x.shape[1] == 0:
            raise _missing(who, self.site, "sample keys and values")
        return self.x.float()

    def need_metric(self, who: str) -> torch.Tensor:
        """The metric per head [heads, head_dim, head_dim], float64; AssayError where there is
        none.
        """
        if self.metric is None:
            raise _missing(who, self.site, "second moments of queries")
        if self.metric.ndim == 3:
            return self.metric.double()
        h, d = self.site.heads, self.site.head_dim
        blocks = self.metric.double().reshape(h, d, h, d)
        return torch.stack([blocks[i, :, i] for i in range(h)])

    def need_sensitivity(self, who: str) -> float:
        """The measured sensitivity; AssayError where it was not measured."""
        if self.sensitivity is None or self.sensitivity <= 0:
            raise AssayError(
                f"{who} needs the measured sensitivity of layer {self.site.layer}, stream"
                f" {self.site.stream}",
                finding_id="kv.no_calibration",
                remedy="make the calibration with `assay kv calibrate --sensitivity 8`",
            )
        return self.sensitivity

    def joint_metric(self) -> torch.Tensor:
        """The metric over all heads [width, width], float64; the identity where none is known."""
        if self.metric is None:
            return torch.eye(self.site.width, dtype=torch.float64)
        metric = self.metric.double()
        return torch.block_diag(*metric) if metric.ndim == 3 else metric


def _missing(who: str, site: LayerStream, what: str) -> AssayError:
    return AssayError(
        f"the codec {who} needs a calibration with {what} of layer {site.layer}, stream"
        f" {site.stream}",
        finding_id="kv.no_calibration",
        remedy=(
            "give one by --calibration; this makes it: `assay kv calibrate MODEL --text FILE --out"
            " FILE`"
        ),
    )


def need_table(tables: Mapping[str, Any], name: str, who: str, site: LayerStream) -> Any:
    """A table by name; AssayError where a calibration file lacks it."""
    if name not in tables:
        raise _missing(who, site, f"the table {name!r}")
    return tables[name]
