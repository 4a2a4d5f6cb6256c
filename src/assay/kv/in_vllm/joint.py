"""K and V of a layer through one kernel, where both streams are coded alike: what the hook's speed hangs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from assay.kv.codecs.hadamard import HadamardCoder
from assay.kv.coder import StreamCoder
from assay.kv.fitted import FittedCodec

if TYPE_CHECKING:
    import torch


class Joint:
    """The common round trip of a layer's K and V."""

    def __init__(self, coder: HadamardCoder) -> None:
        self._coder = coder

    def __call__(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V [tokens, h, d] as the codec gives them back, in their type; None where there is no kernel for them."""
        both = in_one(k, v)
        if both is not None:
            found = self._coder.round_trip(both, k.dtype)
            return None if found is None else (found[0], found[1])
        first = self._coder.round_trip(k[None], k.dtype)
        second = None if first is None else self._coder.round_trip(v[None], v.dtype)
        return None if first is None or second is None else (first[0], second[0])


def joint_of(k: StreamCoder | None, v: StreamCoder | None) -> Joint | None:
    """The round trip of two streams that one codec codes token by token; None where they are not alike."""
    if not (isinstance(k, FittedCodec) and isinstance(v, FittedCodec)):
        return None
    coder = k.coder
    return Joint(coder) if isinstance(coder, HadamardCoder) and coder.alike(v.coder) else None


def in_one(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """Both as one view [2, tokens, h, d], which slices of a fused projection allow; None where they do not."""
    apart = v.storage_offset() - k.storage_offset()
    if apart < 0 or k.stride() != v.stride() or k.shape != v.shape or k.dtype != v.dtype:
        return None
    if k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
        return None
    return k.as_strided((2, *k.shape), (apart, *k.stride()))
