"""When the kernel of statistics is used, and what it gives."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from assay.demo.servers import vllm_python
from assay.fidelity import metrics_gpu as fused
from assay.fidelity.row_sums import (
    RowSums,
    row_sums,
)

HERE = Path(__file__).parent


@pytest.mark.engine
def test_the_kernel_gives_the_statistics_of_float64() -> None:
    done = subprocess.run(
        [str(vllm_python()), str(HERE / "statistics_inside.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "No module named 'triton'" in done.stderr:
        pytest.skip("vLLM's environment has no Triton here")
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]


ROWS = (*torch.randn(2, 6, 800, generator=torch.Generator().manual_seed(2)), torch.arange(6))


def changed(name: str, by: float) -> RowSums:
    sums = row_sums(*ROWS)[0]
    return replace(sums, **{name: getattr(sums, name) + by})


def test_a_kernel_that_gives_the_same_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_NO_TRITON", raising=False)
    monkeypatch.setattr(fused, "_fused", lambda *rows: changed("p_dot", 1e-4))  # of a sum of some 800
    assert fused.same_by_both(*ROWS)
    monkeypatch.setenv("ASSAY_NO_TRITON", "1")
    assert not fused.same_by_both(*ROWS)


@pytest.mark.parametrize("name", ["p_sum", "q_sum", "p_dot", "q_dot", "gold_a", "gold_b", "ref_max"])
@pytest.mark.parametrize("by", [0.5, float("nan")])
def test_a_kernel_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch, name: str, by: float) -> None:
    monkeypatch.delenv("ASSAY_NO_TRITON", raising=False)
    monkeypatch.setattr(fused, "_fused", lambda *rows: changed(name, by))
    with pytest.warns(RuntimeWarning, match="other values"):
        assert not fused.same_by_both(*ROWS)


def test_another_likeliest_token_or_a_failure_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASSAY_NO_TRITON", raising=False)
    sums = row_sums(*ROWS)[0]
    monkeypatch.setattr(fused, "_fused", lambda *rows: replace(sums, same_best=~sums.same_best))
    with pytest.warns(RuntimeWarning, match="other values"):
        assert not fused.same_by_both(*ROWS)

    def broken(*rows: object) -> RowSums:
        raise OSError("no compiler")

    monkeypatch.setattr(fused, "_fused", broken)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert not fused.same_by_both(*ROWS)
    assert fused.fused_statistics() is None  # nothing was on a GPU
