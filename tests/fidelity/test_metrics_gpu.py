"""When the kernel of statistics is used, and what it gives."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import assay.fidelity
from assay.demo import vllm_python
from assay.fidelity.metrics.row_sums import RowSums, _stacked_sums, kernel_of

HERE = Path(__file__).parent
NAMES = list(RowSums.__dataclass_fields__)
ROWS = (*torch.randn(2, 6, 800, generator=torch.Generator().manual_seed(2)), torch.arange(6))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module with its decision; where Triton is not installed, a stand-in lets it be
    imported.
    """
    monkeypatch.delenv("ASSAY_NO_TRITON", raising=False)
    try:
        import triton  # noqa: F401
    except ImportError:
        stub, language = ModuleType("triton"), ModuleType("triton.language")
        stub.jit, stub.language = lambda function: function, language  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "triton", stub)
        monkeypatch.setitem(sys.modules, "triton.language", language)
    module = importlib.import_module("assay.fidelity.metrics.fused_gpu")
    monkeypatch.setattr(module, "_SAME", {})
    yield module
    _forget()


def _forget() -> None:
    sys.modules.pop("assay.fidelity.metrics.fused_gpu", None)
    vars(assay.fidelity.metrics).pop("fused_gpu", None)


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


def changed(name: str, by: float) -> torch.Tensor:
    sums = _stacked_sums(*ROWS)
    sums[NAMES.index(name)] += by
    return sums


def test_a_kernel_that_gives_the_same_is_used(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernel, "_on_gpu", lambda *rows: changed("p_dot", 1e-4)
    )  # of a sum of some 800
    assert kernel.fused_statistics() is None
    assert torch.equal(kernel.sums(*ROWS, _stacked_sums), changed("p_dot", 1e-4))
    assert kernel.fused_statistics()
    assert kernel.sums(ROWS[0].double(), *ROWS[1:], _stacked_sums) is None  # no kernel of float64
    assert kernel.sums(ROWS[0].T.contiguous().T, *ROWS[1:], _stacked_sums) is None
    monkeypatch.setenv("ASSAY_NO_TRITON", "1")
    assert not kernel.same_by_both(*ROWS, _stacked_sums)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "same_best"])
@pytest.mark.parametrize("by", [0.5, float("nan")])
def test_a_kernel_that_differs_is_not_used(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, name: str, by: float
) -> None:
    monkeypatch.setattr(kernel, "_on_gpu", lambda *rows: changed(name, by))
    with pytest.warns(RuntimeWarning, match="other values"):
        assert kernel.sums(*ROWS, _stacked_sums) is None
    assert kernel.fused_statistics() is False


def test_another_likeliest_token_or_a_failure_is_not_used(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = _stacked_sums(*ROWS)
    sums[-1] = 1 - sums[-1]
    monkeypatch.setattr(kernel, "_on_gpu", lambda *rows: sums)
    with pytest.warns(RuntimeWarning, match="other values"):
        assert not kernel.same_by_both(*ROWS, _stacked_sums)

    def broken(*rows: object) -> torch.Tensor:
        raise OSError("no compiler")

    monkeypatch.setattr(kernel, "_on_gpu", broken)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert not kernel.same_by_both(*ROWS, _stacked_sums)


def test_without_triton_torch_takes_the_statistics_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    _forget()
    kernel_of.cache_clear()
    with pytest.warns(RuntimeWarning, match="by torch"):
        assert kernel_of() is None
    kernel_of.cache_clear()
