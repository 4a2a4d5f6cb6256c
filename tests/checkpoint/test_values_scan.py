"""The value scan against plain references, whatever the chunks."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from assay.checkpoint.tensors import Tensor
from assay.checkpoint.values.floats import FLOAT_FORMATS, largest_magnitude, to_float
from assay.checkpoint.values.holes import PAGE_BYTES, Holes
from assay.checkpoint.values.scan import CHUNK, scan, scan_tensor
from assay.checkpoint.values.statistics import Statistics

WORDS = {
    "BF16": np.uint16,
    "F16": np.uint16,
    "F32": np.uint32,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
}


def gathered(words: np.ndarray, dtype: str, *cuts: int) -> Statistics:
    """Statistics of an array that comes in pieces."""
    statistics = Statistics("t", dtype, words.shape)
    for start, end in itertools.pairwise((0, *cuts, words.size)):
        statistics.add(memoryview(words[start:end].tobytes()))
    statistics.finish()
    return statistics


@given(st.data(), st.sampled_from(sorted(WORDS)))
def test_counts_are_those_of_numpy(data: st.DataObject, dtype: str) -> None:
    words = data.draw(arrays(WORDS[dtype], st.integers(1, 200)))
    cut = data.draw(st.integers(0, words.size))
    seen, values = gathered(words, dtype, cut), to_float(words, dtype)
    real = {"F16": lambda: words.view(np.float16), "F32": lambda: words.view(np.float32)}.get(
        dtype, lambda: values
    )()
    assert seen.nan + seen.inf == np.count_nonzero(~np.isfinite(real))
    if FLOAT_FORMATS[dtype].infinity and dtype != "F8_E5M2":
        assert seen.inf == np.count_nonzero(np.isinf(real))
    finite = np.abs(values[np.isfinite(real)])
    assert seen.absmax == (finite.max() if finite.size else 0)
    assert seen.all_zero == bool(np.all(real == 0))
    assert seen.constant == bool(np.all(words == words[0]))
    bad = np.flatnonzero(~np.isfinite(real))
    assert seen.first_bad == (bad[0] if bad.size else None)


@given(arrays(np.uint16, st.integers(1, 50)))
def test_the_largest_magnitude_needs_no_mask(words: np.ndarray) -> None:
    assert largest_magnitude(words, FLOAT_FORMATS["BF16"]) == (words & 0x7FFF).max()


def test_a_type_without_sign_is_not_masked() -> None:
    words = np.array([0x80, 0xFE], np.uint8)
    assert largest_magnitude(words, FLOAT_FORMATS["F8_E8M0"]) == 0xFE
    assert gathered(np.array([127, 130], np.uint8), "F8_E8M0").absmax == 8
    assert gathered(np.array([127, 255], np.uint8), "F8_E8M0").nan == 1


@pytest.mark.parametrize(
    ("word", "value"), [(0x00, 0.0), (0x38, 1.0), (0x7E, 448.0), (0x01, 2.0**-9), (0xB8, -1.0)]
)
def test_e4m3_by_its_published_values(word: int, value: float) -> None:
    assert to_float(np.array([word], np.uint8), "F8_E4M3")[0] == value


@pytest.mark.parametrize(
    ("word", "value"), [(0x3C, 1.0), (0x7B, 57344.0), (0x01, 2.0**-16), (0xC0, -2.0)]
)
def test_e5m2_by_its_published_values(word: int, value: float) -> None:
    assert to_float(np.array([word], np.uint8), "F8_E5M2")[0] == value


def longest_run(words: np.ndarray) -> tuple[int, int] | None:
    """The reference: runs of zeros counted one by one."""
    best, position = (0, 0), 0
    for zero, group in itertools.groupby(words == 0):
        length = len(list(group))
        if zero and length > best[1]:
            best = (position, length)
        position += length
    return best if best[1] * words.itemsize >= PAGE_BYTES else None


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 6000)), min_size=1, max_size=5), st.data(),
)  # fmt: skip
def test_holes_are_found_across_chunks(runs: list[tuple[bool, int]], data: st.DataObject) -> None:
    words = np.concatenate([np.full(n, 0 if zero else 7, np.uint16) for zero, n in runs])
    cuts = sorted(data.draw(st.lists(st.integers(0, words.size), max_size=3)))
    holes = Holes()
    for start, end in itertools.pairwise((0, *cuts, words.size)):
        part = words[start:end]
        if part.size:
            holes.add(part, start)
    expected = longest_run(words)
    assert (holes.longest is None) == (expected is None)
    if expected is not None and holes.longest is not None:
        start, length = holes.longest
        assert not words[start : start + length].any()
        # Of several long runs inside one chunk the one with most whole blocks is kept, at most two
        # blocks shorter.
        assert length > expected[1] - 2 * PAGE_BYTES // 2 // 2


def test_a_file_that_ends_early_is_named_and_the_rest_scanned(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(np.ones(1000, np.float32).tobytes())
    whole = Tensor("whole", "F32", (500,), "w.bin", 0, 2000)
    cut = Tensor("cut", "F32", (1000,), "w.bin", 2000, 6000)
    statistics, problems = scan([(whole, path), (cut, path)])
    assert [s.name for s in statistics] == ["whole"]
    assert problems[0][0] == "cut"
    assert "ends 2000 bytes before" in problems[0][1]


def test_several_chunks_make_one_tensor(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(CHUNK // 4 * 2 + 77).astype(np.float32)
    values[CHUNK // 4 + 5] = np.inf
    path = tmp_path / "w.bin"
    path.write_bytes(b"head" + values.tobytes())
    done: list[int] = []
    seen = scan_tensor(
        Tensor("w", "F32", values.shape, "w.bin", 4, 4 + values.nbytes), path, done.append
    )
    assert (seen.elements, sum(done), seen.inf) == (values.size, values.nbytes, 1)
    assert seen.first_bad == CHUNK // 4 + 5
    finite = values[np.isfinite(values)]
    assert seen.absmax == np.abs(finite).max()
    assert seen.mean == pytest.approx(finite.mean(), abs=0.03)
    assert seen.rms == pytest.approx((finite**2).mean() ** 0.5, rel=0.03)


def test_denormals_are_a_share_of_the_sample() -> None:
    words = np.array([0x0001, 0x0002, 0x0000, 0x3F80] * 64, np.uint16)
    assert gathered(words, "BF16").denormal_share == 0.5
