"""Coding of blocks for the `kakeya` codec; its formulas stand in `kakeya`.

Codes are tensors over sets (blocks × heads): `rank` [G], mean, basis, centres, and per token the segment, t, norm,
levels and outliers. What lies beyond a set's rank, or its padded length L, is zero and is not packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from assay.kv.codec import BlockCoder, Parts, Site, Tables
from assay.kv.codecs import kakeya_payload
from assay.kv.payload import from_halves, to_halves
from assay.kv.spherical import exact_basis, random_basis, ranks, spherical_centres
from assay.quant.hadamard import random_signs, wht
from assay.quant.lloyd_max import gaussian_levels

if TYPE_CHECKING:
    import torch

    from assay.kv.codecs.kakeya import Kakeya


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
        mean, basis, rank = self._skeleton(rows)
        c = (rows - mean[:, None]) @ basis.mT
        centres = self._stored(spherical_centres(c, min(self.codec.k, c.shape[1]), self.codec.seed))
        cosine = c @ centres.mT
        segment = cosine.abs().argmax(dim=-1)
        t, t_exponent = to_halves(cosine.gather(-1, segment[..., None])[..., 0])
        near = centres.gather(1, segment[..., None].expand(-1, -1, centres.shape[-1]))
        residual = c - from_halves(t, t_exponent)[..., None] * near
        size = _length(residual)
        z = self._turned(residual, size, rank)
        levels = self._levels.to(z.device)
        codes = torch.bucketize(z, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        apart = z.abs() > self.codec.outlier if self.codec.outlier else torch.zeros_like(z, dtype=torch.bool)
        kept = torch.where(apart, z, 0.0).half()
        told = _length(rows) if self.codec.published_norm else size
        norm, norm_exponent = to_halves(told[..., 0])
        heads = (x.shape[0], x.shape[1])
        parts = (rank, mean, basis, centres, segment, t, t_exponent, norm, norm_exponent, codes, apart, kept)
        return tuple(part.unflatten(0, heads) for part in parts)

    def dequantise(self, parts: Parts, side: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        heads = parts[0].shape[:2]
        rank, mean, basis, centres, segment, t, t_exponent, norm, norm_exponent, codes, apart, kept = (
            part.flatten(0, 1) for part in parts
        )
        z = torch.where(apart, kept.float(), self._levels.to(codes.device)[codes.int()])
        factor = from_halves(norm, norm_exponent)[..., None]
        if self.codec.published_norm:
            factor = torch.ones_like(factor)
        residual = self._turned_back(z, rank, centres.shape[-1]) * factor
        near = centres.gather(1, segment.long()[..., None].expand(-1, -1, centres.shape[-1]))
        c = from_halves(t, t_exponent)[..., None] * near + residual
        rows = mean[:, None] + c @ basis
        return rows.unflatten(0, heads)

    def residuals(self, x: torch.Tensor) -> torch.Tensor:
        """Rotated unit residuals of blocks, those of this very recipe, flat: what levels are fitted to."""
        import torch

        rows = x.float().flatten(0, 1)
        mean, basis, rank = self._skeleton(rows)
        c = (rows - mean[:, None]) @ basis.mT
        centres = self._stored(spherical_centres(c, min(self.codec.k, c.shape[1]), self.codec.seed))
        cosine = c @ centres.mT
        segment = cosine.abs().argmax(dim=-1, keepdim=True)
        near = centres.gather(1, segment.expand(-1, -1, centres.shape[-1]))
        residual = c - cosine.gather(-1, segment) * near
        z = self._turned(residual, _length(residual), rank)
        used = torch.arange(z.shape[-1], device=z.device) < _padded(rank)[:, None]
        return z[used[:, None].expand_as(z)]

    def pack(self, parts: Parts) -> list[bytes]:
        return [
            b"".join(kakeya_payload.pack_set([p[i, j].cpu() for p in parts], self.codec) for j in range(h))
            for i, h in [(i, self.site.heads) for i in range(parts[0].shape[0])]
        ]

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        return kakeya_payload.unpack_blocks(payloads, tokens, self.site, self.codec, self._shared())

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
