"""Coefficients in codes of fixed width, which a kernel can read without decoding what comes
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay_lab.kv.codecs.base import Parts
from assay_lab.kv.codecs.fields import Field, join_fields, split_fields
from assay_lab.kv.codecs.samples import LayerStream, Tables
from assay_lab.kv.klt import Klt, Predictor, Spectrum
from assay_lab.kv.transform_coder import TransformCoder
from assay_lab.quantisation.levels import empirical_levels
from assay_lab.quantisation.nearest import nearest_level

SMALLEST = 0.12
"""Coefficients with less deviation than this many steps are practically always zero."""


# Coefficients in codes of fixed width, which a kernel can read without decoding what comes before.
#
# Each coefficient is divided by its calibrated deviation and gets the levels of an empirical
# Lloyd-Max quantiser of its width, 0 to 8 bits. Dynamic programming finds the widths with the least
# total error, as measured on the samples, for a budget of whole bits a token; where a step is given
# in place of a budget, each width is the one after which a bit saves less error than it does at
# that step.
#
# `gains=n` parts the coefficients into n groups of equal size and divides those of a token, over
# their deviations, by the largest of their group, which is stored in 8 bits: a few tokens (line
# breaks, delimiters) are far outside the levels of all the others, and their error would be
# most of the whole.

MAX_WIDTH = 8
GAIN_STEPS = 8
"""Gains of an octave: a gain is rounded up by at most 9 %."""
_GAIN_ZERO = 128
_FIT_TOKENS = 4096
_LEVEL_SAMPLES = 100_000


def fit_fixed(
    site: LayerStream,
    found: Spectrum,
    rows: torch.Tensor,
    step: float | None,
    bits: float,
    predictor: Predictor | None,
    groups: int = 0,
) -> FixedCoder:
    """Levels, deviations and widths from sampled rows [n, width], for a step or for so many bits a
    value, gains included.
    """
    largest = float(found.variances[0].sqrt()) or 1.0
    transform = found.with_step(largest, 0.0)
    c = transform.forward(rows[:: max(1, rows.shape[0] // _FIT_TOKENS)].float())
    z, gains, deviation = _scaled(c, groups)
    levels = [_fit_levels(z, 2**w) for w in range(1, MAX_WIDTH + 1)]
    cost = (
        np.stack(
            [
                ((z - _nearest(z, table)) * gains).square().mean(dim=0)
                for table in (torch.zeros(1), *levels)
            ],
            axis=1,
        )
        * deviation.square().numpy()[:, None]
    )
    if step is None:
        widths = allocate(cost, min(round(bits * site.width) - 8 * groups, MAX_WIDTH * z.shape[1]))
    else:
        # A uniform quantiser's error D = step² / 12 falls by 2 ln 2 · D for a bit.
        saved = 2 * np.log(2) * (step / largest) ** 2 / 12
        widths = (cost + saved * np.arange(MAX_WIDTH + 1)).argmin(axis=1)
    # Coefficients of equal width are together, and those of width 0 are left out.
    order = np.argsort(-widths, kind="stable")[: max(1, int((widths > 0).sum()))]
    if groups:
        # Groups are of what is left, and each width has the levels of its own coefficients.
        z, gains, deviation = _scaled(c[:, order], groups)
        for width in set(widths[order].tolist()) - {0}:
            levels[width - 1] = _fit_levels(z[:, widths[order] == width], 2**width)
    else:
        deviation = deviation[order]
    own: Tables = {
        "deviation": deviation.numpy().astype(np.float16),
        "widths": widths[order].astype(np.uint8),
        "levels": np.concatenate([table.numpy() for table in levels]).astype(np.float16),
    }
    if groups:
        own["gains"] = np.array([groups], dtype=np.uint8)
    return FixedCoder(site, transform.kept(order), predictor, own)


def _scaled(c: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coefficients [n, rank] over gains and deviations, gains [n, rank] or 1, and deviations
    [rank], as they are stored.
    """
    gains = torch.ones(1)
    for _ in range(
        3 if groups else 1
    ):  # gains follow from deviations, and these from what gains leave
        deviation = (c / gains).square().mean(dim=0).sqrt().clamp_min(2.0**-24).half().float()
        if groups:
            gains = gains_of(gain_codes(c / deviation, groups), c.shape[-1])
    return c / deviation / gains, gains, deviation


def _fit_levels(z: torch.Tensor, levels: int) -> torch.Tensor:
    order = np.random.Generator(np.random.PCG64(0)).permutation(z.numel())[:_LEVEL_SAMPLES]
    found = empirical_levels(z.numpy().ravel()[order], levels).astype(np.float16)
    return torch.from_numpy(found.astype(np.float32))


def _nearest(z: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return levels[nearest_level(z, levels).long()] if levels.numel() > 1 else levels


def gain_codes(z: torch.Tensor, groups: int) -> torch.Tensor:
    """Codes of gains, uint8 [..., groups], for coefficients [..., rank] over their deviations."""
    parts = [
        part.abs().amax(dim=-1) for part in torch.tensor_split(z, groups, dim=-1) if part.shape[-1]
    ]
    top = torch.stack(parts, dim=-1).clamp_min(2.0**-16)
    return (torch.log2(top) * GAIN_STEPS).ceil().add(_GAIN_ZERO).clamp(0, 255).to(torch.uint8)


def gains_of(codes: torch.Tensor, rank: int) -> torch.Tensor:
    """Gains [..., rank] of codes [..., groups]."""
    sizes = [len(part) for part in np.array_split(np.arange(rank), codes.shape[-1])]
    gains = torch.exp2((codes.float() - _GAIN_ZERO) / GAIN_STEPS)
    return gains.repeat_interleave(
        torch.tensor(sizes, device=codes.device), dim=-1, output_size=rank
    )


def allocate(cost: NDArray[Any], budget: int) -> NDArray[Any]:
    """Widths [channels] with the least Σ cost[channel, width] among those that sum to at most
    `budget` bits.

    Exact, by dynamic programming over channels and bits spent; `cost` is [channels, widths].
    """
    channels, options = cost.shape
    best = np.zeros(budget + 1)
    chosen = np.zeros((channels, budget + 1), dtype=np.int8)
    for i in range(channels):
        trials = np.full((options, budget + 1), np.inf)
        for w in range(min(options, budget + 1)):
            trials[w, w:] = best[: budget + 1 - w] + cost[i, w]
        chosen[i] = trials.argmin(axis=0)
        best = trials.min(axis=0)
    widths, left = np.zeros(channels, dtype=np.int64), budget
    for i in range(channels - 1, -1, -1):
        widths[i] = chosen[i, left]
        left -= int(widths[i])
    return widths


class FixedCoder(TransformCoder):
    """Codes: level indices [blocks, tokens, rank], and codes of gains [blocks, tokens, groups] if
    there are any.
    """

    def __init__(
        self, site: LayerStream, transform: Klt, predictor: Predictor | None, own: Tables
    ) -> None:
        super().__init__(site, transform, predictor, own)
        self._deviation = torch.from_numpy(own["deviation"].astype("float32"))
        self._groups = min(int(own["gains"][0]), self.rank) if "gains" in own else 0
        widths = own["widths"].tolist()
        self._spans = [
            (w, widths.index(w), widths.count(w)) for w in sorted(set(widths), reverse=True) if w
        ]
        flat = own["levels"].astype("float32")
        self._levels = {
            w: torch.from_numpy(flat[2**w - 2 : 2 ** (w + 1) - 2].copy()) for w, _, _ in self._spans
        }

    def to(self, device: torch.device) -> None:
        """Move deviations and levels."""
        self._deviation = self._deviation.to(device)
        self._levels = {width: levels.to(device) for width, levels in self._levels.items()}

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        if self._deviation.device != x.device:
            self.to(x.device)
        z = self.coefficients(x, predictors) / self._deviation
        gains = (gain_codes(z, self._groups),) if self._groups else ()
        for gain in gains:
            z = z / gains_of(gain, self.rank)
        codes = torch.zeros(z.shape, dtype=torch.uint8, device=z.device)
        for width, start, count in self._spans:
            part = z[..., start : start + count]
            codes[..., start : start + count] = nearest_level(part, self._levels[width])
        return (codes, *gains)

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        codes, *gains = parts
        z = torch.zeros(codes.shape, device=codes.device)
        for width, start, count in self._spans:
            part = codes[..., start : start + count].int()
            z[..., start : start + count] = self._levels[width].to(codes.device)[part]
        for gain in gains:
            z = z * gains_of(gain, self.rank)
        return self.tokens_of(z * self._deviation.to(codes.device), predictors)

    def pack(self, parts: Parts) -> list[bytes]:
        codes, *gains = parts
        spans = [codes[..., start : start + count] for _, start, count in self._spans]
        fields = self.layout(codes.shape[1])
        return join_fields(fields, [*spans, *gains]) if fields else [b""] * codes.shape[0]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        found = split_fields(self.layout(tokens), payloads)
        spans, gains = found[: len(self._spans)], found[len(self._spans) :]
        coded = sum(count for _, _, count in self._spans)
        rest = torch.zeros(
            len(payloads), tokens, self.rank - coded, dtype=torch.uint8
        )  # channels of no bits
        return (torch.cat([*spans, rest], dim=-1), *gains)

    def layout(self, tokens: int) -> list[Field]:
        gain = [Field((tokens, self._groups), 8)] if self._groups else []
        return [*(Field((tokens, count), width) for width, _, count in self._spans), *gain]
