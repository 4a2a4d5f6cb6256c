"""Runs in a Python that has Triton, whose interpreter stands in for a GPU: the fused kernel against torch, bit for bit."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from assay.kv.codec import Site
from assay.kv.codecs.hadamard import Hadamard, HadamardCoder

for width, bits in ((64, 4), (128, 2), (32, 5)):
    coder = HadamardCoder(Site("k", 0, 30, 3, width), Hadamard(bits=bits))
    generator = torch.Generator().manual_seed(bits)
    # Tokens first in memory, as an engine has them, and more than one of the kernel's groups of rows.
    x = torch.randn(70, 3, width, generator=generator) * torch.logspace(-6, 4, 70)[:, None, None]
    x[5], x[6, 1, 3] = 0, 3e4
    x = x.bfloat16().transpose(0, 1)[None]
    assert torch.equal(coder._fused(x), coder.dequantise(coder.quantise(x))), (width, bits)
    shifted = x.clone()
    shifted[0, 0, 9, 0] += 1.0
    assert not torch.equal(coder._fused(shifted), coder.dequantise(coder.quantise(x)))
    # Too large for fp16: the norm has an exponent of its own.
    huge = torch.randn(1, 3, 8, width, generator=generator) * 1e30
    back = coder._fused(huge)
    error = float((back.double() - huge.double()).norm() / huge.double().norm())
    assert error < {2: 0.4, 4: 0.12, 5: 0.06}[bits], error
    broken = x.clone()
    broken[0, 1, 4, 7] = float("nan")
    assert bool(coder._fused(broken)[0, 1, 4].isnan().all())
sys.stdout.write("equal\n")
