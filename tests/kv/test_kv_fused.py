"""The fused round trip of the plain rotation codec."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from assay.demo.servers import vllm_python
from assay.lab.kv.codec import (
    BlockCoder,
    Site,
)
from assay.lab.kv.codecs.hadamard import (
    MOST_LEVELS,
    Hadamard,
    HadamardCoder,
    _edges,
    _levels,
)

HERE = Path(__file__).parent


@pytest.mark.engine
def test_kernel_gives_the_bits_of_torch() -> None:
    done = subprocess.run(
        [str(vllm_python()), str(HERE / "kv_fused_inside.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


def test_a_kernel_that_fails_or_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    coder = HadamardCoder(Site("k", 0, 30, 2, 64), Hadamard(bits=4))
    asked = torch.device("cpu"), torch.bfloat16, torch.bfloat16

    def plain(x: torch.Tensor, dtype: torch.dtype, more: float = 0.0) -> torch.Tensor:
        return (BlockCoder.reconstruct(coder, x.transpose(1, 2)).transpose(1, 2) + more).to(dtype)

    monkeypatch.setattr(coder, "_fused", plain)
    assert coder._same_by_both(*asked)
    monkeypatch.setattr(coder, "_fused", lambda x, dtype: plain(x, dtype, 1e-6))
    with pytest.warns(RuntimeWarning, match="other values"):
        assert not coder._same_by_both(*asked)

    def broken(x: object, dtype: object) -> object:
        raise OSError("no compiler")

    monkeypatch.setattr(coder, "_fused", broken)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert not coder._same_by_both(*asked)


def test_levels_and_edges_are_the_same_on_both_sides_of_zero() -> None:
    # The kernel looks one side up.
    for bits in range(1, MOST_LEVELS.bit_length()):
        levels, edges = (table(bits, torch.device("cpu")) for table in (_levels, _edges))
        assert torch.equal(levels, -levels.flip(0)) and torch.equal(edges, -edges.flip(0))
        assert len(levels) == 2**bits and edges[len(levels) // 2 - 1] == 0
