"""A head changed in place: as loading faults would leave it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from assay_lab.heads.model import AnyHead, RmsNorm
from assay_lab.heads.targets import Change, fp8_rows
from assay_lab.quantisation.integers import quantise_dequantise


def _quantised(change: Change) -> Callable[[AnyHead], None]:
    def apply(head: AnyHead) -> None:
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(change(module.weight))

    return apply


def _missing(head: AnyHead) -> None:
    """Every tensor as an engine makes it where the file has none: small random numbers, norms of
    ones.
    """
    torch.manual_seed(11)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.02)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, RmsNorm):
            module.weight.fill_(1.0)


def _zeros(head: AnyHead) -> None:
    for p in head.parameters():
        p.zero_()


def _wrong_norm(head: AnyHead) -> None:
    for module in head.modules():
        if isinstance(module, RmsNorm):
            module.convention = "plus_one"


def _scales_ignored(head: AnyHead) -> None:
    """An int4 head of which the codes are loaded and the scales are not: each row is divided by its
    scale.
    """
    for module in head.modules():
        if isinstance(module, nn.Linear):
            top = module.weight.abs().amax(-1, keepdim=True).clamp_min(1e-12)
            module.weight.copy_(torch.round(module.weight * 7 / top))


def _missing_layer(head: AnyHead) -> None:
    """Only the layer is lost; `fc`, norm and output are loaded."""
    torch.manual_seed(11)
    for module in head.midlayer.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0, 0.02)


HEADS: Mapping[str, Callable[[AnyHead], None]] = {
    "bf16": lambda head: None,
    "fp8": _quantised(fp8_rows),
    "int8": _quantised(lambda w: quantise_dequantise(w, 8, w.shape[1], symmetric=True)),
    "int4": _quantised(lambda w: quantise_dequantise(w, 4, 128)),
    "missing": _missing,
    "missing-layer": _missing_layer,
    "zeros": _zeros,
    "wrong-norm": _wrong_norm,
    "scales-ignored": _scales_ignored,
    "embedding-swapped": lambda head: None,
}
WORKING = ("bf16", "fp8", "int8", "int4")
"""Heads that are loaded as they were meant; all others are dead by construction."""


def head_state(head: AnyHead, name: str) -> AnyHead:
    """A copy of the head in the state `name`."""
    found = copy.deepcopy(head)
    with torch.no_grad():
        HEADS[name](found)
    return found
