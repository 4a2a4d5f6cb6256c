"""The compiled loops of the plain rotation codec behind tensors: levels and factors of vectors, and vectors of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.lab.quant.compiled import in_parts
from assay.lab.quant.hadamard import signs_on, squares_unit
from assay.lab.quant.levels import grid_of

if TYPE_CHECKING:
    import numpy as np
    import torch

MOST_BITS = 8
"""Of a level: it is kept in a byte."""
_WIDTHS = (16, 32, 64, 128, 256, 512)
_PART = 512
"""Vectors for which a second thread is worth waking."""


@dataclass(frozen=True)
class LevelTable:
    """What the loops need of 2^b levels: the grid of `assay.lab.quant.levels`, squares in whole units, the levels."""

    search: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Any, Any, np.ndarray[Any, Any]]
    values: np.ndarray[Any, Any]

    @classmethod
    def of(cls, levels: torch.Tensor, edges: torch.Tensor, unit: float) -> LevelTable | None:
        """Of rising levels and the edges between them, float32; None where there are too many, or no grid parts them."""
        import numpy as np

        if levels.shape[0] > 2**MOST_BITS:
            return None
        if edges.shape[0] < 2:  # one cell
            below, upper = np.zeros(1, np.uint32), edges.numpy()
            begin, per = 0.0, 0.0
        else:
            grid = grid_of(edges)
            if grid is None:
                return None
            below, upper, begin, per = grid[0].numpy().astype(np.uint32), grid[1].numpy(), grid[2], grid[3]
        # 256 entries each, so that no byte leads beyond them.
        values, squares = np.full(256, np.nan, np.float32), np.zeros(256, np.int32)
        values[: levels.shape[0]] = levels.numpy()
        squares[: levels.shape[0]] = levels.square().mul_(1 / unit).add_(0.5).int().numpy()
        return cls((below, upper, np.float32(begin), np.float32(per), squares), values)


@dataclass(frozen=True)
class Loops:
    """Rotation by `seed` of vectors of `width` values; levels of the first `narrow` and of the other places."""

    width: int
    seed: int
    narrow: int
    low: LevelTable
    high: LevelTable
    largest: float
    """What no level's square is above."""

    @staticmethod
    def take(width: int) -> bool:
        """Whether vectors of this length are taken."""
        return width in _WIDTHS

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """[a, b, c, width] → levels uint8 [a, b, c, narrow] and [a, b, c, width − narrow], factors float32 [a, b, c].

        None where a vector holds what is no number.
        """
        import numpy as np
        import torch

        from assay.lab.quant.hadamard_loops import encode

        x = x.detach()
        is_bf16 = x.dtype == torch.bfloat16
        if not is_bf16:
            x = x.float()
        if x.stride(-1) != 1:
            x = x.contiguous()
        each = 1 if is_bf16 else 2
        reach = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
        source = x.as_strided((reach,), (1,)).view(torch.uint16).numpy()
        sizes, strides = tuple(x.shape[:-1]), tuple(each * step for step in x.stride()[:-1])
        low = torch.empty(*sizes, self.narrow, dtype=torch.uint8)
        high = torch.empty(*sizes, self.width - self.narrow, dtype=torch.uint8)
        factors = torch.empty(sizes)
        fixed = (
            signs_on(self.seed, self.width, x.device).numpy(),
            (np.float32(self.width**0.5), np.float32(self.width**-0.5)),
            (np.float32(squares_unit(self.width, 1.0)), np.float32(squares_unit(self.width, self.largest))),
            self.narrow,
            self.low.search,
            self.high.search,
            low.view(-1).numpy(),
            high.view(-1).numpy(),
            factors.view(-1).numpy(),
        )
        good = in_parts(
            lambda lo, hi: encode(source, is_bf16, sizes, strides, lo, hi, *fixed), factors.numel(), _PART
        )
        return (low, high, factors) if all(good) else None

    def decode(self, low: torch.Tensor, high: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Levels and factors as `encode` gives them → [a, b, c, width], float32, [b, a, c, width] in memory."""
        import numpy as np
        import torch

        from assay.lab.quant.hadamard_loops import decode

        a, b, c = sizes = tuple(factors.shape)
        out = torch.empty(b, a, c, self.width)
        fixed = (
            low.reshape(-1).numpy(),
            high.reshape(-1).numpy(),
            self.low.values,
            self.high.values,
            signs_on(self.seed, self.width, out.device).numpy(),
            np.float32(self.width**-0.5),
            factors.reshape(-1).numpy(),
            sizes,
            (c * self.width, a * c * self.width, self.width),
        )
        into = out.view(-1).numpy()
        in_parts(lambda lo, hi: decode(*fixed, lo, hi, into), factors.numel(), _PART)
        return out.transpose(0, 1)
