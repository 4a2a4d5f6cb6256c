"""The quick searches of the trellis against torch's, bit for bit, and when they are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.demo import vllm_python
from assay.engines.vllm.path import packages_alone
from assay_lab import trellis as module
from assay_lab.trellis import STATES, by_torch, cheapest_path, trellis

HERE = Path(__file__).parent
AWKWARD = [0.0, -0.0, 1e-42, 1e29, 1e31, -3.0, float("inf"), float("-inf"), float("nan")]


@settings(max_examples=80, deadline=None)
@given(
    states=st.sampled_from(STATES),
    rows=st.integers(0, 40),
    count=st.integers(0, 30),
    steps=st.sampled_from([2, 5, 2**24]),
    seed=st.integers(0, 2**32),
    awkward=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(AWKWARD)), max_size=6),
)
def test_loops_find_the_paths_of_torch(
    states: int, rows: int, count: int, steps: int, seed: int, awkward: list[tuple[int, float]]
) -> None:
    """Few steps of cost make many paths equally cheap."""
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(0, steps, (rows, count, 2, 2), generator=generator) / steps
    for place, value in awkward if costs.numel() else []:
        costs.view(-1)[place % costs.numel()] = value
    found = module._in_loops(costs, trellis(states))
    assert found.dtype == torch.uint8
    assert torch.equal(found, by_torch(costs, trellis(states)))


def test_costs_that_lie_anyhow_in_memory_and_threads() -> None:
    pytest.importorskip("numba")
    costs = torch.rand(7, 2, 2, 600, generator=torch.Generator().manual_seed(1)).permute(3, 0, 2, 1)
    wanted = by_torch(costs, trellis(8))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(module._in_loops(costs, trellis(8)), wanted)
    finally:
        torch.set_num_threads(before)
    with torch.inference_mode():
        assert torch.equal(cheapest_path(costs.clone(), trellis(8)), wanted)
    assert torch.equal(cheapest_path(costs.clone().requires_grad_(), trellis(8)), wanted)


def test_loops_are_used_for_float32_once_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    calls: list[int] = []
    plain = module._in_loops
    monkeypatch.setattr(module, "_SAME", {})
    monkeypatch.setattr(module, "_in_loops", lambda c, t: calls.append(len(c)) or plain(c, t))
    costs = torch.rand(3, 9, 2, 2)
    cheapest_path(costs, trellis(4))
    assert calls[-1] == 3
    before = len(calls)
    assert torch.equal(
        cheapest_path(costs.double(), trellis(4)), by_torch(costs.double(), trellis(4))
    )
    assert len(calls) == before

    def wrong(costs: torch.Tensor, code: object) -> torch.Tensor:
        return plain(costs.nan_to_num(), code)  # another way with what is no number

    monkeypatch.setattr(module, "_SAME", {})
    monkeypatch.setattr(module, "_in_loops", wrong)
    with pytest.warns(RuntimeWarning, match="other values"):
        found = cheapest_path(costs, trellis(4))
    assert torch.equal(found, by_torch(costs, trellis(4)))


def test_a_search_is_used_where_it_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAME", {})
    costs = torch.rand(3, 9, 2, 2)

    def other(costs: torch.Tensor, code: module.Trellis) -> torch.Tensor:
        return by_torch(costs, code) ^ 1

    assert module._finds_the_same(by_torch, costs, trellis(8))
    assert module._finds_the_same(other, costs, trellis(8))  # asked once
    with pytest.warns(RuntimeWarning, match="of 4 states is not used"):
        assert not module._finds_the_same(other, costs, trellis(4))
    with pytest.warns(RuntimeWarning, match="of 8 states is not used"):
        assert not module._finds_the_same(
            other, costs[:, 1:], trellis(8)
        )  # other blocks, another kernel


def test_without_numba_torch_searches_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAME", {})
    monkeypatch.setitem(sys.modules, "assay_lab.trellis_loops", None)
    costs = torch.rand(3, 9, 2, 2)
    with pytest.warns(RuntimeWarning, match="trellis_loops"):
        found = cheapest_path(costs, trellis(4))
    assert torch.equal(found, by_torch(costs, trellis(4)))


@pytest.mark.engine
def test_the_kernel_finds_the_paths_of_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(vllm_python()), "-W", "ignore", str(HERE / "trellis_inside.py")],
        env={**os.environ, "PYTHONPATH": str(packages_alone(tmp_path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "No module named 'triton'" in done.stderr:
        pytest.skip("vLLM's environment has no Triton here")
    assert done.stdout.strip().endswith("equal"), done.stderr[-3000:]
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.engine
@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_and_stays_in_registers(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(vllm_python()), "-W", "ignore", str(HERE / "trellis_compiled.py")],
        env={**os.environ, "PYTHONPATH": str(packages_alone(tmp_path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "No module named 'triton'" in done.stderr:
        pytest.skip("vLLM's environment has no Triton here")
    assert done.stdout.strip().endswith("compiled"), done.stderr[-3000:]
