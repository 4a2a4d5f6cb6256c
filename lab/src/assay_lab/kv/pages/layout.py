"""The codec of packed pages: its tables, the bytes of a page, and a reference in plain torch.

Every KV head of a token is coded by itself, so that attention reads tokens in any order. With R(p)
the rotation of position p, k the key after RoPE and v the value:

    keys     r = k − R(p) m      (m: the mean of keys before RoPE)         values   r = v − m z = r
    A / g                  the KLT in the metric of attention, each channel over a step of its own;
    g fp16 r ≈ g (n + ½ − 2^(b−1)) S    n = ⌊z⌋ + 2^(b−1), of b = 4 bits or, in the first `wide`
    quarters of the channels, 6

The first FIRST tokens of a request, on which attention rests, have a mean of their own for each
position, and two bits more where the layout has room (`finer`). A = L U Λ^(−½) / Δ with the metric
M = L Lᵀ and Lᵀ Σ L = U Λ Uᵀ, as in `assay_lab.kv.klt`; Δ is the best step of a uniform
quantiser of b bits for a normal variable, and S = A⁻¹. Of a key's mean those `PAIRS` pairs of
channels are taken off in which it is largest. Nothing is turned back while pages are read. With T
the rows of S for each digit, n = 4 hi + lo where b is 6:

    q · k  = g (q Tᵀ) · (n + ½ − 2^(b−1)) + q · R(p) m          q Tᵀ once a query q · R(p) m = Σⱼ
    cos(p ωⱼ) (q₁m₁ + q₂m₂)ⱼ + sin(p ωⱼ) (q₂m₁ − q₁m₂)ⱼ      one product with a table of cosines Σ w
    v  = (Σ w g (n + ½ − 2^(b−1))) T + m                      T once a query

A page of T tokens holds for each head, one after the other, with w = d/4 words of 16 bits a token:
words of keys [T, w] (word c has channels c, c + w, c + 2w and c + 3w, the first in its lowest four
bits: of channels with 6 bits the upper four), words of values [T, w]; the lower two bits of wide
channels, of keys [T, e] and of values [e, T] words, e = w/8 for each wide quarter; g of keys [T]
and g of values [T]; where there is a finer part, two bits more for each channel of the page's first
FIRST tokens, of which only the page at the beginning of a request makes use, [FIRST, d/8] words. Of
16 such channels c the bits are in words 2 (c div 16) + c mod 2 at 2 (c mod 16 div 2). That is d + 4
bytes, d/16 for each wide quarter and d/T for each finer part a token and head, where bf16 takes 4
d.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.calibration import Calibration
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.sampler import averaged

CANDIDATES = tuple((100 - 9 * i) / 100 for i in range(6))
"""Ranges that are tried for each vector, in parts of the one that holds all coefficients; that with
the least error is kept.
"""
SPAN = 32768
"""Positions over which tables are averaged."""
FIRST = 4
"""Tokens of a request that have a mean of their own for their position."""
PAIRS = {64: 32, 128: 32}
"""Pairs of channels whose mean is taken off keys, by head_dim."""
WIDE = {64: (1, 1), 128: (1, 1)}
"""Quarters of the channels of keys and of values that have 6 bits, by head_dim."""
FINER = {64: (0, 1), 128: (1, 1)}
"""Whether the first tokens' keys and values have two bits more, by head_dim."""
STEP = {4: 0.3352, 6: 0.1041}
"""The best step of a uniform quantiser of b bits for a normal variable (Max 1960)."""


@dataclass(frozen=True)
class Layout:
    """Places of the codes of a page. `wide`: quarters of the channels of keys and of values with 6
    bits in place of 4; `finer`: 1 where the first tokens' have two bits more."""

    heads: int
    head_dim: int
    wide: tuple[int, int]
    finer: tuple[int, int]
    block: int

    @property
    def words(self) -> int:
        """Words of 16 bits of a token, each of four channels."""
        return self.head_dim // 4

    @property
    def slot(self) -> int:
        """Bytes of a token and head."""
        more = FIRST * self.head_dim // 4 * sum(self.finer)
        return self.head_dim + 4 + self.words // 4 * sum(self.wide) - -more // self.block

    @property
    def ratio(self) -> float:
        """bf16 bytes over bytes of pages."""
        return 4 * self.head_dim / self.slot

    def bits(self, stream: str) -> torch.Tensor:
        """Of each channel [d]."""
        wide = self.wide["kv".index(stream)] * self.words
        return torch.tensor([6] * wide + [4] * (self.head_dim - wide))

    def offsets(self) -> dict[str, int]:
        """First byte of each field within a head's part of a page: words, their lower bits (`e`),
        gains, the finer part (`f`).
        """
        found, at = {}, 0
        extra = [self.words // 4 * n for n in self.wide]
        for name, size in zip(
            ("wk", "wv", "ek", "ev", "gk", "gv"), (*[2 * self.words] * 2, *extra, 2, 2), strict=True
        ):
            found[name] = at
            at += size * self.block
        for stream, finer in zip("kv", self.finer, strict=True):
            found["f" + stream] = at
            at += FIRST * self.head_dim // 4 * finer
        return found


def layout_of(heads: int, head_dim: int, block: int) -> Layout:
    """The layout of a model."""
    return Layout(heads, head_dim, WIDE[head_dim], FINER[head_dim], block)


@dataclass(frozen=True)
class StreamTables:
    """Tables of keys or values of one layer: mean [h, d], first [h, FIRST, d], A and S [h, d, d],
    weight [h, d] of errors in steps.

    The means `first` of keys are those after RoPE, that of all tokens is before it.
    """

    mean: torch.Tensor
    first: torch.Tensor
    analysis: torch.Tensor
    synthesis: torch.Tensor
    weight: torch.Tensor

    def to(self, device: torch.device | str) -> StreamTables:
        """The same on a device, contiguous as kernels take it."""
        return StreamTables(*(getattr(self, f.name).to(device).contiguous() for f in fields(self)))


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


def means(
    t: StreamTables, stream: str, positions: torch.Tensor, cosines: torch.Tensor
) -> torch.Tensor:
    """What is taken off keys or values at `positions` [n]: [n, h, d], float32; `cosines` are rows
    of `trigonometry` for them.
    """
    usual = (
        rotated_mean(t.mean, cosines)
        if stream == "k"
        else t.mean.float().expand(len(positions), *t.mean.shape)
    )
    own = t.first.float().transpose(0, 1)[positions.clamp_max(FIRST - 1)]
    return torch.where((positions < FIRST)[:, None, None], own, usual)


def fit_stream(
    calibration: Calibration, shape: CacheShape, layer: int, stream: str, rotary: Rotary
) -> StreamTables:
    """Tables of one stream of a layer, from sampled tokens and the metric of the calibration."""
    samples = calibration.samples(
        LayerStream(stream, layer, shape.layers, shape.kv_heads, shape.head_dim),
        before_rope=True,
        rotary=None,
    )
    x, metric = samples.need_x("packed pages"), samples.need_metric("packed pages")
    positions = samples.positions if samples.positions is not None else torch.arange(x.shape[1])
    later = positions >= FIRST
    mean = x[:, later].mean(dim=1).half().float()
    at = [positions == p for p in range(FIRST)]
    first = (
        torch.stack([x[:, here].mean(dim=1) if here.any() else mean for here in at], dim=1)
        .half()
        .float()
    )
    if stream == "k":
        mean = _largest(mean, metric.diagonal(dim1=1, dim2=2).float(), PAIRS[shape.head_dim])
    r = x[:, later] - mean[:, None]
    if stream == "k":
        # After RoPE a pair of channels points anywhere: spread the samples over all positions.
        places = torch.linspace(0, rotary.length - 1, r.shape[1]).round().long()
        whole = rotary.at(layer, 0, rotary.length)
        cos, sin = whole.cos.cpu(), whole.sin.cpu()
        r = type(whole)(cos[places], sin[places]).apply(r)
        first = type(whole)(cos[:FIRST], sin[:FIRST]).apply(first)
        metric = averaged(metric.float(), rotary, layer, rotary.length).double()
    step = torch.tensor(
        [STEP[int(b)] for b in layout_of(shape.kv_heads, shape.head_dim, 1).bits(stream)]
    )
    found = [_klt(r[h].double(), metric[h]) for h in range(shape.kv_heads)]
    analysis, synthesis, weight = (torch.stack(parts).float() for parts in zip(*found, strict=True))
    weight = weight * step.square()
    return StreamTables(
        mean,
        first,
        analysis / step,
        synthesis * step[:, None],
        weight / weight.mean(dim=1, keepdim=True),
    )


def _largest(mean: torch.Tensor, cost: torch.Tensor, pairs: int) -> torch.Tensor:
    """The mean [h, d] in those pairs of channels where it weighs most, 0 elsewhere."""
    half = mean.shape[1] // 2
    energy = (mean.square() * cost).unflatten(1, (2, half)).sum(dim=1)
    keep = torch.zeros_like(energy, dtype=torch.bool).scatter(
        1, energy.topk(min(pairs, half), dim=1).indices, True
    )
    return torch.where(torch.cat([keep, keep], dim=1), mean, torch.zeros(()))


def _klt(
    rows: torch.Tensor, metric: torch.Tensor, ridge: float = 1e-3
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A and S [d, d] and the variances [d] of one head, float64, from rows [n, d]; the largest
    variance first.
    """
    eye = torch.eye(metric.shape[0], dtype=torch.float64)
    lower = torch.linalg.cholesky(metric / metric.diagonal().mean() + ridge * eye)
    white = rows @ lower
    values, vectors = torch.linalg.eigh(white.T @ white / len(rows))
    values, vectors = values.flip(0), vectors.flip(1)
    size = values.clamp_min(float(values[0]) * 1e-10 + 1e-30).sqrt()
    synthesis = torch.linalg.solve_triangular(lower, (vectors * size).T, upper=False, left=False)
    return lower @ vectors / size, synthesis, size.square() / size.square().mean()


def together(
    ends: list[int], lengths: list[int], first: int, room: int
) -> list[tuple[int, int, bool]]:
    """Which requests from `first` on are read at once, as (first, end, all fresh): at most `room`
    tokens, or a single one.

    `ends` [requests + 1] are the rows of their queries, `lengths` [requests] the tokens of each
    with those that it had before.
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


# The codec in plain torch: what kernels are compared with.


def quantise(
    z: torch.Tensor, weight: torch.Tensor, bits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0 … 2^bits − 1 (uint8 [..., d]) and g [...] of coefficients in steps [..., d]."""
    half = 2.0 ** (bits - 1)
    top = (z.abs() / half).amax(dim=-1).clamp_min(1e-6)
    best_error = torch.full_like(top, torch.inf)
    best, best_g = torch.zeros_like(z, dtype=torch.uint8), torch.zeros_like(top)
    for part in CANDIDATES:
        g = (top * part).half().float().clamp_min(2.0**-24)
        codes = (z / g[..., None] + half).floor().clamp_min(0).minimum(2 * half - 1)
        error = (((codes + 0.5 - half) * g[..., None] - z).square() * weight).sum(dim=-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_g = torch.where(better, g, best_g)
        best = torch.where(better[..., None], codes.to(torch.uint8), best)
    return best, best_g.half()


def _coded(
    r: torch.Tensor, t: StreamTables, layout: Layout, stream: str, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and g of residuals [n, h, d] at positions [n], and the parts [n, 1, 1] of a step that
    the codes are: 1, or 4 where finer.
    """
    parts = (1 + 3 * layout.finer["kv".index(stream)] * (positions < FIRST))[:, None, None]
    z = torch.einsum("nhd,hde->nhe", r.float(), t.analysis) * parts
    return *quantise(z, t.weight, layout.bits(stream).to(r.device) + parts.log2()), parts


def _values(
    codes: torch.Tensor, g: torch.Tensor, parts: torch.Tensor, bits: torch.Tensor, t: StreamTables
) -> torch.Tensor:
    """Residuals [n, h, d] of codes."""
    z = (codes.float() + 0.5) / parts - 2.0 ** (bits.to(codes.device) - 1)
    return torch.einsum("nhe,hed->nhd", z * g.float()[..., None], t.synthesis)


def reconstruct(
    r: torch.Tensor, t: StreamTables, layout: Layout, stream: str, positions: torch.Tensor
) -> torch.Tensor:
    """What residuals [n, h, d] at positions [n] become, float32."""
    codes, g, parts = _coded(r, t, layout, stream, positions)
    return _values(codes, g, parts, layout.bits(stream), t)


def _fields(layout: Layout, stream: str, slots: torch.Tensor) -> dict[str, torch.Tensor]:
    """Bytes [n, heads, size] of each field of a token within its page: its words, lower bits, gain,
    and finer part.
    """
    place, start = slots % layout.block, layout.offsets()
    extra, finer = (
        layout.words // 8 * layout.wide["kv".index(stream)],
        layout.finer["kv".index(stream)],
    )
    word = torch.arange(extra)
    lower = place[:, None] * extra + word if stream == "k" else word * layout.block + place[:, None]
    sizes = {
        "w": place[:, None] * layout.words + torch.arange(layout.words),
        "e": lower,
        "g": place[:, None],
    }
    if finer:
        sizes["f"] = place[:, None] * (layout.head_dim // 8) + torch.arange(layout.head_dim // 8)
    heads = torch.arange(layout.heads)[:, None] * layout.block * layout.slot
    return {
        name: (
            start[name + stream] + heads + (2 * at[..., None] + torch.arange(2)).flatten(1)[:, None]
        )
        for name, at in sizes.items()
    }


def _packed(twos: torch.Tensor) -> torch.Tensor:
    """Words [..., d/8] of two bits a channel [..., d]."""
    return (
        (twos.int().unflatten(-1, (-1, 8, 2)) << torch.arange(0, 16, 2)[:, None])
        .sum(-2)
        .to(torch.int16)
        .flatten(-2)
    )


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    return (words.int().unflatten(-1, (-1, 1, 2)) >> torch.arange(0, 16, 2)[:, None] & 3).flatten(
        -3
    )


def write(
    pages: torch.Tensor,
    layout: Layout,
    slots: torch.Tensor,
    stream: str,
    r: torch.Tensor,
    t: StreamTables,
    positions: torch.Tensor,
) -> None:
    """Code residuals [n, h, d] at positions [n] into slots [n] of pages [blocks, bytes]; a slot
    below 0 is left out.
    """
    there = slots >= 0
    slots, positions = slots[there], positions[there]
    codes, g, parts = _coded(r[there], t, layout, stream, positions)
    codes, finest = torch.where(parts > 1, codes >> 2, codes), codes & 3
    wide = layout.wide["kv".index(stream)] * layout.words
    upper = (
        torch.cat([codes[..., :wide] >> 2, codes[..., wide:]], dim=-1)
        .int()
        .unflatten(-1, (4, layout.words))
    )
    values = {
        "w": (upper << torch.arange(0, 16, 4)[:, None]).sum(dim=-2).to(torch.int16),
        "e": _packed(codes[..., :wide] & 3), "g": g[..., None], "f": _packed(finest),
    }  # fmt: skip
    for name, at in _fields(layout, stream, slots).items():
        here = parts.flatten() > 1 if name == "f" else slice(None)
        value = values[name][here].contiguous().view(torch.uint8)
        pages[(slots[here] // layout.block)[:, None, None], at[here]] = value


def read(
    pages: torch.Tensor,
    layout: Layout,
    slots: torch.Tensor,
    stream: str,
    t: StreamTables,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Residuals [n, h, d], float32, of slots [n] that hold the tokens of positions [n]."""
    parts = (1 + 3 * layout.finer["kv".index(stream)] * (positions < FIRST))[:, None, None]
    found = {}
    for name, at in _fields(layout, stream, slots).items():
        here = parts.flatten() > 1 if name == "f" else slice(None)
        found[name] = (
            pages[(slots[here] // layout.block)[:, None, None], at[here]]
            .contiguous()
            .view(torch.int16)
        )
    codes = (found["w"].int()[..., None, :] >> torch.arange(0, 16, 4)[:, None] & 15).flatten(-2)
    fine = _unpacked(found["e"])
    codes[..., : fine.shape[-1]] = codes[..., : fine.shape[-1]] * 4 + fine
    if "f" in found:
        finer = parts.flatten() > 1
        codes[finer] = codes[finer] * 4 + _unpacked(found["f"])
    return _values(codes, found["g"].view(torch.float16).squeeze(-1), parts, layout.bits(stream), t)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last queries [n, H, d] over keys and values [m, h, d]: [n, H, d],
    float32.
    """
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * scale
    late = torch.arange(m)[None, :] > torch.arange(m - n, m)[:, None]
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(late, -math.inf).softmax(-1), v.float())
