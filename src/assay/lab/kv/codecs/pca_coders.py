"""What the two codings of `pca` share: rows of all heads through prediction and transform, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from assay.errors import UsageError
from assay.lab.kv.codec import BlockCoder, Parts, Site, Stage, Tables
from assay.lab.kv.klt import Klt, Predictor, Spectrum, rows_of
from assay.lab.kv.stream import join_fields, split_fields
from assay.lab.quant.levels import empirical_levels
from assay.lab.quant.packing import pack, packed_bytes, unpack

if TYPE_CHECKING:
    import numpy as np
    import torch


class TransformCoder(BlockCoder):
    """Blocks of tokens as coefficients [blocks, tokens, rank]."""

    def __init__(self, site: Site, transform: Klt, predictor: Predictor | None, own: Tables) -> None:
        super().__init__(site)
        self.transform = transform
        self._predictor = predictor
        self._own = own
        self._moved: dict[torch.device, tuple[Klt, Predictor | None]] = {}

    @property
    def rank(self) -> int:
        """Coefficients that are coded."""
        return self.transform.rank

    @property
    def tables(self) -> Tables:
        found = self.transform.tables()
        if self._predictor is not None:
            found["predictor"] = self._predictor.weight.numpy()
            found["predictor_scale"] = self._predictor.scale.numpy()
        found.update({f"inner.{name}": table for name, table in self._own.items()})
        found["analysis"] = self.transform.analysis.numpy()
        return found

    @property
    def table_bytes(self) -> int:
        """The encoder's `analysis` follows from the rest and the metric; no decoder holds it."""
        return super().table_bytes - int(self.tables["analysis"].nbytes)

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """transform: what its rank leaves out; quantisation: the rest. All heads share the coefficients."""
        import torch

        c = self.coefficients(x, side)
        rank = torch.full(x.shape[:2], float(self.rank), device=x.device)
        apart = self.apart(c)[:, None].expand_as(rank)
        values = c.flatten(1)[:, None].expand(-1, x.shape[1], -1)
        whole = self.dequantise(self.quantise(x, side), side)
        return [
            Stage("transform", self.tokens_of(c, side), values, {"rank": rank}),
            Stage("quantisation", whole, None, {"outliers": apart}),
        ]

    def apart(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Share of coefficients [blocks, tokens, rank] that are coded apart from the others, [blocks]."""
        return coefficients.new_zeros(coefficients.shape[0])

    def coefficients(self, x: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        """[blocks, heads, tokens, head_dim] → [blocks, tokens, rank]."""
        transform, predictor = self._at(x.device)
        rows = rows_of(x.float())
        if predictor is not None:
            rows = rows - predictor(rows_of(self._need(side)))
        return transform.forward(rows)

    def tokens_of(self, coefficients: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        """The other way round."""
        transform, predictor = self._at(coefficients.device)
        rows = transform.inverse(coefficients)
        if predictor is not None:
            rows = rows + predictor(rows_of(self._need(side)).to(rows.device))
        return rows.unflatten(-1, (self.site.heads, self.site.head_dim)).transpose(1, 2)

    def _at(self, device: torch.device) -> tuple[Klt, Predictor | None]:
        """Transform and predictor on a device, moved there once: every token that is decoded needs them."""
        if device not in self._moved:
            self._moved[device] = (
                self.transform.to(device),
                self._predictor.to(device) if self._predictor is not None else None,
            )
        return self._moved[device]

    def _need(self, side: torch.Tensor | None) -> torch.Tensor:
        if side is None:
            raise UsageError(
                "a codec that predicts needs what was decoded of the streams it predicts from (side)",
                remedy="use pca with predict=none where only one stream is at hand",
                finding_id="kv.side",
            )
        return side


# -----------------------------------------------------------------------------
# Coefficients in codes of fixed width, which a kernel can read without decoding what comes before.
#
# Each coefficient is divided by its calibrated deviation and gets the levels of an empirical Lloyd-Max quantiser of its
# width, 0 to 8 bits. Dynamic programming finds the widths with the least total error, as measured on the samples, for a
# budget of whole bits a token; where a step is given in place of a budget, each width is the one after which a bit saves
# less error than it does at that step.

MAX_WIDTH = 8
_FIT_TOKENS = 4096
_LEVEL_SAMPLES = 100_000


def fit_fixed(
    site: Site,
    found: Spectrum,
    rows: torch.Tensor,
    step: float | None,
    bits: float,
    predictor: Predictor | None,
) -> FixedCoder:
    """Levels, deviations and widths from sampled rows [n, width], for a step or for so many bits a value."""
    import numpy as np
    import torch

    largest = float(found.variances[0].sqrt()) or 1.0
    transform = found.with_step(largest, 0.0)
    c = transform.forward(rows[:: max(1, rows.shape[0] // _FIT_TOKENS)].float())
    deviation = c.square().mean(dim=0).sqrt().clamp_min(2.0**-24).half().float()
    z = (c / deviation).numpy()
    order = np.random.Generator(np.random.PCG64(0)).permutation(z.size)[:_LEVEL_SAMPLES]
    pooled = z.ravel()[order]
    levels = [empirical_levels(pooled, 2**w).astype(np.float16) for w in range(1, MAX_WIDTH + 1)]
    errors = [(z**2).mean(axis=0)]
    for table in levels:
        near = _nearest(torch.from_numpy(z), torch.from_numpy(table.astype(np.float32)))
        errors.append(((z - table.astype(np.float32)[near.numpy()]) ** 2).mean(axis=0))
    cost = np.stack(errors, axis=1) * deviation.numpy()[:, None] ** 2
    if step is None:
        widths = allocate(cost, min(round(bits * site.width), MAX_WIDTH * z.shape[1]))
    else:
        # A uniform quantiser's error D = step² / 12 falls by 2 ln 2 · D for a bit.
        saved = 2 * np.log(2) * (step / largest) ** 2 / 12
        widths = (cost + saved * np.arange(MAX_WIDTH + 1)).argmin(axis=1)
    # Coefficients of equal width stand together, and those of width 0 are left out.
    order = np.argsort(-widths, kind="stable")[: max(1, int((widths > 0).sum()))]
    own: Tables = {
        "deviation": deviation.numpy()[order].astype(np.float16),
        "widths": widths[order].astype(np.uint8),
        "levels": np.concatenate(levels),
    }
    return FixedCoder(site, transform.kept(order), predictor, own)


def allocate(cost: np.ndarray[Any, Any], budget: int) -> np.ndarray[Any, Any]:
    """Widths [channels] with the least Σ cost[channel, width] among those that sum to at most `budget` bits.

    Exact, by dynamic programming over channels and bits spent; `cost` is [channels, widths].
    """
    import numpy as np

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
    """Codes: level indices [blocks, tokens, rank]."""

    def __init__(self, site: Site, transform: Klt, predictor: Predictor | None, own: Tables) -> None:
        import torch

        super().__init__(site, transform, predictor, own)
        self._deviation = torch.from_numpy(own["deviation"].astype("float32"))
        widths = own["widths"].tolist()
        self._spans = [(w, widths.index(w), widths.count(w)) for w in sorted(set(widths), reverse=True) if w]
        flat = own["levels"].astype("float32")
        self._levels = {
            w: torch.from_numpy(flat[2**w - 2 : 2 ** (w + 1) - 2].copy()) for w, _, _ in self._spans
        }

    def to(self, device: torch.device) -> None:
        """Move deviations and levels."""
        self._deviation = self._deviation.to(device)
        self._levels = {width: levels.to(device) for width, levels in self._levels.items()}

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        import torch

        if self._deviation.device != x.device:
            self.to(x.device)
        z = self.coefficients(x, side) / self._deviation
        codes = torch.zeros(z.shape, dtype=torch.uint8, device=z.device)
        for width, start, count in self._spans:
            part = z[..., start : start + count]
            codes[..., start : start + count] = _nearest(part, self._levels[width])
        return (codes,)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        (codes,) = parts
        z = torch.zeros(codes.shape, device=codes.device)
        for width, start, count in self._spans:
            part = codes[..., start : start + count].int()
            z[..., start : start + count] = self._levels[width].to(codes.device)[part]
        return self.tokens_of(z * self._deviation.to(codes.device), side)

    def pack(self, parts: Parts) -> list[bytes]:
        (codes,) = parts
        fields = [pack(codes[..., start : start + count].flatten(1), w) for w, start, count in self._spans]
        return join_fields(fields) if fields else [b""] * codes.shape[0]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        import torch

        sizes = [packed_bytes(tokens * count, w) for w, _, count in self._spans]
        codes = torch.zeros(len(payloads), tokens, self.rank, dtype=torch.uint8)
        for (w, start, count), field in zip(self._spans, split_fields(payloads, sizes), strict=True):
            codes[..., start : start + count] = unpack(field, w, tokens * count).unflatten(1, (tokens, count))
        return (codes,)


def _nearest(z: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    import torch

    found = torch.bucketize(z.contiguous(), (levels[1:] + levels[:-1]) / 2, out_int32=True)
    return found.to(torch.uint8)
