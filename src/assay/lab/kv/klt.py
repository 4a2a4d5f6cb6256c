"""The transform of the `pca` codec: decorrelated coefficients in which plain squared error is error that matters.

All KV heads of a token form one row x of `width` values. With mean μ, metric M = L Lᵀ (error e costs e M eᵀ) and
covariance Σ of the samples, Lᵀ Σ L = U Λ Uᵀ gives the Karhunen-Loève transform in that metric: x − μ = Δ c S with
S = Uᵀ L⁻¹, coefficients c with variances Λ / Δ². A step of 1 in c costs Δ² / 12 wherever it is taken, so one step for
all is the best for a sum of errors (reverse water-filling). S is kept in 8 bits with a scale for each row; coefficients
are found from the rounded S by least squares in the metric, so rounding costs nothing but its effect on the span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.lab.kv.codec import Tables, need_table

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from assay.lab.kv.codec import Samples, Site


@dataclass(frozen=True)
class Predictor:
    """x̂ = side P from what the decoder already has; its offset is in the mean.

    P [side width, width] is int8 times an fp16 scale for each column: the residual is taken with the rounded P.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __call__(self, side: torch.Tensor) -> torch.Tensor:
        """[..., side width] → [..., width], float32."""
        return (side.float() @ self.weight.to(side.device).float()) * self.scale.to(side.device).float()

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
        """Round the rows of S [rank, width], float64, and find the analysis that suits what is left of them."""
        import torch

        scale = (rows.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny).float()
        synthesis = (rows / scale.double()[:, None]).round().clamp(-127, 127).to(torch.int8)
        return cls(mean, synthesis, scale, analysis(synthesis.double() * scale.double()[:, None], metric))

    @property
    def rank(self) -> int:
        """Coefficients of a row."""
        return int(self.synthesis.shape[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [..., width] → coefficients [..., rank], float32."""
        return (x - self.mean.to(x.device)) @ self.analysis.to(x.device)

    def inverse(self, c: torch.Tensor) -> torch.Tensor:
        """Coefficients → rows."""
        return self.mean.to(c.device) + (c * self.scale.to(c.device)) @ self.synthesis.to(c.device).float()

    def kept(self, order: NDArray[np.int64]) -> Klt:
        """These coefficients alone, in this order."""
        return Klt(self.mean, self.synthesis[order], self.scale[order], self.analysis[:, order].contiguous())

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
    """The transform before a step is chosen: rows of S for Δ = 1 and the variances of their coefficients."""

    mean: torch.Tensor
    rows: torch.Tensor
    variances: torch.Tensor
    metric: torch.Tensor
    scale: float
    """What `metric` was divided by: an error of 1 in a coefficient costs that much in the metric that was given."""

    def with_step(self, step: float, smallest: float) -> Klt:
        """The transform for Δ = `step`; coefficients whose deviation is below `smallest` steps are left out."""
        keep = max(1, int((self.variances.sqrt() > smallest * step).sum()))
        return Klt.of(self.mean, self.rows[:keep] * step, self.metric)


def spectrum(rows: torch.Tensor, metric: torch.Tensor, ridge: float = 1e-4) -> Spectrum:
    """From sampled rows [n, width] and a metric [width, width], all in float64 on the CPU."""
    import torch

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
    """A = M Sᵀ (S M Sᵀ)⁻¹ of S = `rows`, float64: coefficients with the least error in the metric, float32."""
    import torch

    right = metric @ rows.T
    lower = torch.linalg.cholesky(rows @ right)
    return torch.cholesky_solve(right.T, lower).T.contiguous().float()


def predictor(rows: torch.Tensor, side: torch.Tensor, ridge: float = 1e-3) -> Predictor:
    """Least squares of rows [n, width] on side rows [n, side width], with a ridge in proportion to each side channel."""
    import torch

    near = side - side.mean(dim=0)
    gram = near.T @ near
    gram.diagonal().mul_(1 + ridge).clamp_min_(1e-12)
    solved = torch.linalg.solve(gram, near.T @ (rows - rows.mean(dim=0)))
    scale = (solved.abs().amax(dim=0) / 127).clamp_min(2.0**-24).half()
    return Predictor((solved / scale.double()).round().clamp(-127, 127).to(torch.int8), scale)


def restore(site: Site, tables: Tables, who: str) -> Klt:
    """The transform from its tables."""
    import torch

    def get(name: str) -> torch.Tensor:
        return torch.from_numpy(need_table(tables, name, who, site))

    return Klt(get("mean"), get("synthesis"), get("synthesis_scale"), get("analysis"))


def sampled_rows(samples: Samples, who: str) -> torch.Tensor:
    """The sampled tokens as rows [n, width], float64 on the CPU."""
    return rows_of(samples.need_x(who)[None].cpu())[0].double()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[blocks, heads, tokens, head_dim] → [blocks, tokens, heads · head_dim]."""
    return x.transpose(1, 2).flatten(2)


# -----------------------------------------------------------------------------
# Eigenvectors of many small symmetric matrices at once, by Jacobi rotations that are plain batched products.
#
# LAPACK's routines as torch calls them on a GPU go through a batch one matrix after the other once it is larger than 32;
# thousands of blocks of a cache then take seconds. Here each round turns n / 2 disjoint pairs of coordinates of every
# matrix (round-robin order, Brent and Luk, SIAM J. Sci. Stat. Comput. 6 (1985) 69), n − 1 rounds are a sweep over all
# pairs, and after six to nine sweeps nothing is left beside the diagonal.

SWEEPS = 30
"""More than is ever needed: convergence is quadratic."""


def eigh_batched(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.linalg.eigh` of symmetric [sets, n, n]: values [sets, n] rising, vectors in columns [sets, n, n].

    Stops when the largest value beside the diagonal is below n rounding errors of the largest of the matrix.
    """
    import torch

    sets, n, _ = matrices.shape
    odd = n % 2
    # A coordinate more, with nothing in it, makes the number of pairs whole.
    a = torch.nn.functional.pad(matrices, (0, odd, 0, odd))
    width = n + odd
    half = width // 2
    vectors = torch.eye(width, dtype=a.dtype, device=a.device).repeat(sets, 1, 1)
    pair, stay, cross = (t.to(a.device) for t in _round(half))
    stay, cross = stay.to(a.dtype), cross.to(a.dtype)
    limit = width * torch.finfo(a.dtype).eps * a.abs().amax(dim=(1, 2))
    for _ in range(SWEEPS):
        if width < 2 or bool((_beside(a) <= limit).all()):
            break
        for _ in range(width - 1):
            angle = _angles(a, half)[:, None, pair]
            turn = angle.cos() * stay + angle.sin() * cross
            a = turn.mT @ a @ turn
            vectors = vectors @ turn
    values, vectors = a.diagonal(dim1=1, dim2=2), vectors[:, :n]
    if odd:
        # The empty coordinate never mixes with others; it goes to the end, where it is cut off.
        empty = vectors.abs().amax(dim=1) == 0
        values = torch.where(empty, torch.inf, values)
    values, rising = values.sort(dim=-1)
    vectors = vectors.gather(2, rising[:, None].expand(-1, n, -1))
    return values[:, :n], vectors[..., :n]


def _angles(a: torch.Tensor, half: int) -> torch.Tensor:
    """The angles [sets, half], at most π / 4, that coordinates i and half + i are turned by to make a[i, half + i] 0."""
    import torch

    first, second = a.diagonal(dim1=1, dim2=2).split(half, dim=1)
    between = a[:, :half, half:].diagonal(dim1=1, dim2=2)
    # 0 / 0 is a pair with nothing between and nothing to choose; x / 0 is π / 4.
    ratio = (2 * between / (second - first)).nan_to_num(0.0, torch.inf, -torch.inf)
    return ratio.atan() / 2


def _round(half: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which pair each coordinate of the next round comes from [n], and the matrices [n, n] that carry cosines and sines.

    The rotation of coordinates i and half + i by θ has cos θ on the diagonal, sin θ at (i, half + i) and −sin θ at
    (half + i, i). Its columns are put into the order of the next round: all but the first move on by one around the
    table.
    """
    import torch

    top, bottom = list(range(half)), list(range(half, 2 * half))
    order = torch.tensor(top + bottom if half == 1 else [0, half, *top[1:-1], *bottom[1:], top[-1]])
    eye = torch.eye(2 * half)
    swapped = torch.cat([-eye[half:], eye[:half]]).T
    return order % half, eye[:, order], swapped[:, order]


def _beside(a: torch.Tensor) -> torch.Tensor:
    """The largest value beside the diagonal of each matrix [sets]."""
    import torch

    return (a - torch.diag_embed(a.diagonal(dim1=1, dim2=2))).abs().amax(dim=(1, 2))
