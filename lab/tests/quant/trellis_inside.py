"""Runs in a Python that has Triton, whose interpreter stands in for a GPU: the kernel of the
trellis against torch.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from assay_lab.trellis import _FAR, STATES, by_torch, trellis
from assay_lab.trellis_kernel import block_of, search

generator = torch.Generator().manual_seed(1)
for states in STATES:
    code, block = trellis(states), block_of(8, states)
    for rows, count in ((1, 1), (3, 3), (33, 2 * block)):
        costs = torch.rand(rows, count, 2, 2, generator=generator)
        if rows == 33:
            costs[10:] = (costs[10:] * 3).floor()  # equally cheap paths
            costs[30, 1, 1, 0], costs[31, 0], costs[32] = float("nan"), float("inf"), float("nan")
        found = search(costs, code, far=_FAR)
        assert found.dtype == torch.uint8
        assert torch.equal(found, by_torch(costs, code)), (states, rows, count)
assert search(torch.empty(0, 8, 2, 2), trellis(8), far=_FAR).shape == (0, 8)
assert search(torch.empty(2, 0, 2, 2), trellis(8), far=_FAR).shape == (2, 0)
sys.stdout.write("equal\n")
