"""The transform of the codec `pca`: decorrelated coefficients in which plain squared error is the
error that matters.

All KV heads of a token form one row x of `width` values. With mean μ, metric M = L Lᵀ (error e
costs e M eᵀ) and covariance Σ of the samples, Lᵀ Σ L = U Λ Uᵀ gives the Karhunen-Loève transform
in that metric: x − μ = Δ c S with S = Uᵀ L⁻¹, coefficients c with variances Λ / Δ². A step of 1
in c costs Δ² / 12 wherever it is taken, so one step for all is the best for a sum of errors
(reverse water-filling). S is kept in 8 bits with a scale for each row; coefficients are found
from the rounded S by least squares in the metric, so rounding costs nothing but its effect on the
span.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables, need_table


@dataclass(frozen=True)
class Predictor:
    """x̂ = s P from what the decoder already has; its offset is in the mean.

    P [predictor width, width] is int8 times an fp16 scale for each column: the residual is taken
    with the rounded P.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __call__(self, predictors: torch.Tensor) -> torch.Tensor:
        """[..., predictor width] → [..., width], float32."""
        return (predictors.float() @ self.weight.to(predictors.device).float()) * self.scale.to(
            predictors.device
        ).float()

    def to(self, device: torch.device) -> Predictor:
        """The same on a device."""
        return Predictor(self.weight.to(device), self.scale.to(device))


@dataclass(frozen=True)
class Klt:
    """c = (x − μ) A and x = μ + c S; `mean` and `analysis` [width, rank] in float32.

    S [rank, width] is `synthesis`, int8, times `scale` [rank], float32.
    """

    mean: torch.Tensor
    synthesis: torch.Tensor
    scale: torch.Tensor
    analysis: torch.Tensor

    @classmethod
    def of(cls, mean: torch.Tensor, rows: torch.Tensor, metric: torch.Tensor) -> Klt:
        """Round the rows of S [rank, width], float64, and find the analysis that suits what is left
        of them.
        """
        scale = (rows.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny).float()
        synthesis = (rows / scale.double()[:, None]).round().clamp(-127, 127).to(torch.int8)
        return cls(
            mean, synthesis, scale, analysis(synthesis.double() * scale.double()[:, None], metric)
        )

    @property
    def rank(self) -> int:
        """Coefficients of a row."""
        return int(self.synthesis.shape[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [..., width] → coefficients [..., rank], float32."""
        return (x - self.mean.to(x.device)) @ self.analysis.to(x.device)

    def inverse(self, c: torch.Tensor) -> torch.Tensor:
        """Coefficients → rows."""
        return (
            self.mean.to(c.device)
            + (c * self.scale.to(c.device)) @ self.synthesis.to(c.device).float()
        )

    def kept(self, order: NDArray[np.int64]) -> Klt:
        """These coefficients alone, in this order."""
        return Klt(
            self.mean,
            self.synthesis[order],
            self.scale[order],
            self.analysis[:, order].contiguous(),
        )

    def to(self, device: torch.device) -> Klt:
        """The same on a device."""
        return Klt(*(t.to(device) for t in (self.mean, self.synthesis, self.scale, self.analysis)))

    def tables(self) -> Tables:
        """What a decoder needs; `analysis` it does not."""
        return {
            "mean": self.mean.numpy(),
            "synthesis": self.synthesis.numpy(),
            "synthesis_scale": self.scale.numpy(),
        }


@dataclass(frozen=True)
class Spectrum:
    """The transform before a step is chosen: rows of S for Δ = 1 and the variances of their
    coefficients.
    """

    mean: torch.Tensor
    rows: torch.Tensor
    variances: torch.Tensor
    metric: torch.Tensor
    scale: float
    """What `metric` was divided by: an error of 1 in a coefficient costs that much in the metric
    that was given.
    """

    def with_step(self, step: float, smallest: float) -> Klt:
        """The transform for Δ = `step`; coefficients whose deviation is below `smallest` steps are
        left out.
        """
        keep = max(1, int((self.variances.sqrt() > smallest * step).sum()))
        return Klt.of(self.mean, self.rows[:keep] * step, self.metric)


def spectrum(rows: torch.Tensor, metric: torch.Tensor, ridge: float = 1e-4) -> Spectrum:
    """From sampled rows [n, width] and a metric [width, width], all in float64 on the CPU."""
    mean = rows.mean(dim=0).float()
    eye = torch.eye(metric.shape[0], dtype=torch.float64)
    scale = float(metric.diagonal().mean())
    metric = metric / scale + ridge * eye
    lower = torch.linalg.cholesky(metric)
    white = (rows - mean.double()) @ lower
    values, vectors = torch.linalg.eigh(white.T @ white / max(1, rows.shape[0]))
    order = torch.arange(values.numel() - 1, -1, -1)
    inverse = torch.linalg.solve_triangular(lower, vectors[:, order].T, upper=False, left=False)
    return Spectrum(mean, inverse, values[order].clamp_min(0), metric, scale)


def analysis(rows: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """A = M Sᵀ (S M Sᵀ)⁻¹ of S = `rows`, float64: coefficients with the least error in the metric,
    float32.
    """
    right = metric @ rows.T
    lower = torch.linalg.cholesky(rows @ right)
    return torch.cholesky_solve(right.T, lower).T.contiguous().float()


def predictor_of(rows: torch.Tensor, predictors: torch.Tensor, ridge: float = 1e-3) -> Predictor:
    """Least squares of rows [n, width] on predictor rows [n, predictor width], with a ridge in
    proportion to each predictor channel.
    """
    near = predictors - predictors.mean(dim=0)
    gram = near.T @ near
    gram.diagonal().mul_(1 + ridge).clamp_min_(1e-12)
    solved = torch.linalg.solve(gram, near.T @ (rows - rows.mean(dim=0)))
    scale = (solved.abs().amax(dim=0) / 127).clamp_min(2.0**-24).half()
    return Predictor((solved / scale.double()).round().clamp(-127, 127).to(torch.int8), scale)


def restored(site: LayerStream, tables: Tables, who: str) -> Klt:
    """The transform from its tables."""

    def get(name: str) -> torch.Tensor:
        return torch.from_numpy(need_table(tables, name, who, site))

    return Klt(get("mean"), get("synthesis"), get("synthesis_scale"), get("analysis"))


def sampled_rows(samples: Samples, who: str) -> torch.Tensor:
    """The sampled tokens as rows [n, width], float64 on the CPU."""
    return rows_of(samples.need_x(who)[None].cpu())[0].double()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[blocks, heads, tokens, head_dim] → [blocks, tokens, heads · head_dim]."""
    return x.transpose(1, 2).flatten(2)
