"""Coding of blocks for the `kakeya` codec; its formulas stand in `kakeya`.

Codes are tensors over sets (blocks × heads): `rank` [G], mean, basis, centres, and per token the segment, t, norm,
levels and outliers. What lies beyond a set's rank, or its padded length L, is zero and is not packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.kv.codec import BlockCoder, Parts, Site, Stage, Tables
from assay.kv.codecs import kakeya_payload
from assay.kv.payload import from_halves, to_halves
from assay.kv.spherical import exact_basis, random_basis, ranks, spherical_centres
from assay.quant.hadamard import random_signs, wht
from assay.quant.lloyd_max import gaussian_levels

if TYPE_CHECKING:
    import torch

    from assay.kv.codecs.kakeya import Kakeya


@dataclass(frozen=True)
class _Analysis:
    """Everything up to the levels: c = U (x − μ), `near` = t g_s, `residual` = c − t g_s of length `size`, z of it."""

    rank: torch.Tensor
    mean: torch.Tensor
    basis: torch.Tensor
    centres: torch.Tensor
    segment: torch.Tensor
    t: tuple[torch.Tensor, torch.Tensor]
    c: torch.Tensor
    near: torch.Tensor
    residual: torch.Tensor
    size: torch.Tensor
    z: torch.Tensor

    def rows(self, c: torch.Tensor) -> torch.Tensor:
        """Tokens [G, n, d] of coefficients."""
        return self.mean[:, None] + c @ self.basis


class KakeyaCoder(BlockCoder):
    """Blocks of one head are coded on their own; `tables` may hold a shared basis and levels."""

    def __init__(self, site: Site, codec: Kakeya, tables: Tables) -> None:
        import torch

        super().__init__(site)
        self.granularity = self.block_tokens = codec.block
        self.codec = codec
        self._tables = tables
        levels = tables.get("levels", gaussian_levels(2**codec.bits))
        self._levels = torch.tensor(levels, dtype=torch.float32)
        self._signs = random_signs(codec.seed, 1 << (site.head_dim - 1).bit_length())

    @property
    def tables(self) -> Tables:
        return dict(self._tables)

    def quantise(self, x: torch.Tensor, side: torch.Tensor | None = None) -> Parts:
        import torch

        rows = x.float().flatten(0, 1)
        a = self._analysed(rows)
        levels = self._levels.to(a.z.device)
        codes = torch.bucketize(a.z, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        apart = (
            a.z.abs() > self.codec.outlier if self.codec.outlier else torch.zeros_like(a.z, dtype=torch.bool)
        )
        kept = torch.where(apart, a.z, 0.0).half()
        told = _length(rows) if self.codec.published_norm else a.size
        norm = to_halves(told[..., 0])
        parts = (a.rank, a.mean, a.basis, a.centres, a.segment, *a.t, *norm, codes, apart, kept)
        return tuple(part.unflatten(0, x.shape[:2]) for part in parts)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        heads = parts[0].shape[:2]
        rank, mean, basis, centres, segment, t, t_exponent, norm, norm_exponent, codes, apart, kept = (
            part.flatten(0, 1) for part in parts
        )
        z = self._z(codes, apart, kept)
        factor = from_halves(norm, norm_exponent)[..., None]
        if self.codec.published_norm:
            factor = torch.ones_like(factor)
        residual = self._turned_back(z, rank, centres.shape[-1]) * factor
        near = from_halves(t, t_exponent)[..., None] * self._chosen(centres, segment)
        rows = mean[:, None] + (near + residual) @ basis
        return rows.unflatten(0, heads)

    def residuals(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated unit residuals of blocks, those of this very recipe, flat: what levels are fitted to."""
        a = self._analysed(x.float().flatten(0, 1))
        return a.z[self._used(a)]

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """pca leaves out components and rounds the skeleton; kmeans and wht lose nothing; levels; norm as stored."""
        import torch

        shape, nan = x.shape[:2], torch.nan
        a = self._analysed(x.float().flatten(0, 1))
        parts = self.quantise(x)
        codes, apart, kept = (part.flatten(0, 1) for part in parts[9:])
        used = self._used(a)
        unit = torch.where(used[..., : a.residual.shape[-1]], a.residual / a.size.clamp_min(1e-30), nan)
        energy = a.c.square().sum((1, 2)).clamp_min(1e-30)
        explained = 1 - a.residual.square().sum((1, 2)) / energy
        outliers = apart.sum((1, 2)) / used.sum((1, 2))

        def stage(name: str, c: torch.Tensor, values: torch.Tensor | None, **figures: torch.Tensor) -> Stage:
            taken = None if values is None else values.flatten(1).unflatten(0, shape)
            found = {k: v.unflatten(0, shape) for k, v in figures.items()}
            return Stage(name, a.rows(c).unflatten(0, shape), taken, found)

        def coded(z: torch.Tensor) -> torch.Tensor:
            return a.near + self._turned_back(z, a.rank, a.c.shape[-1]) * a.size

        return [
            stage("pca", a.c, None, rank=a.rank.float()),
            stage("kmeans", a.near + a.residual, unit, explained=explained),
            stage("wht", coded(a.z), torch.where(used, a.z, nan)),
            stage("levels", coded(self._z(codes, apart, kept)), None, outliers=outliers),
            Stage("norm", self.dequantise(parts)),
        ]

    def pack(self, parts: Parts) -> list[bytes]:
        return [
            b"".join(kakeya_payload.pack_set([p[i, j].cpu() for p in parts], self.codec) for j in range(h))
            for i, h in [(i, self.site.heads) for i in range(parts[0].shape[0])]
        ]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        return kakeya_payload.unpack_blocks(payloads, tokens, self.site, self.codec, self._shared())

    def _analysed(self, rows: torch.Tensor) -> _Analysis:
        """Rows [G, n, d] through skeleton, segments and rotation."""
        mean, basis, rank = self._skeleton(rows)
        c = (rows - mean[:, None]) @ basis.mT
        centres = self._stored(spherical_centres(c, min(self.codec.k, c.shape[1]), self.codec.seed))
        cosine = c @ centres.mT
        segment = cosine.abs().argmax(dim=-1)
        t = to_halves(cosine.gather(-1, segment[..., None])[..., 0])
        near = from_halves(*t)[..., None] * self._chosen(centres, segment)
        residual = c - near
        size = _length(residual)
        z = self._turned(residual, size, rank)
        return _Analysis(rank, mean, basis, centres, segment, t, c, near, residual, size, z)

    def _chosen(self, centres: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        """The centre of each row's segment [G, n, R]."""
        return centres.gather(1, segment.long()[..., None].expand(-1, -1, centres.shape[-1]))

    def _used(self, a: _Analysis) -> torch.Tensor:
        """Which coordinates of z are within their set's padded length [G, n, L]."""
        import torch

        used = torch.arange(a.z.shape[-1], device=a.z.device) < _padded(a.rank)[:, None]
        return used[:, None].expand_as(a.z)

    def _z(self, codes: torch.Tensor, apart: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """What levels and outliers stand for."""
        import torch

        return torch.where(apart, kept.float(), self._levels.to(codes.device)[codes.int()])

    def _shared(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        import torch

        if self.codec.basis != "shared":
            return None
        mean, basis = (torch.from_numpy(self._tables[name].astype("float32")) for name in ("mean", "basis"))
        return mean, basis

    def _skeleton(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean [G, d], basis [G, R, d] with zeros beyond the rank, rank [G], as they are stored."""
        import torch

        shared = self._shared()
        if shared is not None:
            mean, basis = (t.to(rows.device) for t in shared)
            rank = torch.full((rows.shape[0],), basis.shape[0], device=rows.device)
            return mean.expand(rows.shape[0], -1), basis.expand(rows.shape[0], -1, -1), rank
        codec = self.codec
        mean = self._stored(rows.mean(dim=1))
        centred = rows - mean[:, None]
        # Shares of variance do not change with the scale, and squares of huge values would overflow.
        scale = centred.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-30)
        cap = codec.rank_cap(self.site.head_dim)
        if codec.pca == "exact":
            basis, variances = exact_basis(centred / scale)
        else:
            basis, variances = random_basis(centred / scale, cap, codec.seed)
        rank = ranks(variances, codec.variance, cap)
        basis = basis[:, : int(rank.max())]
        used = torch.arange(basis.shape[1], device=rows.device) < rank[:, None]
        return mean, self._stored(basis) * used[..., None], rank

    def _stored(self, x: torch.Tensor) -> torch.Tensor:
        """Rounded as the skeleton is stored, float32."""
        return x if self.codec.skeleton == "fp32" else from_halves(*to_halves(x))

    def _turned(self, residual: torch.Tensor, size: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
        """[G, n, R] → z [G, n, L of the largest], zero beyond each set's own L."""
        import torch

        lengths = _padded(rank)
        top = int(lengths.max())
        unit = torch.nn.functional.pad(residual / size.clamp_min(1e-30), (0, top - residual.shape[-1]))
        z = torch.zeros_like(unit)
        for length in lengths.unique().tolist():
            chosen = lengths == length
            part = unit[chosen][..., :length] * self._signs[:length].to(unit.device)
            z[chosen] = torch.nn.functional.pad(wht(part) * length**0.5, (0, top - length))
        return z

    def _turned_back(self, z: torch.Tensor, rank: torch.Tensor, width: int) -> torch.Tensor:
        """z → unit residuals [G, n, width], zero beyond the rank."""
        import torch

        lengths = _padded(rank)
        found = torch.zeros(*z.shape[:2], max(width, z.shape[-1]), device=z.device)
        for length in lengths.unique().tolist():
            chosen = lengths == length
            part = wht(z[chosen][..., :length]) / length**0.5 * self._signs[:length].to(z.device)
            found[chosen] = torch.nn.functional.pad(part, (0, found.shape[-1] - length))
        used = torch.arange(width, device=z.device) < rank[:, None]
        return found[..., :width] * used[:, None]


def _length(rows: torch.Tensor) -> torch.Tensor:
    """‖row‖ [..., 1], without overflow of squares."""
    top = rows.abs().amax(dim=-1, keepdim=True).clamp_min(1e-30)
    return (rows / top).norm(dim=-1, keepdim=True) * top


def _padded(rank: torch.Tensor) -> torch.Tensor:
    """The next power of two of each rank."""
    import torch

    return torch.tensor([1 << (int(r) - 1).bit_length() for r in rank.tolist()], device=rank.device)
