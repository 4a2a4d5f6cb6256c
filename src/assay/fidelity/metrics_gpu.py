"""Whether the kernel of `statistics_kernel` takes the sums: on a GPU, once it gave what torch gives of real rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from assay.fidelity.row_sums import RowSums, row_sums

if TYPE_CHECKING:
    import torch

_COMPARED_ROWS = 64
_SAME: dict[tuple[object, ...], bool] = {}


def sums(ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor) -> RowSums:
    """Sums of whole distributions [n, V], by the quickest way that is known to be right on their device."""
    if ref.is_cuda and _is_plain(ref) and _is_plain(cand):
        key = (ref.device, ref.dtype, cand.dtype, ref.shape[-1])
        if key not in _SAME:
            _SAME[key] = same_by_both(ref[:_COMPARED_ROWS], cand[:_COMPARED_ROWS], gold[:_COMPARED_ROWS])
        if _SAME[key]:
            return _fused(ref, cand, gold)
    return row_sums(ref, cand, gold)[0]


def fused_statistics() -> bool | None:
    """Whether the kernel is in use; None where no logits were on a GPU yet."""
    return all(_SAME.values()) if _SAME else None


def same_by_both(ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor) -> bool:
    """Compare kernel and torch on these rows; a warning says why the kernel is not used."""
    if os.environ.get("ASSAY_NO_TRITON"):
        return False
    return gives_the_same(
        "the fused kernel of statistics",
        lambda: _alike(_fused(ref, cand, gold), row_sums(ref, cand, gold)[0]),
    )


def _alike(one: RowSums, other: RowSums) -> bool:
    """Whether the sums are those of the same logits but for rounding; rows that are not finite must be the same rows."""
    import torch

    usable = [(x.p_sum.isfinite() & x.q_sum.isfinite()) for x in (one, other)]
    if not torch.equal(*usable):
        return False
    # A sum over V terms of size up to p_sum · |a − b| is as exact as those terms, however small it is itself.
    scale = torch.maximum(other.p_sum, other.q_sum)[usable[1]]
    for field in fields(RowSums):
        x, y = getattr(one, field.name)[usable[0]], getattr(other, field.name)[usable[1]]
        if field.name == "same_best":
            if not torch.equal(x, y):
                return False
        elif not ((x == y) | ((x - y).abs() <= 1e-5 * (scale + y.abs()))).all():
            return False
    return True


def _is_plain(logits: torch.Tensor) -> bool:
    import torch

    return logits.stride(-1) == 1 and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _fused(ref: torch.Tensor, cand: torch.Tensor, gold: torch.Tensor) -> RowSums:
    import torch

    from assay.fidelity.statistics_kernel import fused_row_sums

    with torch.cuda.device_of(ref):  # Triton launches on the current GPU
        return fused_row_sums(ref, cand, gold)


def gives_the_same(what: str, compare: Callable[[], bool]) -> bool:
    """What `compare` says of `what`; False where it fails. A warning says why `what` is not used."""
    try:
        same, why = compare(), "it gives other values than torch here"
    except Exception as error:  # compilers fail in their own ways, and torch can do the same
        same, why = False, f"{type(error).__name__}: {error}"[:300]
    if not same:
        warnings.warn(f"{what} is not used: {why}", RuntimeWarning, stacklevel=3)
    return same
