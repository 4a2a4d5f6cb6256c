"""The codec `pca`: transform coding of all KV heads of a token, the family of KVTC
(arXiv:2511.01815).

A linear transform in the metric of attention (`assay_lab.kv.klt`), one step for all coefficients,
and either

    coding=range   indices range-coded under calibrated distributions (`pca_entropy`); `bits` is the
                   calibrated mean a value
    coding=fixed   indices of fixed width (`pca_fixed`)

`step` > 0 sets the step itself, in units of the root mean square of the coefficients, instead of
`bits`. With `weights=measured` its unit is √nat: a step costs the model step² / 12 nats a
coefficient in every layer and stream, as measured by the calibration, so one step for all of them
spends bits where they save most. `coding=fixed` then takes the widths whose last bits save what
they save there.

`trellis` (of so many states) codes the indices of two quantisers that take turns
(`assay_lab.trellis`): for `coding=range`, 4 to 6 % fewer bits at the same error, and more time to
encode.

`predict` first subtracts a linear map of what the decoder has of the same token:

    below  the same stream of the layer below
    k      the keys of the layer, for its values
    all    keys and values of the layer below, and the keys of the layer for its values
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch

from assay.errors import AssayError, UsageError
from assay_lab.kv.codecs.base import BlockCoder, Capabilities, Codec
from assay_lab.kv.codecs.pca_entropy import RangeCoder
from assay_lab.kv.codecs.pca_fixed import SMALLEST, FixedCoder, fit_fixed
from assay_lab.kv.codecs.pca_search import RangeSettings, fit_range, step_for_bits
from assay_lab.kv.codecs.placement import inner_tables
from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables, need_table
from assay_lab.kv.klt import Predictor, predictor_of, restored, rows_of, sampled_rows, spectrum
from assay_lab.trellis import STATES


@dataclass(frozen=True)
class Pca(Codec):
    """Needs samples, twice as many tokens as channels to predict from.

    `rdo` weighs bits against squared steps when indices are chosen; 0 rounds to nearest.
    """

    name = "pca"
    summary = "KLT over all heads in the metric of attention, range-coded or of fixed widths"
    instead: ClassVar[dict[str, str]] = {"step": "bits"}
    bits: float = 3.0
    step: float = 0.0
    coding: Literal["range", "fixed"] = "range"
    classes: int = 4
    rdo: float = 0.08
    trellis: int = 0
    predict: Literal["none", "below", "k", "all"] = "none"
    weights: Literal["none", "measured"] = "none"
    gains: int = 0

    def __post_init__(self) -> None:
        if (
            not 0.05 <= self.bits <= 10
            or not (0 <= self.step < np.inf and 0 <= self.rdo < np.inf)
            or not 1 <= self.classes <= 16
        ):
            raise UsageError(
                f"{self}: bits is 0.05 to 10, classes 1 to 16, step and rdo finite and not"
                " negative",
                finding_id="kv.spec",
            )
        if self.trellis not in (0, *STATES):
            raise UsageError(
                f"{self}: a trellis has {', '.join(map(str, STATES))} states, not {self.trellis}",
                remedy="write trellis=8, or leave it out",
                finding_id="kv.spec",
            )
        if self.trellis and self.coding == "fixed":
            raise UsageError(
                f"{self}: coding=fixed codes every number alone, a trellis codes it by those"
                " before it",
                remedy="leave out trellis, or write coding=range",
                finding_id="kv.spec",
            )
        if not 0 <= self.gains <= 8 or (self.gains and self.coding != "fixed"):
            raise UsageError(
                f"{self}: 0 to 8 gains a token go before levels of a fixed number of bits",
                remedy="write gains=2 beside coding=fixed, or leave it out",
                finding_id="kv.spec",
            )
        if self.weights == "measured" and not self.step:
            raise UsageError(
                f"{self}: weights=measured shares one step among all layers",
                remedy="give it, in √nat: pca(step=0.002, weights=measured)",
                finding_id="kv.spec",
            )

    def predictor_keys(self, site: LayerStream) -> tuple[tuple[int, str], ...]:
        below = {"below": (site.stream,), "all": ("k", "v")}.get(self.predict, ())
        own = ((site.layer, "k"),) if self.predict in ("k", "all") and site.stream == "v" else ()
        return (*((site.layer - 1, s) for s in below if site.layer), *own)

    @property
    def capabilities(self) -> Capabilities:
        if self.coding == "fixed":
            return replace(super().capabilities, token_by_token=True)
        why = (
            "with a trellis each number hangs on those before it, which four states at once cannot"
            " follow"
        )
        return Capabilities(True, entropy_coded=True, not_in_tier=why if self.trellis else "")

    def fit(self, samples: Samples) -> BlockCoder:
        rows = sampled_rows(samples, str(self))
        predictor = None
        if samples.predictors is not None and self.predict != "none":
            predictors = rows_of(samples.predictors.float().cpu()[None])[0].double()
            self._check_enough(samples.site, *predictors.shape)
            predictor = predictor_of(rows, predictors)
            rows = rows - predictor(predictors).double()
        found = spectrum(rows, samples.joint_metric().cpu())
        unit = float(found.variances.mean().sqrt()) or 1.0
        if self.weights == "measured":
            unit = (found.scale * samples.need_sensitivity(str(self))) ** -0.5
        if self.coding == "fixed":
            step = self.step * unit or None
            return fit_fixed(samples.site, found, rows, step, self.bits, predictor, self.gains)
        settings = RangeSettings(self.classes, self.rdo, SMALLEST, self.trellis)
        if self.step:
            return fit_range(samples.site, found, rows, self.step * unit, settings, predictor)
        # A quick estimate finds the step; what it misses (classes, rdo) is measured and aimed off.
        aim = self.bits
        for _ in range(3):
            step = step_for_bits(found, rows, aim, unit)
            coder = fit_range(samples.site, found, rows, step, settings, predictor)
            excess = coder.calibrated_bits - self.bits
            if abs(excess) < 0.01 * self.bits:
                break
            aim = max(0.02, aim - excess)
        return coder

    def _check_enough(self, site: LayerStream, tokens: int, channels: int) -> None:
        """Refuse a prediction that would fit its samples and nothing else."""
        if tokens < 2 * channels:
            raise AssayError(
                f"{self} predicts layer {site.layer}, stream {site.stream}, from {channels}"
                f" channels and the calibration has {tokens} tokens behind the sinks: at least"
                f" {2 * channels} are needed",
                finding_id="kv.few_samples",
                remedy=(
                    "take predict=none, or calibrate on more text: `assay kv calibrate --tokens"
                    " 4096`"
                ),
            )

    def restore(self, site: LayerStream, tables: Tables) -> BlockCoder:
        transform = restored(site, tables, str(self))
        predictor = None
        if "predictor" in tables:
            scale = need_table(tables, "predictor_scale", str(self), site)
            predictor = Predictor(torch.from_numpy(tables["predictor"]), torch.from_numpy(scale))
        own = inner_tables(tables)
        if self.coding == "fixed":
            return FixedCoder(site, transform, predictor, own)
        return RangeCoder(site, transform, predictor, own, self.rdo, self.trellis)
