"""The recipe known as KakeyaTurbo v1.3, with the norm that its decoder lost.

Each block of `block` tokens of one head: mean μ and principal components U in half precision; coefficients
c = U (x − μ); spherical K-means centres g_s of their directions; t = ⟨c, g_s⟩ and residual e = c − t g_s; e padded to a
power of two L, signs and Hadamard, z = √L H σ e / ‖e‖, levels of `bits` bits; values |z| > `outlier` apart. Decoding
gives c' = t g_s + ‖e‖ e'. The published decoder of keys took 1 for ‖e‖ (it kept ‖x‖, which it never read), so that its
error hardly depended on bits: `published_norm=true` does the same, to keys and values alike.

Unlike there: coefficients see the rounded t; a shared basis is a calibrated table, so that it can be streamed; no block
is dropped; segments take ⌈log₂ k⌉ bits and outlier channels log₂ L.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from assay.errors import UsageError
from assay.kv.codec import BlockCoder, Codec, Samples, Site, Tables, need_table

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Kakeya(Codec):
    """`variance` is the share of variance that sets the rank, `rank` a cap on it (0: none), `outlier` 0 is off.

    `pca=random` is the sketch of rank `rank`, half of head_dim where that is 0.
    """

    name = "kakeya"
    summary = "PCA, spherical K-means and Hadamard residuals by block: KakeyaTurbo v1.3, repaired"
    bits: int = 3
    k: int = 16
    variance: float = 1.0
    rank: int = 0
    pca: Literal["exact", "random"] = "exact"
    basis: Literal["block", "shared"] = "block"
    levels: Literal["gaussian", "calibrated"] = "gaussian"
    outlier: float = 0.0
    skeleton: Literal["fp16", "fp32"] = "fp16"
    block: int = 512
    seed: int = 0xCAFEBABE
    published_norm: bool = False

    def __post_init__(self) -> None:
        if not (1 <= self.bits <= 8 and 1 <= self.k <= 65536 and 0 < self.variance <= 1 and self.rank >= 0):
            raise UsageError(
                f"{self}: bits is 1 to 8, k at least 1, variance in (0, 1], rank not negative",
                finding_id="kv.spec",
            )
        if self.block < 1 or (self.outlier and self.outlier < 1):
            raise UsageError(
                f"{self}: block is at least 1, outlier 0 or at least 1 (in deviations)", finding_id="kv.spec"
            )

    def fit(self, samples: Samples) -> BlockCoder:
        import numpy as np

        from assay.kv.codecs.kakeya_coder import KakeyaCoder
        from assay.kv.spherical import exact_basis, random_basis, ranks
        from assay.quant.lloyd_max import empirical_levels

        tables: Tables = {}
        if self.basis == "shared":
            rows = samples.need_x(str(self)).cpu().flatten(0, 1)[None]
            mean = rows.mean(dim=1)
            cap = self.rank_cap(samples.site.head_dim)
            found = exact_basis if self.pca == "exact" else lambda r: random_basis(r, cap, self.seed)
            components, variances = found(rows - mean[:, None])
            kept = int(ranks(variances, self.variance, cap)[0])
            kind = np.float16 if self.skeleton == "fp16" else np.float32
            tables["mean"] = mean[0].numpy().astype(np.float32)
            tables["basis"] = components[0, :kept].numpy().astype(kind)
        if self.levels == "calibrated" and self.bits in samples.levels:
            tables["levels"] = samples.levels[self.bits].cpu().numpy()
        elif self.levels == "calibrated":
            plain = KakeyaCoder(samples.site, replace(self, levels="gaussian"), tables)
            x = samples.need_x(str(self)).cpu()
            size = min(self.block, x.shape[1])
            whole = x[:, : x.shape[1] // size * size].unflatten(1, (-1, size)).transpose(0, 1)
            z: torch.Tensor = plain.residuals(whole)
            tables["levels"] = empirical_levels(z.numpy(), 2**self.bits).astype(np.float32)
        return KakeyaCoder(samples.site, self, tables)

    def restore(self, site: Site, tables: Tables) -> BlockCoder:
        from assay.kv.codecs.kakeya_coder import KakeyaCoder

        needed = ["mean", "basis"] * (self.basis == "shared") + ["levels"] * (self.levels == "calibrated")
        return KakeyaCoder(site, self, {name: need_table(tables, name, str(self), site) for name in needed})

    def rank_cap(self, head_dim: int) -> int:
        """The largest rank: of the sketch, half of head_dim unless given."""
        if self.pca == "random":
            return min(self.rank or max(head_dim // 2, 8), head_dim)
        return min(self.rank, head_dim)
