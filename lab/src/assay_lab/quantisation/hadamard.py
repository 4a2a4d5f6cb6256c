"""The fast Walsh-Hadamard transform, and the random rotation made of it."""

from __future__ import annotations

import torch

from assay_lab.quantisation.randomness import signs_on


def lengths(x: torch.Tensor) -> torch.Tensor:
    """‖x‖ over the last dimension, float32, added up in float64: no order of adding changes it, on
    any device.
    """
    return x.square().sum(-1, dtype=torch.float64).sqrt().float()


def wht(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal transform of the last dimension, whose length is a power of two; its own
    inverse.
    """
    n = x.shape[-1]
    # Values of one place next to each other: each stage adds long rows at any distance of
    # its pairs.
    rows = x.detach().reshape(-1, n).T.clone(memory_format=torch.contiguous_format)
    other = torch.empty_like(rows)
    size = 1
    while size < n:
        pairs, both = (t.view(n // (2 * size), 2, size, -1) for t in (rows, other))
        torch.add(pairs[:, 0], pairs[:, 1], out=both[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=both[:, 1])
        rows, other = other, rows
        size *= 2
    return rows.mul_(n**-0.5).T.contiguous().view(x.shape)


class Rotation:
    """An orthonormal rotation of vectors of any length, from a seed.

    Where the length is no power of two, the front is rotated up to the largest power of two that
    fits, then the back likewise, with other signs: every value is mixed with all others at no more
    values than there were.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        part = 1 << max(length.bit_length() - 1, 0)
        self._spans = (
            [(0, part)] if part == length else [(0, part), (length - part, length), (0, part)]
        )
        self.seeds = [seed + i for i in range(len(self._spans))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., length] rotated."""
        for (lo, hi), seed in zip(self._spans, self.seeds, strict=True):
            x = _span(x * signs_on(seed, self.length, x.device), lo, hi)
        return x

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        """The rotation undone."""
        for (lo, hi), seed in zip(reversed(self._spans), reversed(self.seeds), strict=True):
            y = _span(y, lo, hi) * signs_on(seed, self.length, y.device)
        return y


def _span(x: torch.Tensor, lo: int, hi: int) -> torch.Tensor:
    if lo == 0 and hi == x.shape[-1]:
        return wht(x)
    return torch.cat([x[..., :lo], wht(x[..., lo:hi]), x[..., hi:]], dim=-1)
