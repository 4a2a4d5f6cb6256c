"""Compiled loops against torch, bit for bit, and what happens where they cannot be used."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.lab.kv.codec import Site
from assay.lab.kv.codecs.hadamard import (
    Hadamard,
    HadamardCoder,
)
from assay.lab.quant import (
    compiled,
    packing,
)
from assay.lab.quant.compiled import (
    in_parts,
    is_agreed,
)

KINDS = [torch.bfloat16, torch.float16, torch.float32]
AWKWARD = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-30,
    3e-39,
    6e4,
    1e30,
    -3e37,
    3e38,
    float("inf"),
    float("-inf"),
    float("nan"),
]


def equal(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    """Same types and bits; a NaN is a NaN."""
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan())
        if a.is_floating_point() and not torch.equal(a.isfinite(), torch.ones_like(a, dtype=torch.bool))
        else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(found, wanted, strict=True)
    )


def same_both_ways(coder: HadamardCoder, x: torch.Tensor) -> None:
    assert coder._loops is not None
    parts = coder.quantise(x)
    assert equal(parts, coder._quantised(x))
    low, high, half, exponent = parts
    back = coder.dequantise(parts)
    # Levels of other types are left to torch.
    wanted = coder.dequantise((low.int(), high.int(), half, exponent))
    assert equal((back,), (wanted,))


@settings(max_examples=60, deadline=None)
@given(
    width=st.sampled_from([16, 32, 64, 128, 256, 512]),
    bits=st.one_of(st.integers(1, 8).map(float), st.floats(1, 8)),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40)),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**32),
    awkward=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(AWKWARD)), max_size=3),
)
def test_levels_factors_and_vectors_are_those_of_torch(
    width: int,
    bits: float,
    shape: tuple[int, int, int],
    kind: torch.dtype,
    seed: int,
    awkward: list[tuple[int, float]],
) -> None:
    blocks, heads, tokens = shape
    coder = HadamardCoder(Site("k", 0, 1, heads, width), Hadamard(bits=bits, seed=seed % 3))
    if coder._loops is None:  # more than 8 bits for some places
        assert bits > 7 and coder._narrow < width
        return
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, blocks * tokens, width, generator=generator)
    x = x * torch.logspace(-8, 8, blocks * tokens)[:, None]
    for place, value in awkward:
        x.view(-1)[place % x.numel()] = value
    # A view, as the stream writer makes them: blocks do not lie one after the other.
    same_both_ways(coder, x.to(kind).unflatten(1, (blocks, tokens)).transpose(0, 1))


def test_edges_between_levels_fall_to_the_same_side() -> None:
    """Vectors of two values give rotated values that lie on few places, edges among them."""
    coder = HadamardCoder(Site("k", 0, 1, 1, 64), Hadamard(bits=2))
    sparse = torch.zeros(1, 1, 64 * 64, 64)
    sparse.view(64, 64, 64)[torch.arange(64), :, torch.arange(64)] = 1.0
    sparse.view(64, 64, 64)[:, torch.arange(64), torch.arange(64)] += 1.0
    same_both_ways(coder, sparse)
    same_both_ways(coder, torch.zeros(1, 1, 5, 64))


def test_values_that_lie_anyhow_in_memory() -> None:
    coder = HadamardCoder(Site("k", 0, 1, 2, 64), Hadamard(bits=3))
    x = torch.randn(64, 2, 50, generator=torch.Generator().manual_seed(1))
    same_both_ways(coder, x.permute(1, 2, 0)[None])
    same_both_ways(coder, torch.randn(2, 1, 1, 64).expand(2, 2, 7, 64))
    offset = torch.randn(2 * 9 * 64 + 1).bfloat16()[1:].view(1, 2, 9, 64)
    same_both_ways(coder, offset.requires_grad_())
    with torch.inference_mode():
        same_both_ways(coder, torch.randn(1, 2, 9, 64))


def test_threads_give_what_one_gives() -> None:
    coder = HadamardCoder(Site("k", 0, 1, 2, 64), Hadamard(bits=2.5))
    x = torch.randn(3, 2, 700, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = coder.quantise(x)
        torch.set_num_threads(3)
        assert equal(coder.quantise(x), one)
        same_both_ways(coder, x)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("width", [24, 80, 1024])
def test_other_lengths_are_left_to_torch(width: int) -> None:
    coder = HadamardCoder(Site("k", 0, 1, 2, width), Hadamard(bits=4))
    assert coder._loops is None
    x = torch.randn(1, 2, 5, width)
    assert equal(coder.quantise(x), coder._quantised(x))


@settings(max_examples=100, deadline=None)
@given(
    width=st.integers(1, 7),
    rows=st.integers(1, 3),
    count=st.integers(1, 70),
    kind=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_packing(width: int, rows: int, count: int, kind: torch.dtype, seed: int) -> None:
    values = torch.randint(0, 256, (rows, count), generator=torch.Generator().manual_seed(seed)).to(kind)
    packed = packing._pack_in_loops(values, width)
    assert equal((packed,), (packing._pack(values, width),))
    assert packed.numpy().tolist() == packing.pack_numpy(values.numpy(), width).tolist()
    for fewer in (count, max(count - 3, 0)):
        part = packed[:, : packing.packed_bytes(fewer, width)]
        back = packing._unpack_in_loops(part, width, fewer)
        assert torch.equal(back, (values & (1 << width) - 1)[:, :fewer].to(torch.uint8))


def test_many_values_are_packed_by_loops_and_few_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = packing._pack_in_loops
    monkeypatch.setattr(packing, "_pack_in_loops", lambda v, w: calls.append(w) or plain(v, w))
    values = torch.arange(5000) % 32
    assert torch.equal(packing.pack(values, 5), packing._pack(values, 5))
    assert calls[-1] == 5
    calls.clear()
    packing.pack(values[:100], 5)
    assert not calls
    assert packing.unpack(packing.pack(values, 5), 5, 5000).dtype == torch.int32
    assert packing.unpack(packing.pack(values, 5), 5, 5000, small=True).dtype == torch.uint8


def test_a_loop_that_fails_or_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_SAME", {})
    assert is_agreed("same", lambda: True)
    with pytest.warns(RuntimeWarning, match="other values"):
        assert not is_agreed("other", lambda: False)

    def broken() -> bool:
        raise OSError("no compiler")

    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert not is_agreed("broken", broken)
    monkeypatch.setattr(compiled, "_is_installed", lambda: False)
    assert not is_agreed("missing", broken)


def test_parts_cover_all_once_and_in_order() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert in_parts(lambda lo, hi: (lo, hi), 10, 4) == [(0, 5), (5, 10)]
        assert in_parts(lambda lo, hi: (lo, hi), 10, 3) == [(0, 3), (3, 6), (6, 10)]
        assert in_parts(lambda lo, hi: (lo, hi), 0, 3) == [(0, 0)]
    finally:
        torch.set_num_threads(before)


STREAM = """
import hashlib, torch
from assay.lab.kv.codec import Samples, Site
from assay.lab.kv.spec import parse_recipe
codec = parse_recipe("hadamard(bits=3.5)").fit(Samples(Site("k", 0, 1, 2, 64)))
x = torch.randn(2, 300, 64, generator=torch.Generator().manual_seed(4))
stream = codec.encode(x)
digest = hashlib.sha256(stream + codec.decode(stream).numpy().tobytes()).hexdigest()
"""


def test_without_numba_streams_are_the_same() -> None:
    names: dict[str, str] = {}
    exec(STREAM, names)
    assert "assay.lab.quant.hadamard_loops" in sys.modules
    without = "import sys\nsys.modules['numba'] = None\n" + STREAM + "print(digest)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", without], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == names["digest"], done.stderr
