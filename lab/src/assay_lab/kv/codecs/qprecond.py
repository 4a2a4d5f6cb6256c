"""The wrapper `qprecond`: keys coded where plain squared error is the error of attention scores.

With Σ the second moment of the queries that read a KV head and Σ + r · mean(diag Σ) · I = L Lᵀ,
the rows x L are coded and decoded rows are multiplied by L⁻¹: ‖(x − x̂) L‖² = (x − x̂) (L Lᵀ) (x
− x̂)ᵀ. L enlarges what queries look at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from assay_lab.kv.codecs.around import Around
from assay_lab.kv.codecs.base import BlockCoder, Codec, Parts
from assay_lab.kv.codecs.placement import Wrapper, inner_tables
from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables, need_table


@dataclass(frozen=True)
class QPrecond(Wrapper):
    """One Cholesky factor a layer and KV head, ridge `ridge` times the mean of the diagonal."""

    name = "qprecond"
    summary = "whitened by the queries' second moment"
    ridge: float = 1e-3

    def wrap(self, inner: Codec, samples: Samples) -> BlockCoder:
        sigma = samples.need_metric(str(self))
        mean = sigma.diagonal(dim1=1, dim2=2).mean(dim=1)
        eye = torch.eye(sigma.shape[-1], dtype=torch.float64)
        chol = torch.linalg.cholesky(sigma + self.ridge * mean[:, None, None] * eye).float()
        x = None if samples.x is None else samples.x.float() @ chol.to(samples.x.device)
        # What is inside sees a plain metric: it has been absorbed.
        return QPrecondCoder(inner.fit(replace(samples, x=x, metric=eye.expand_as(sigma))), chol)

    def rewrap(self, inner: Codec, site: LayerStream, tables: Tables) -> BlockCoder:
        chol = torch.from_numpy(_square(need_table(tables, "chol", str(self), site), site.head_dim))
        return QPrecondCoder(inner.restore(site, inner_tables(tables)), chol)


class QPrecondCoder(Around):
    """x L goes inside; `chol` [heads, head_dim, head_dim], lower triangles, which alone are kept as
    a table.
    """

    def __init__(self, inner: BlockCoder, chol: torch.Tensor) -> None:
        super().__init__(inner)
        self._chol = chol
        eye = torch.eye(chol.shape[-1], dtype=torch.float64)
        self._inverse = torch.linalg.solve_triangular(chol.double(), eye, upper=False).float()

    @property
    def tables(self) -> Tables:
        rows, columns = np.tril_indices(self.site.head_dim)
        return {**super().tables, "chol": self._chol.numpy()[:, rows, columns]}

    def enter(self, x: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        return (), x @ self._chol.to(x.device)

    def leave(self, own: Parts, values: torch.Tensor) -> torch.Tensor:
        return values @ self._inverse.to(values.device)


def _square(triangles: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    full = np.zeros((triangles.shape[0], size, size), dtype=np.float32)
    rows, columns = np.tril_indices(size)
    full[:, rows, columns] = triangles
    return full
