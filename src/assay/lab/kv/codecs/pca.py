"""Transform coding of all KV heads of a token together, the family of KVTC (arXiv:2511.01815).

Linear transform in the metric of attention (`assay.lab.kv.klt`), one step for all coefficients, and either

    coding=range  indices range-coded under calibrated laws (`pca_range`); `bits` is the calibrated mean a value
    coding=fixed  indices of fixed width, the widths found by dynamic programming (`pca_fixed`)

`step` > 0 sets the step itself, in units of the root mean square of the coefficients, instead of `bits`. With
`weights=measured` its unit is √nat: a step costs the model step² / 12 nats a coefficient in whatever layer and stream,
as measured by the calibration, so one step for all of them spends bits where they save most. `coding=fixed` then takes
the widths whose last bits save what they save there.

`trellis` (of so many states) codes the indices of two quantisers that take turns (`assay.lab.quant.trellis`): for `coding=range`,
4 to 6 % fewer bits at the same error, and more time to encode.

`predict` first subtracts a linear map of what the decoder has of the same token:

    below  the same stream of the layer below        k    the keys of the layer, for its values
    all    keys and values of the layer below, and the keys of the layer for its values
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from assay.errors import AssayError, UsageError
from assay.lab.kv import klt
from assay.lab.kv.codec import BlockCoder, Codec, Samples, Site, Tables, inner_tables, need_table
from assay.lab.quant.trellis import STATES

_SMALLEST = 0.12
"""Coefficients with less deviation than this many steps are practically always zero."""


@dataclass(frozen=True)
class Pca(Codec):
    """Needs samples, twice as many tokens as channels to predict from. `rdo` weighs bits against squared steps when indices are chosen; 0 rounds to nearest."""

    name = "pca"
    summary = "KLT over all heads in the metric of attention, range-coded or of fixed widths"
    bits: float = 3.0
    step: float = 0.0
    coding: Literal["range", "fixed"] = "range"
    classes: int = 4
    rdo: float = 0.08
    trellis: int = 0
    predict: Literal["none", "below", "k", "all"] = "none"
    weights: Literal["none", "measured"] = "none"

    def __post_init__(self) -> None:
        if not 0.05 <= self.bits <= 10 or self.step < 0 or not 1 <= self.classes <= 16 or self.rdo < 0:
            raise UsageError(
                f"{self}: bits is 0.05 to 10, classes 1 to 16, step and rdo not negative",
                finding_id="kv.spec",
            )
        if self.trellis not in (0, *STATES) or (self.trellis and self.coding == "fixed"):
            raise UsageError(
                f"{self}: a trellis has {', '.join(map(str, STATES))} states, and needs coding=range",
                remedy="leave trellis out, or write pca(trellis=8)",
                finding_id="kv.spec",
            )
        if self.weights == "measured" and not self.step:
            raise UsageError(
                f"{self}: weights=measured shares one step among all layers",
                remedy="give it, in √nat: pca(step=0.002, weights=measured)",
                finding_id="kv.spec",
            )

    def sides(self, site: Site) -> tuple[tuple[int, str], ...]:
        below = {"below": (site.stream,), "all": ("k", "v")}.get(self.predict, ())
        own = ((site.layer, "k"),) if self.predict in ("k", "all") and site.stream == "v" else ()
        return (*((site.layer - 1, s) for s in below if site.layer), *own)

    def fit(self, samples: Samples) -> BlockCoder:
        from assay.lab.kv.codecs.pca_coders import fit_fixed
        from assay.lab.kv.codecs.pca_entropy import RangeSettings, fit_range, step_for_bits

        rows = klt.sampled_rows(samples, str(self))
        predictor = None
        if samples.side is not None and self.predict != "none":
            side = klt.rows_of(samples.side.float().cpu()[None])[0].double()
            self._check_enough(samples.site, *side.shape)
            predictor = klt.predictor(rows, side)
            rows = rows - predictor(side).double()
        found = klt.spectrum(rows, samples.joint_metric().cpu())
        unit = float(found.variances.mean().sqrt()) or 1.0
        if self.weights == "measured":
            unit = (found.scale * samples.need_sensitivity(str(self))) ** -0.5
        if self.coding == "fixed":
            return fit_fixed(samples.site, found, rows, self.step * unit or None, self.bits, predictor)
        settings = RangeSettings(self.classes, self.rdo, _SMALLEST, self.trellis)
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

    def _check_enough(self, site: Site, tokens: int, channels: int) -> None:
        """Refuse a prediction that would fit its samples and nothing else."""
        if tokens < 2 * channels:
            raise AssayError(
                f"{self} predicts layer {site.layer}, stream {site.stream}, from {channels} channels and "
                f"the calibration has {tokens} tokens behind the sinks: at least {2 * channels} are needed",
                finding_id="kv.few_samples",
                remedy="take predict=none, or calibrate on more text: `assay kv calibrate --tokens 4096`",
            )

    def restore(self, site: Site, tables: Tables) -> BlockCoder:
        import torch

        from assay.lab.kv.codecs.pca_coders import FixedCoder
        from assay.lab.kv.codecs.pca_entropy import RangeCoder

        transform = klt.restore(site, tables, str(self))
        predictor = None
        if "predictor" in tables:
            scale = need_table(tables, "predictor_scale", str(self), site)
            predictor = klt.Predictor(torch.from_numpy(tables["predictor"]), torch.from_numpy(scale))
        own = inner_tables(tables)
        if self.coding == "fixed":
            return FixedCoder(site, transform, predictor, own)
        return RangeCoder(site, transform, predictor, own, self.rdo, self.trellis)
