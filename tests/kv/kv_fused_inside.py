"""Runs in a Python that has Triton, whose interpreter stands in for a GPU: the fused kernel against torch, bit for bit."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.runtime import interpreter

from assay.lab.kv.codec import Site
from assay.lab.kv.codecs.hadamard import _LARGEST, Hadamard, HadamardCoder, _edges, _levels
from assay.lab.quant.hadamard import signs_on
from assay.lab.quant.hadamard_kernel import RoundTrip

convert = interpreter._convert_float


def rounded(data, given, wanted, mode):
    """bf16 as a GPU rounds it: the interpreter cuts the bits off."""
    if wanted.name != "bf16":
        return convert(data, given, wanted, mode)
    return torch.from_numpy(data).bfloat16().view(torch.int16).numpy()


def fused(coder, x):
    """Blocks [1, heads, tokens, d] through the kernel."""
    return coder._fused(x.transpose(1, 2), torch.float32).transpose(1, 2)


interpreter._convert_float = rounded
cpu = torch.device("cpu")

for width, bits, tokens in ((64, 4, 70), (128, 2, 24), (32, 5, 24)):
    coder = HadamardCoder(Site("k", 0, 30, 3, width), Hadamard(bits=bits))
    generator = torch.Generator().manual_seed(bits)
    # Tokens first in memory, as an engine has them, and more than one of the kernel's groups of rows.
    x = torch.randn(tokens, 3, width, generator=generator) * torch.logspace(-6, 4, tokens)[:, None, None]
    x[5], x[6, 1, 3] = 0, 3e4
    x = x.bfloat16().transpose(0, 1)[None]
    assert torch.equal(fused(coder, x), coder.dequantise(coder.quantise(x))), (width, bits)
    shifted = x.clone()
    shifted[0, 0, 9, 0] += 1.0
    assert not torch.equal(fused(coder, shifted), coder.dequantise(coder.quantise(x)))
    # Too large for fp16: the norm has an exponent of its own.
    huge = torch.randn(1, 3, 8, width, generator=generator) * 1e30
    back = fused(coder, huge)
    error = float((back.double() - huge.double()).norm() / huge.double().norm())
    assert error < {2: 0.4, 4: 0.12, 5: 0.06}[bits], error
    broken = x.clone()
    broken[0, 1, 4, 7] = float("nan")
    assert bool(fused(coder, broken)[0, 1, 4].isnan().all())

# K and V as slices of one fused projection, in the engine's own type, cut in several ways.
for width, bits, ways in ((64, 4, ((None, 1), (8, 4))), (16, 1, ((None, 1),)), (256, 3, ((None, 1),))):
    coder = HadamardCoder(Site("k", 0, 30, 3, width), Hadamard(bits=bits))
    states = torch.randn(21, 15 * width, generator=torch.Generator().manual_seed(width))
    states = (states * torch.logspace(-3, 3, 21)[:, None]).bfloat16()
    both = states[:, 9 * width :].view(21, 2, 3, width).transpose(0, 1)
    wanted = coder.dequantise(coder.quantise(both.transpose(1, 2))).transpose(1, 2)
    tables = signs_on(1, width, cpu), _levels(bits, cpu), _edges(bits, cpu)
    for lanes, warps in ways:
        for dtype in (torch.bfloat16, torch.float32):
            got = RoundTrip(*tables, largest=_LARGEST, lanes=lanes, warps=warps)(both, dtype)
            assert got.is_contiguous() and torch.equal(got, wanted.to(dtype)), (width, bits, lanes, dtype)
sys.stdout.write("equal\n")
