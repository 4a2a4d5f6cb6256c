"""Codecs that learn nothing: exact values, number formats, integers by group, noise of a known
size, random rotations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

from assay.engines.hf.cache import Format, cast, fp8_dtype
from assay.errors import UsageError
from assay_lab.kv.codecs import (
    BLOCK_TOKENS,
    EXPONENT,
    BlockCoder,
    Codec,
    Field,
    Parts,
    Samples,
    Site,
    Stage,
    Tables,
    exact_from_bytes,
    exact_to_bytes,
    from_halves,
    need_table,
    to_halves,
)
from assay_lab.kv.transforms import rows_of
from assay_lab.quantisation import (
    Rotation,
    gaussian_levels,
    lengths,
    mixed_widths,
    nearest_level,
    normal_of_words,
    random_words,
    words_of_keys,
)


@dataclass(frozen=True)
class Identity(Codec):
    """Lossless: 2 bytes a value where bf16 or fp16 hold it, else 4."""

    name = "identity"
    single_heads = True
    summary = "exact values, the control"

    def fit(self, samples: Samples) -> BlockCoder:
        return IdentityCoder(samples.site)


class IdentityCoder(BlockCoder):
    """The values themselves are the codes."""

    lossless = True

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        return (x,)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        return parts[0].float()

    def pack(self, parts: Parts) -> list[bytes]:
        return [exact_to_bytes(block) for block in parts[0]]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        shape = (self.site.heads, tokens, self.site.head_dim)
        return (torch.stack([exact_from_bytes(p, shape) for p in payloads]),)


# Values rounded to bfloat16: what a cache holds today.


@dataclass(frozen=True)
class Bf16(Codec):
    """2 bytes a value."""

    name = "bf16"
    single_heads = True
    summary = "bfloat16, as a cache holds it today"

    def fit(self, samples: Samples) -> BlockCoder:
        return Bf16Coder(samples.site)


class Bf16Coder(BlockCoder):
    """Codes are the rounded values."""

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        # The largest float32 round to infinity: they stop at the largest bfloat16.
        top = torch.finfo(torch.bfloat16).max
        return (x.float().clamp(-top, top).bfloat16(),)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        return parts[0].float()

    def layout(self, tokens: int) -> list[Field]:
        return [Field((self.site.heads, tokens, self.site.head_dim), torch.bfloat16)]


# 8-bit floating point (Micikevicius et al., arXiv:2209.05433), saturating, with scales known before
# the first token.


@dataclass(frozen=True)
class Fp8(Codec):
    """1 byte a value. Scales map the largest calibrated value to `top`; `one` is no scale.

    `top` 0 is the largest of the format, as llm-compressor scales; vLLM's `calculate_kv_scales`
    takes 200 for keys and 100 for values. A float's relative precision is the same everywhere, so a
    scale saves only what would lie outside its range.
    """

    name = "fp8"
    single_heads = True
    summary = "8-bit floats"
    format: Format = "e4m3"
    scale: Literal["one", "tensor", "head"] = "one"
    top: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.top <= torch.finfo(fp8_dtype(self.format)).max:
            raise UsageError(
                f"{self}: top is at most the largest of {self.format}", finding_id="kv.spec"
            )

    @property
    def joins_heads(self) -> bool:
        return self.scale == "tensor"

    def fit(self, samples: Samples) -> BlockCoder:
        site = samples.site
        if self.scale == "one":
            return Fp8Coder(site, self.format, torch.ones(site.heads))
        top = samples.need_x(str(self)).abs().amax(dim=(1, 2)).cpu().clamp_min(2.0**-100)
        if self.scale == "tensor":
            top = top.max().expand(site.heads)
        return Fp8Coder(
            site, self.format, top / (self.top or torch.finfo(fp8_dtype(self.format)).max)
        )

    def restore(self, site: Site, tables: Tables) -> BlockCoder:
        if self.scale == "one":
            return self.fit(Samples(site))
        return Fp8Coder(
            site, self.format, torch.from_numpy(need_table(tables, "scale", str(self), site))
        )


class Fp8Coder(BlockCoder):
    """Codes are 8-bit floats of x / scale; `scale` [heads]."""

    def __init__(self, site: Site, form: Format, scale: torch.Tensor) -> None:
        super().__init__(site)
        self._form = form
        self._scale = scale.float().clone()

    @property
    def tables(self) -> Tables:
        return {} if bool((self._scale == 1).all()) else {"scale": self._scale.numpy()}

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        scaled = x.float() / self._scale.to(x.device)[:, None, None]
        return (cast(scaled, fp8_dtype(self._form)).view(torch.uint8),)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        values = parts[0].view(fp8_dtype(self._form)).float()
        return values * self._scale.to(values.device)[:, None, None]

    def layout(self, tokens: int) -> list[Field]:
        return [Field((self.site.heads, tokens, self.site.head_dim), torch.uint8)]


# Integers with a scale and a smallest value per group, as KIVI (Liu et al., arXiv:2402.02750).
#
# x̂ = lo + s · q with q = round((x − lo) / s) in 0 … 2^b − 1 and s = (max − min) / (2^b − 1); lo
# and s are fp16. Keys have outlying channels, so their groups are `group` tokens of one channel;
# values are grouped by `group` channels of one token. The last `residual` tokens stay exact.


@dataclass(frozen=True)
class IntGroups(Codec):
    """`bits` 1 to 8; `axis` auto is channel for keys and token for values."""

    name = "int"
    single_heads = True
    summary = "integers by group, as KIVI"
    bits: int = 4
    group: int = 32
    axis: Literal["auto", "channel", "token"] = "auto"
    residual: int = 32

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8 or self.group < 1 or self.residual < 0:
            raise UsageError(
                f"{self}: bits is 1 to 8, group at least 1, residual at least 0",
                finding_id="kv.spec",
            )

    def fit(self, samples: Samples) -> BlockCoder:
        return IntCoder(samples.site, self)


class IntCoder(BlockCoder):
    """Codes: levels [blocks, heads, tokens, head_dim], lows and scales [blocks, *groups] as halves,
    exponents.
    """

    def __init__(self, site: Site, codec: IntGroups) -> None:
        super().__init__(site)
        self._bits, self._group = codec.bits, codec.group
        self.exact_last = codec.residual
        self._by_channel = codec.axis == "channel" or (codec.axis == "auto" and site.stream == "k")
        if self._by_channel:
            self.granularity = codec.group
            self.block_tokens = max(1, BLOCK_TOKENS // codec.group) * codec.group

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        grouped, real = self._grouped(x.float())
        lo = torch.where(real, grouped, torch.inf).amin(-1)
        hi = torch.where(real, grouped, -torch.inf).amax(-1)
        levels = 2**self._bits - 1
        low, low_exponent = to_halves(lo)
        # Halves of the range: the difference of two huge values would overflow.
        scale, scale_exponent = to_halves((hi / levels - lo / levels).clamp_min(0))
        lo = from_halves(low, low_exponent)[..., None]
        step = from_halves(scale, scale_exponent)[..., None]
        offset = grouped / step.clamp_min(1e-30) - lo / step.clamp_min(1e-30)
        codes = torch.where(step > 0, offset.round().clamp(0, levels), 0).to(torch.uint8)
        return self._flat(codes, x.shape), low, scale, low_exponent, scale_exponent

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        codes, low, scale, low_exponent, scale_exponent = parts
        grouped, _ = self._grouped(codes.float())
        lo = from_halves(low, low_exponent)[..., None]
        return self._flat(lo + grouped * from_halves(scale, scale_exponent)[..., None], codes.shape)

    def layout(self, tokens: int) -> list[Field]:
        site = self.site
        groups = (site.heads, tokens, -(-site.head_dim // self._group))
        if self._by_channel:
            groups = (site.heads, site.head_dim, -(-tokens // self._group))
        codes = Field((site.heads, tokens, site.head_dim), self._bits)
        return [
            codes,
            Field(groups, torch.float16),
            Field(groups, torch.float16),
            EXPONENT,
            EXPONENT,
        ]

    def _grouped(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[blocks, heads, rows, groups, group] along the axis, and which of it is real."""
        rows = x.transpose(2, 3) if self._by_channel else x
        spare = -rows.shape[-1] % self._group
        real = torch.ones(rows.shape[-1], dtype=torch.bool, device=x.device)
        real = torch.nn.functional.pad(real, (0, spare)).unflatten(0, (-1, self._group))
        return torch.nn.functional.pad(rows, (0, spare)).unflatten(-1, (-1, self._group)), real

    def _flat(self, grouped: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        rows = grouped.flatten(-2)
        length = shape[2] if self._by_channel else shape[3]
        rows = rows[..., :length]
        return (rows.transpose(2, 3) if self._by_channel else rows).contiguous()


# A diagnostic, no codec: what a cache with an error of known size does to a model.
#
# x̂ = x + σ · rms(x) · n with n standard normal and rms(x) over all KV heads of the token. What is
# stored is x in bf16 and, in the header's SPEC, σ and the seed: nothing becomes smaller. The noise
# of a token is a function of its stored values, the seed, the layer and the stream, as a
# quantiser's error is one of its values: batches, the order of calls and random access do not
# change it, and two tokens with the same values get the same noise.


@dataclass(frozen=True)
class Noise(Codec):
    """`sigma` is the deviation of the noise over the root mean square of a token's values."""

    name = "noise"
    summary = "Gaussian noise of known size, a diagnostic: it saves nothing"
    sigma: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise UsageError(
                f"{self}: sigma is a finite number, not negative", finding_id="kv.spec"
            )

    def fit(self, samples: Samples) -> BlockCoder:
        return NoiseCoder(samples.site, self)


class NoiseCoder(Bf16Coder):
    """Codes are the values in bf16; noise comes in on decoding."""

    def __init__(self, site: Site, codec: Noise) -> None:
        super().__init__(site)
        self._sigma = codec.sigma
        place = int(
            random_words(codec.seed, 2 * site.layers)[2 * site.layer + (site.stream == "v")]
        )
        # Odd factors: a token's key changes with any bit of any of its values.
        factors = random_words(place, site.width).view("int64") | 1
        self._factors = torch.from_numpy(factors)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        stored = rows_of(parts[0])
        keys = (stored.view(torch.int16).long() * self._factors.to(stored.device)).sum(dim=-1)
        noise = normal_of_words(words_of_keys(keys, 2 * -(-self.site.width // 2)))[
            ..., : self.site.width
        ]
        rows = stored.float()
        # Scaled by the largest value first: squares of huge values would overflow.
        top = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
        rms = (rows / top).square().mean(dim=-1, keepdim=True).sqrt() * top
        limit = torch.finfo(torch.float32).max
        noisy = (rows + self._sigma * rms * noise).clamp(-limit, limit)
        return noisy.unflatten(-1, (self.site.heads, self.site.head_dim)).transpose(1, 2)


# The strong plain codec: random signs, Hadamard rotation, Lloyd-Max levels, one fp16 norm a vector.
#
# For each vector x of a head: z = √d R x / ‖x‖ has nearly Gaussian coordinates, which get the 2^b
# levels of the Gaussian Lloyd-Max quantiser (the family of QuaRot, arXiv:2404.00456, PolarQuant and
# TurboQuant, arXiv:2504.19874). What is stored for the norm is the factor g of the decoded vector g
# R⁻¹ ẑ:
#
#     norm        g = ‖x‖ / ‖ẑ‖       the decoded vector is as long as x
#     error       g = ⟨x, R⁻¹ẑ⟩/‖ẑ‖²  the least squared error
#     projection  g = ‖x‖² / ⟨x, R⁻¹ẑ⟩ the decoded vector's projection on x is x
#
# Fractional bits give the last coordinates one bit more; after the rotation all coordinates are
# alike.


@dataclass(frozen=True)
class Hadamard(Codec):
    """`bits` a value, 1 to 10, fractions allowed, and 16 bits a vector."""

    name = "hadamard"
    single_heads = True
    summary = "Hadamard rotation and Lloyd-Max levels, the strong baseline"
    bits: float = 4.0
    norm: Literal["norm", "error", "projection"] = "norm"
    seed: int = 1

    def __post_init__(self) -> None:
        mixed_widths(self.bits, 1)

    def fit(self, samples: Samples) -> BlockCoder:
        return HadamardCoder(samples.site, self)


class HadamardCoder(BlockCoder):
    """Codes: levels of the narrow coordinates, of the wide ones, factors as halves, their exponent."""

    def __init__(self, site: Site, codec: Hadamard) -> None:
        super().__init__(site)
        self._norm = codec.norm
        self._rotation = Rotation(site.head_dim, codec.seed)
        self._width, wide = mixed_widths(codec.bits, site.head_dim)
        self._narrow = site.head_dim - wide

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        _, low, high, factor = self._analysed(x.float())
        return low, high, *to_halves(factor)

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """rotation loses nothing; levels with the factor unrounded; factor: as it is stored."""
        z, low, high, factor = self._analysed(x.float())
        levels = self._rotation.inverse(self._shape(low, high)) * factor[..., None]
        whole = self.dequantise((low, high, *to_halves(factor)))
        return [
            Stage("rotation", x.float(), z.flatten(2)),
            Stage("levels", levels),
            Stage("factor", whole),
        ]

    def _analysed(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated vectors of variance 1, their narrow and wide levels, and the factor, not yet
        rounded.
        """
        # Scaled by the largest value first: squares of huge values would overflow.
        top = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
        unit = x / top
        length = lengths(unit)[..., None].clamp_min(1e-30)
        z = self._rotation.forward(unit) * (self.site.head_dim**0.5 / length)
        low = nearest_level(z[..., : self._narrow], _levels(self._width, z.device))
        high = z[..., self._narrow :]
        # No table where no place is wide: one bit more than the most may be too many.
        high = (
            nearest_level(high, _levels(self._width + 1, z.device))
            if high.shape[-1]
            else high.byte()
        )
        shape = self._shape(low, high)
        size = lengths(shape)
        if self._norm == "norm":
            return z, low, high, length[..., 0] / size * top[..., 0]
        inner = (shape * z).sum(-1) * (length[..., 0] / self.site.head_dim**0.5)
        error = self._norm == "error"
        factor = (
            inner / size.square() if error else length[..., 0].square() / inner.clamp_min(1e-30)
        )
        return z, low, high, factor * top[..., 0]

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        low, high, half, exponent = parts
        return (
            self._rotation.inverse(self._shape(low, high)) * from_halves(half, exponent)[..., None]
        )

    def layout(self, tokens: int) -> list[Field]:
        vectors = (self.site.heads, tokens)
        low = Field((*vectors, self._narrow), self._width)
        high = Field((*vectors, self.site.head_dim - self._narrow), self._width + 1)
        return [low, high, Field(vectors, torch.float16), EXPONENT]

    def _shape(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        narrow = _picked(_levels(self._width, low.device), low)
        if not high.shape[-1]:
            return narrow
        return torch.cat([narrow, _picked(_levels(self._width + 1, low.device), high)], dim=-1)


@lru_cache(maxsize=64)
def _levels(bits: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(gaussian_levels(2**bits), dtype=torch.float32, device=device)


def _picked(levels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return levels.index_select(0, index.reshape(-1).int()).view(index.shape)


# Points of D4 or E8 after a random Hadamard rotation, numbered and packed: the idea of
# KakeyaLattice with a real rate.
#
# Each vector is rotated and scaled by its largest coordinate, y = q R x / max |R x|, so that it
# fills the cube |y| ≤ q; every 4 or 8 coordinates become the nearest lattice point inside, stored
# as its number in ⌈log₂ points⌉ bits. The fp16 factor gives the decoded vector the least squared
# error. A head_dim that is no multiple of the dimension is padded.


# The lattices D4 and E8 inside a cube: nearest point, and the number of each point, so that a rate
# is real.
#
# D_n holds the integer vectors with an even sum; E8 = D8 ∪ (D8 + ½). In the cube |x_i| ≤ Q they are
# counted by their digits: with odd base B = 2Q + 1, Σ dᵢ Bⁱ ≡ Σ dᵢ (mod 2), so the integer vectors
# with an even sum of digits x + Q are those of even rank, and rank / 2 numbers them without a gap.
# (n Q is even, so sums of digits and of x agree.) Points of D8 + ½ have base 2Q; the last digit's
# parity follows from the others.

MAX_Q = {"D4": 2000, "E8": 110}


def dimension(lattice: str) -> int:
    """4 or 8."""
    return int(lattice[1])


def points(lattice: str, q: int) -> int:
    """How many points of the lattice lie in the cube of half-width `q`; UsageError for a cube that
    is too large.
    """
    if lattice not in MAX_Q or not 1 <= q <= MAX_Q[lattice]:
        raise UsageError(
            f"{lattice} with q={q}: D4 takes q 1 to 2000, E8 1 to 110", finding_id="kv.spec"
        )
    whole: int = ((2 * q + 1) ** dimension(lattice) + 1) // 2
    half: int = (2 * q) ** 8 // 2
    return whole if lattice == "D4" else whole + half


def nearest(y: torch.Tensor, lattice: str, q: int) -> torch.Tensor:
    """The nearest point of the lattice in the cube to y [..., dimension], |y| ≤ q (Conway and
    Sloane 1982).
    """
    whole = _even(y, float(-q), float(q))
    if lattice == "D4":
        return whole
    half = _even(y - 0.5, float(-q), float(q - 1)) + 0.5
    closer = (y - half).square().sum(-1, keepdim=True) < (y - whole).square().sum(-1, keepdim=True)
    return torch.where(closer, half, whole)


def number(x: torch.Tensor, lattice: str, q: int) -> torch.Tensor:
    """0 … points − 1 of lattice points [..., dimension], int64."""
    count = ((2 * q + 1) ** dimension(lattice) + 1) // 2
    whole = _rank((x.floor() + q).long(), 2 * q + 1) // 2
    if lattice == "D4":
        return whole
    digits = (x.floor() + q).long()
    half = count + _rank(digits[..., :7], 2 * q) * q + digits[..., 7] // 2
    return torch.where(x[..., 0] == x[..., 0].floor(), whole, half)


def point(numbers: torch.Tensor, lattice: str, q: int) -> torch.Tensor:
    """The lattice points [..., dimension] of their numbers, float32; numbers past the last give the
    last.
    """
    numbers = numbers.clamp(0, points(lattice, q) - 1)
    count = ((2 * q + 1) ** dimension(lattice) + 1) // 2
    whole = _digits(2 * numbers.clamp_max(count - 1), 2 * q + 1, dimension(lattice)).float() - q
    if lattice == "D4":
        return whole
    rest = (numbers - count).clamp_min(0)
    first = _digits(rest // q, 2 * q, 7)
    last = 2 * (rest % q) + first.sum(-1) % 2
    half = torch.cat([first, last[..., None]], dim=-1).float() - q + 0.5
    return torch.where((numbers < count)[..., None], whole, half)


def _even(y: torch.Tensor, lo: float, hi: float) -> torch.Tensor:
    """The nearest integer vector with an even sum in the cube lo … hi."""
    x = y.round().clamp(lo, hi)
    gap = y - x
    # The cheapest single move that stays inside: towards y, or away from it at the face of the
    # cube.
    move = torch.where(gap >= 0, 1.0, -1.0)
    move = torch.where((x + move > hi) | (x + move < lo), -move, move)
    price = (gap - move).square() - gap.square()
    cheapest = price.argmin(dim=-1, keepdim=True)
    odd = x.sum(-1, keepdim=True).remainder(2) == 1
    return x + torch.zeros_like(x).scatter(-1, cheapest, move.gather(-1, cheapest)) * odd


def _rank(digits: torch.Tensor, base: int) -> torch.Tensor:
    rank = digits[..., 0]
    for i in range(1, digits.shape[-1]):
        rank = rank * base + digits[..., i]
    return rank


def _digits(rank: torch.Tensor, base: int, count: int) -> torch.Tensor:
    found = []
    for _ in range(count):
        found.append(rank % base)
        rank = rank // base
    return torch.stack(found[::-1], dim=-1)


@dataclass(frozen=True)
class Lattice(Codec):
    """`q` is the half-width of the cube: the rate grows by one bit a value for every doubling."""

    name = "lattice"
    single_heads = True
    summary = "D4 or E8 points, numbered"
    lattice: Literal["D4", "E8"] = "E8"
    q: int = 10
    seed: int = 1

    def __post_init__(self) -> None:
        points(self.lattice, self.q)

    def fit(self, samples: Samples) -> BlockCoder:
        return LatticeCoder(samples.site, self)


class LatticeCoder(BlockCoder):
    """Codes: numbers [blocks, heads, tokens, groups], factors as halves, exponents."""

    def __init__(self, site: Site, codec: Lattice) -> None:
        super().__init__(site)
        self._lattice, self._q = codec.lattice, codec.q
        self._size = dimension(codec.lattice)
        self._groups = -(-site.head_dim // self._size)
        self._rotation = Rotation(site.head_dim, codec.seed)
        self._bits = (points(codec.lattice, codec.q) - 1).bit_length()

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        x = x.float()
        top = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
        turned = self._padded(self._rotation.forward(x / top))
        scale = turned.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30) / self._q
        y = (turned / scale).clamp(-self._q, self._q)
        found = nearest(y.unflatten(-1, (self._groups, self._size)), self._lattice, self._q)
        flat = found.flatten(-2)
        factor = (flat * y).sum(-1) / flat.square().sum(-1).clamp_min(1e-30)
        half, exponent = to_halves(factor * scale[..., 0] * top[..., 0])
        return number(found, self._lattice, self._q), half, exponent

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        numbers, half, exponent = parts
        y = point(numbers.long(), self._lattice, self._q).flatten(-2)[..., : self.site.head_dim]
        return self._rotation.inverse(y) * from_halves(half, exponent)[..., None]

    def layout(self, tokens: int) -> list[Field]:
        vectors = (self.site.heads, tokens)
        return [
            Field((*vectors, self._groups), self._bits),
            Field(vectors, torch.float16),
            EXPONENT,
        ]

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, self._groups * self._size - x.shape[-1]))
