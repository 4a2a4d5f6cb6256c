"""The codec of packed pages: its tables, the bytes of a page, and a reference in plain torch.

Every KV head of a token is coded by itself, so that attention reads tokens in any order. With R(p) the rotation of
position p, k the key after RoPE and v the value:

    keys     r = k − R(p) m      (m: the mean of keys before RoPE)         values   r = v − m
    y = r A                      the KLT in the metric of attention, of variance 1 on the calibration
    y ≈ g · (n − 8 + t / 4)      n 4 bits; t 2 bits more for the first `wide` channels, 0 for the others; g fp16

A = L U Λ^(−½) with the metric M = L Lᵀ and Lᵀ Σ L = U Λ Uᵀ, as in `assay.lab.kv.klt`, and r ≈ y S with S = A⁻¹. Nothing
is turned back while pages are read:

    q · k  = g (q Sᵀ) · (n − 8 + t / 4) + q · R(p) m          q Sᵀ once a query
    q · R(p) m = Σⱼ cos(p ωⱼ) (q₁m₁ + q₂m₂)ⱼ + sin(p ωⱼ) (q₂m₁ − q₁m₂)ⱼ      one product with a table of cosines
    Σ w v  = (Σ w g (n − 8 + t / 4)) S + m                      S once a query

A page of T tokens holds for each head, one after the other: n of keys [T, d/2] bytes (channel j in the low half of byte j,
channel j + d/2 in the high one), n of values, t of keys [T, wide/4] (channel c in bits 2 (c mod 4) of byte c div 4), t of
values, g of keys [T] and g of values [T]: d + wide / 2 + 4 bytes a token and head, where bf16 takes 4 d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from assay.lab.kv.calibration import Calibration, averaged
from assay.lab.kv.codec import CacheShape, Site
from assay.lab.kv.rope import Rotary

CANDIDATES = (1.0, 0.85, 0.7, 0.6)
"""Ranges that are tried for each vector, in parts of its largest coefficient; the one with the least error is kept."""
SPAN = 32768
"""Positions over which tables are averaged."""


@dataclass(frozen=True)
class Layout:
    """Where the codes of a page lie. `wide` channels have 6 bits in place of 4."""

    heads: int
    head_dim: int
    wide: int
    block: int

    @property
    def slot(self) -> int:
        """Bytes of a token and head."""
        return self.head_dim + self.wide // 2 + 4

    @property
    def ratio(self) -> float:
        """bf16 bytes over bytes of pages."""
        return 4 * self.head_dim / self.slot

    def offsets(self) -> dict[str, tuple[int, int]]:
        """First byte within a head's part of a page, and bytes a token, of each field."""
        half, more, found, at = self.head_dim // 2, self.wide // 4, {}, 0
        for name, size in (("nk", half), ("nv", half), ("tk", more), ("tv", more), ("gk", 2), ("gv", 2)):
            found[name] = (at, size)
            at += size * self.block
        return found


def layout_of(heads: int, head_dim: int, block: int) -> Layout:
    """The layout of a model: a quarter of the channels is wide."""
    return Layout(heads, head_dim, head_dim // 4, block)


@dataclass(frozen=True)
class StreamTables:
    """Tables of keys or values of one layer: mean [h, d], analysis and synthesis [h, d, d], weight [h, d] of errors."""

    mean: torch.Tensor
    analysis: torch.Tensor
    synthesis: torch.Tensor
    weight: torch.Tensor

    def to(self, device: torch.device | str) -> StreamTables:
        """The same on a device, contiguous as kernels take it."""
        return StreamTables(
            *(t.to(device).contiguous() for t in (self.mean, self.analysis, self.synthesis, self.weight))
        )


def trigonometry(inv_freq: torch.Tensor, scaling: float, positions: int) -> torch.Tensor:
    """[positions, d]: cosines, then sines, float32."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inv_freq.double().cpu()
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * scaling).float()


def rotated_mean(mean: torch.Tensor, cosines: torch.Tensor) -> torch.Tensor:
    """R(p) m for means [h, d] and rows [n, d] of `trigonometry`: [n, h, d], float32."""
    half = mean.shape[1] // 2
    first, second = mean[None, :, :half].float(), mean[None, :, half:].float()
    cos, sin = cosines[:, None, :half].float(), cosines[:, None, half:].float()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def fit_stream(calibration: Calibration, shape: CacheShape, layer: int, stream: str, rotary: Rotary) -> StreamTables:
    """Tables of one stream of a layer, from sampled tokens and the metric of the calibration."""
    samples = calibration.samples(
        Site(stream, layer, shape.layers, shape.kv_heads, shape.head_dim), before_rope=True, rotary=None
    )
    x, metric = samples.need_x("packed pages"), samples.need_metric("packed pages")
    positions = samples.positions if samples.positions is not None else torch.arange(x.shape[1])
    mean = x[:, positions >= 4].mean(dim=1).half().float()
    r = x - mean[:, None]
    if stream == "k":
        # After RoPE a pair of channels points anywhere: spread the samples over all positions.
        places = torch.linspace(0, rotary.length - 1, r.shape[1]).round().long()
        whole = rotary.at(layer, 0, rotary.length)
        r = type(whole)(whole.cos.cpu()[places], whole.sin.cpu()[places]).apply(r)
        metric = averaged(metric.float(), rotary, layer, rotary.length).double()
    found = [_klt(r[h].double(), metric[h]) for h in range(shape.kv_heads)]
    analysis, synthesis, weight = (torch.stack(parts).float() for parts in zip(*found, strict=True))
    return StreamTables(mean, analysis, synthesis, weight)


def _klt(
    rows: torch.Tensor, metric: torch.Tensor, ridge: float = 1e-3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A and S [d, d] and the variances [d] of one head, float64, from rows [n, d]; the largest variance first."""
    eye = torch.eye(metric.shape[0], dtype=torch.float64)
    lower = torch.linalg.cholesky(metric / metric.diagonal().mean() + ridge * eye)
    white = rows @ lower
    values, vectors = torch.linalg.eigh(white.T @ white / len(rows))
    values, vectors = values.flip(0), vectors.flip(1)
    size = values.clamp_min(float(values[0]) * 1e-10 + 1e-30).sqrt()
    synthesis = torch.linalg.solve_triangular(lower, (vectors * size).T, upper=False, left=False)
    return lower @ vectors / size, synthesis, size.square() / size.square().mean()


def together(ends: list[int], lengths: list[int], first: int, room: int) -> list[tuple[int, int, bool]]:
    """Which requests from `first` on are read at once, as (first, end, all fresh): at most `room` tokens, or a single one.

    `ends` [requests + 1] are the rows of their queries, `lengths` [requests] the tokens of each with those that it had before.
    """
    found: list[tuple[int, int, bool]] = []
    held = 0
    for i in range(first, len(lengths)):
        fresh = lengths[i] == ends[i + 1] - ends[i]
        held += lengths[i]
        if found and found[-1][2] == fresh and (fresh or held <= room):
            found[-1] = (found[-1][0], i + 1, fresh)
        else:
            found.append((i, i + 1, fresh))
            held = lengths[i]
    return found


# The codec in plain torch: what kernels are held against, and what the laboratory measures.


def quantise(y: torch.Tensor, weight: torch.Tensor, wide: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0 … 63 (uint8 [..., d], of 4 bits those divisible by 4) and g [...] of coefficients [..., d]."""
    top = y.abs().amax(dim=-1).clamp_min(1e-6) / 7
    best_error = torch.full_like(top, torch.inf)
    best, best_g = torch.zeros_like(y, dtype=torch.uint8), torch.zeros_like(top)
    for part in CANDIDATES:
        g = (top * part).half().float().clamp_min(2.0**-24)
        codes = _codes(y / g[..., None], wide)
        error = ((_values(codes) * g[..., None] - y).square() * weight).sum(dim=-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_g = torch.where(better, g, best_g)
        best = torch.where(better[..., None], codes, best)
    return best, best_g.half()


def _codes(z: torch.Tensor, wide: int) -> torch.Tensor:
    fine = (z[..., :wide] * 4 + 32.5).floor().clamp(0, 63)
    coarse = (z[..., wide:] + 8.5).floor().clamp(0, 15) * 4
    return torch.cat([fine, coarse], dim=-1).to(torch.uint8)


def _values(codes: torch.Tensor) -> torch.Tensor:
    return codes.float() / 4 - 8


def reconstruct(r: torch.Tensor, tables: StreamTables, wide: int) -> torch.Tensor:
    """What residuals [n, h, d] become, float32."""
    y = torch.einsum("nhd,hde->nhe", r.float(), tables.analysis)
    codes, g = quantise(y, tables.weight, wide)
    return torch.einsum("nhe,hed->nhd", _values(codes) * g.float()[..., None], tables.synthesis)


def write(
    pages: torch.Tensor, layout: Layout, slots: torch.Tensor, stream: str, r: torch.Tensor, t: StreamTables
) -> None:
    """Code residuals [n, h, d] into slots [n] of pages [blocks, bytes]; a slot below 0 is left out."""
    y = torch.einsum("nhd,hde->nhe", r.float(), t.analysis)
    codes, g = quantise(y, t.weight, layout.wide)
    half = layout.head_dim // 2
    nibbles, fine = codes >> 2, (codes & 3)[..., : layout.wide].unflatten(-1, (-1, 4))
    shifts = torch.arange(0, 8, 2)
    fields = {
        "n": nibbles[..., :half] | nibbles[..., half:] << 4,
        "t": (fine.int() << shifts).sum(dim=-1).to(torch.uint8),
        "g": g[..., None].contiguous().view(torch.uint8),
    }
    for name, value in fields.items():
        start, size = layout.offsets()[name + stream]
        for n, slot in enumerate(slots.tolist()):
            if slot >= 0:
                for head in range(layout.heads):
                    at = head * layout.block * layout.slot + start + slot % layout.block * size
                    pages[slot // layout.block, at : at + size] = value[n, head]


def read(pages: torch.Tensor, layout: Layout, slots: torch.Tensor, stream: str, t: StreamTables) -> torch.Tensor:
    """Residuals [n, h, d], float32, of slots [n]."""
    found = {}
    for name in "ntg":
        start, size = layout.offsets()[name + stream]
        base = torch.arange(layout.heads) * layout.block * layout.slot + start
        at = base[None, :, None] + (slots % layout.block)[:, None, None] * size + torch.arange(size)
        found[name] = pages[(slots // layout.block)[:, None, None], at]
    nibbles = torch.cat([found["n"] & 15, found["n"] >> 4], dim=-1).float() - 8
    fine = (found["t"][..., None] >> torch.arange(0, 8, 2)) & 3
    nibbles[..., : layout.wide] += fine.flatten(-2).float() / 4
    g = found["g"].contiguous().view(torch.float16).float()
    return torch.einsum("nhe,hed->nhd", nibbles * g, t.synthesis)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last queries [n, H, d] over keys and values [m, h, d]: [n, H, d], float32."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
    late = torch.arange(m)[None, :] > torch.arange(m - n, m)[:, None]
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(late, -math.inf).softmax(-1), v.float())
