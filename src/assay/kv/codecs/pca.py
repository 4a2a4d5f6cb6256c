"""Transform coding of all KV heads of a token together, the family of KVTC (arXiv:2511.01815).

Linear transform in the metric of attention (`assay.kv.klt`), one step for all coefficients, and either

    coding=range  indices range-coded under calibrated laws (`pca_range`); `bits` is the calibrated mean a value
    coding=fixed  indices of fixed width, the widths found by dynamic programming (`pca_fixed`)

`step` > 0 sets the step itself, in units of the root mean square of the coefficients, instead of `bits`. With
`predict`, what the decoder already has (the layer below, or the keys) is first subtracted through a linear map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.errors import UsageError
from assay.kv import klt
from assay.kv.codec import BlockCoder, Codec, Samples, Site, Tables, need_table
from assay.kv.wrapper import inner_tables

if TYPE_CHECKING:
    pass

_SMALLEST = 0.12
"""Coefficients with less deviation than this many steps are practically always zero."""


@dataclass(frozen=True)
class Pca(Codec):
    """Needs samples. `rdo` weighs bits against squared steps when indices are chosen; 0 rounds to nearest."""

    name = "pca"
    summary = "KLT over all heads in the metric of attention, range-coded or of fixed widths"
    bits: float = 3.0
    step: float = 0.0
    coding: Literal["range", "fixed"] = "range"
    classes: int = 4
    rdo: float = 0.08
    predict: Literal["none", "below", "k"] = "none"

    def __post_init__(self) -> None:
        if not 0.05 <= self.bits <= 10 or self.step < 0 or not 1 <= self.classes <= 16 or self.rdo < 0:
            raise UsageError(
                f"{self}: bits is 0.05 to 10, classes 1 to 16, step and rdo not negative",
                finding_id="kv.spec",
            )
        if self.step and self.coding == "fixed":
            raise UsageError(f"{self}: step goes with coding=range only", finding_id="kv.spec")

    def fit(self, samples: Samples) -> BlockCoder:
        from assay.kv.codecs.pca_fixed import fit_fixed
        from assay.kv.codecs.pca_range import fit_range, step_for_bits

        rows = klt.sampled_rows(samples, str(self))
        predictor = None
        if self.predict != "none":
            if samples.side is None:
                raise UsageError(f"{self} needs side information with its samples", finding_id="kv.side")
            side = klt.rows_of(samples.side.float().cpu()[None])[0].double()
            predictor = klt.predictor(rows, side)
            rows = rows - predictor(side).double()
        found = klt.spectrum(rows, samples.joint_metric().cpu())
        if self.coding == "fixed":
            return fit_fixed(samples.site, found, rows, self.bits, predictor)
        unit = float(found.variances.mean().sqrt()) or 1.0
        settings = (self.classes, self.rdo, _SMALLEST)
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

    def restore(self, site: Site, tables: Tables) -> BlockCoder:
        import torch

        from assay.kv.codecs.pca_fixed import FixedCoder
        from assay.kv.codecs.pca_range import RangeCoder

        transform = klt.restore(site, tables, str(self))
        predictor = None
        if self.predict != "none":
            predictor = klt.Predictor(torch.from_numpy(need_table(tables, "predictor", str(self), site)))
        own = inner_tables(tables)
        if self.coding == "fixed":
            return FixedCoder(site, transform, predictor, own)
        return RangeCoder(site, transform, predictor, own, self.rdo)
