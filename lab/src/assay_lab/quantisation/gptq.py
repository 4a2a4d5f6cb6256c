"""GPTQ: weights rounded one column after another, each error spread over the columns to come.

A linear layer y = W x is rounded so that ‖(W − Ŵ) X‖² over calibration inputs X is small, not ‖W
− Ŵ‖². With H = X Xᵀ the best answer to a column's rounding error (w_j − ŵ_j) is to move each
later column k by −(w_j − ŵ_j) U_jk / U_jj, where U is the upper Cholesky factor of H⁻¹. Scale and
zero point of a group are those of the weights as they are when its first column is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

BLOCK = 128
"""Columns whose errors are gathered before they are spread over the rest: the same result as one by
one, in fewer products.
"""


def gptq(
    weight: torch.Tensor,
    gram: torch.Tensor,
    bits: int,
    group: int,
    *,
    damping: float = 0.01,
    symmetric: bool = False,
) -> torch.Tensor:
    """`weight` [out, in] on an integer grid with a scale (and a zero point) a group of inputs, in
    its own type.

    `gram` [in, in] is X Xᵀ over the inputs; `damping` times the mean of its diagonal is added to
    it. Inputs that never are anything but zero get the weight zero.
    """
    w, width = weight.float().clone(), weight.shape[1]
    h = gram.float().clone()
    dead = h.diagonal() == 0
    h.diagonal()[dead] = 1.0
    w[:, dead] = 0.0
    h.diagonal().add_(damping * h.diagonal().mean())
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)
    scale = zero = torch.zeros(())
    levels, top = 2**bits - 1, 2 ** (bits - 1)
    block = group * max(
        1, BLOCK // group
    )  # whole groups: their weights are up to date when the first column is reached
    for begin in range(0, width, block):
        end = min(begin + block, width)
        part, errors = w[:, begin:end], torch.zeros_like(w[:, begin:end])
        for j in range(begin, end):
            if j % group == 0:
                own = w[:, j : j + group]
                if symmetric:
                    scale, zero = own.abs().amax(1) / (top - 1), torch.full_like(own[:, 0], top)
                else:
                    lo, hi = own.amin(1).clamp_max(0.0), own.amax(1).clamp_min(0.0)
                    scale = (hi - lo) / levels
                    zero = torch.round(-lo / scale.clamp_min(1e-30))
                scale = scale.clamp_min(1e-30)
            column = w[:, j].clone()
            w[:, j] = ((torch.round(column / scale) + zero).clamp(0, levels) - zero) * scale
            error = (column - w[:, j]) / upper[j, j]
            errors[:, j - begin] = error
            part[:, j - begin + 1 :].addr_(error, upper[j, j + 1 : end], alpha=-1)
        w[:, end:] -= errors @ upper[begin:end, end:]
    return w.to(weight.dtype)


class _Enough(Exception):
    """The block has seen its inputs."""


@contextmanager
def _grams(block: Any, layers: Iterable[Any]) -> Iterator[dict[Any, torch.Tensor]]:
    """X Xᵀ of each linear layer, summed while the model runs up to the end of `block`."""
    sums: dict[Any, torch.Tensor] = {}

    def seen(layer: Any, given: tuple[torch.Tensor, ...]) -> None:
        x = given[0].flatten(0, -2).float()
        own = x.T @ x
        sums[layer] = sums[layer] + own if layer in sums else own

    def stop(*_: Any) -> None:
        raise _Enough

    hooks = [layer.register_forward_pre_hook(seen) for layer in layers] + [
        block.register_forward_hook(stop)
    ]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()  # type: ignore[untyped-decorator]
def gptq_model(
    model: Any,
    texts: Iterable[list[int]],
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Round every linear layer of a model of transformers in place, block by block, each on what
    the rounded ones before hand it.

    `texts` are token ids to calibrate on. The output head is left as it is.
    """
    inner, texts = model.base_model, list(texts)
    for block in inner.layers:
        layers = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
        with _grams(block, layers) as sums:
            for ids in texts:
                with suppress(_Enough):
                    inner(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
        for layer in layers:
            layer.weight.copy_(
                gptq(layer.weight, sums.pop(layer), bits, group, symmetric=symmetric)
            )
        advance()
