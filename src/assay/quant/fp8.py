"""8-bit floating point (Micikevicius et al., arXiv:2209.05433): rounding to nearest, saturating."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Format = Literal["e4m3", "e5m2"]
"""`e4m3` (4 bits of exponent, up to 448, no infinities) or `e5m2` (up to 57,344)."""


def fp8_dtype(form: Format) -> torch.dtype:
    """The type of torch that holds a format; `e4m3` is the one without infinities."""
    import torch

    return {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[form]


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` (float32 or narrower, any shape) in a floating type, each value the nearest there is, ties to even.

    8-bit floats saturate: what lies beyond the largest value, infinities too, becomes that value, and NaN stays NaN. So
    does NVIDIA's conversion with `__NV_SATFINITE`. Without the bound torch would make infinities of them in e5m2, and NaN
    or 448 in e4m3, as its release has it. Other types are a plain cast, as float16 is anywhere: 70,000 is infinite.
    """
    import torch

    if dtype.itemsize > 1:
        return x.to(dtype)
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


def widen(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x`, any floating type, in a wider one, exactly.

    8-bit floats on a CPU go through a table of their 256 values, which takes a quarter of the time of torch's cast.
    """
    import torch

    if x.dtype.itemsize > 1 or x.device.type != "cpu":
        return x.to(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(x.dtype).to(dtype)
    return table.index_select(0, x.view(torch.uint8).reshape(-1).int()).reshape(x.shape)
