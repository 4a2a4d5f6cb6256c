"""The values of a GGUF file: plain tensors, and the scales of quantised blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from assay.checkpoint.findings import SHOWN, found, plural, some
from assay.checkpoint.gguf.header import Gguf, GgufTensor
from assay.checkpoint.gguf.types import TYPES
from assay.checkpoint.tensors import Tensor
from assay.verdict import Finding

_PLAIN = {0: "F32", 1: "F16", 30: "BF16", 28: "F64"}

ROWS = 1 << 16


def gguf_jobs(gguf: Gguf) -> Iterator[Tensor]:
    """The tensors of plain floats that lie wholly in the file, slowest dimension first."""
    for tensor in gguf.tensors:
        if tensor.type in _PLAIN and tensor.end <= gguf.size:
            shape = tuple(reversed(tensor.shape))
            yield Tensor(
                tensor.name, _PLAIN[tensor.type], shape, gguf.file, tensor.start, tensor.end
            )


def check_block_scales(gguf: Gguf, path: Path) -> Iterator[Finding]:
    """The float16 scales of quantised blocks: none may be Inf or NaN, and not all of a matrix may
    be zero.
    """
    nonfinite: dict[str, int] = {}
    zero: list[str] = []
    for tensor in gguf.tensors:
        if tensor.type in TYPES and TYPES[tensor.type].scales and tensor.end <= gguf.size:
            bad, used = _count(tensor, path)
            if bad:
                nonfinite[tensor.name] = bad
            if not used and not tensor.name.endswith("token_embd.weight"):
                zero.append(tensor.name)
    if nonfinite:
        title = (
            f"{plural(len(nonfinite), 'tensor')} with block scales that are no numbers:"
            f" {some(nonfinite)}"
        )
        evidence = dict(list(nonfinite.items())[:SHOWN])
        yield found(
            "nonfinite",
            title,
            causes=["an overflow when quantising"],
            tensors=evidence,
            count=len(nonfinite),
        )
    if zero:
        title = f"{plural(len(zero), 'tensor')} whose block scales are all zero: {some(zero)}"
        yield found("tensor_constant", title, tensors=zero[:SHOWN], count=len(zero))


def _count(tensor: GgufTensor, path: Path) -> tuple[int, bool]:
    """(scales that are Inf or NaN, whether any scale is nonzero)."""
    kind = TYPES[tensor.type]
    stored = np.memmap(path, np.uint8, "r", tensor.start, (tensor.end - tensor.start,)).reshape(
        -1, kind.nbytes
    )
    bad, used = 0, False
    for first in range(0, len(stored), ROWS):
        part = stored[first : first + ROWS]
        for offset in kind.scales:
            scale = np.ascontiguousarray(part[:, offset : offset + 2]).view(np.uint16) & 0x7FFF
            bad += int(np.count_nonzero(scale >= 0x7C00))
            used = used or bool(scale.any())
    return bad, used
