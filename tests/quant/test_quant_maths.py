"""Rotation, tables and packing against independent references."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.quant.lloyd_max import fitted_levels, gaussian_levels
from assay.quant.packing import pack, packed_bytes, unpack

torch = pytest.importorskip("torch")

from assay.quant.hadamard import fwht, next_power_of_two, random_signs, rotate, rotate_back  # noqa: E402
from assay.quant.lloyd_max import nearest  # noqa: E402


class TestHadamard:
    @pytest.mark.parametrize("n", [1, 2, 8, 64, 256])
    def test_is_the_matrix_of_scipy(self, n: int) -> None:
        x = torch.randn(5, 3, n, dtype=torch.float64)
        expected = x.numpy() @ scipy.linalg.hadamard(n) / np.sqrt(n)
        np.testing.assert_allclose(fwht(x).numpy(), expected, atol=1e-12)

    def test_rotation_keeps_lengths_and_comes_back(self) -> None:
        x = torch.randn(7, 128)
        y = rotate(x, 5)
        torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
        torch.testing.assert_close(rotate_back(y, 5), x)
        assert not torch.allclose(y, rotate(x, 6))

    def test_signs_are_fixed_for_ever(self) -> None:
        assert random_signs(16, 0).tolist() == [-1, 1] * 6 + [-1] * 4
        assert abs(random_signs(4096, 1).sum()) < 300

    def test_other_lengths_are_refused(self) -> None:
        with pytest.raises(ValueError, match="power of two"):
            fwht(torch.zeros(12))
        assert [next_power_of_two(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]


class TestLloydMax:
    # Max (1960), table I: half of the levels, by number of levels.
    PUBLISHED: ClassVar[dict[int, list[float]]] = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152],
                 4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]}  # fmt: skip

    @pytest.mark.parametrize("bits", list(PUBLISHED))
    def test_are_those_of_max(self, bits: int) -> None:
        levels = gaussian_levels(bits)
        np.testing.assert_allclose(levels[len(levels) // 2 :], self.PUBLISHED[bits], atol=6e-4)
        np.testing.assert_allclose(levels, -levels[::-1])

    @pytest.mark.parametrize("bits", range(1, 9))
    def test_each_level_is_the_mean_of_its_cell(self, bits: int) -> None:
        levels = gaussian_levels(bits)
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        for level, a, b in zip(levels, edges, edges[1:], strict=False):
            assert scipy.stats.truncnorm.mean(a, b) == pytest.approx(level, abs=1e-7)

    def test_fitted_levels_beat_gaussian_ones_on_other_data(self) -> None:
        samples = np.random.default_rng(0).laplace(size=20_000)
        error = []
        for levels in (gaussian_levels(3), fitted_levels(samples, 3)):
            index = nearest(torch.from_numpy(samples), torch.from_numpy(levels)).numpy()
            error.append(((samples - levels[index]) ** 2).mean())
        assert error[1] < 0.8 * error[0]

    def test_nearest_is_nearest(self) -> None:
        levels = torch.from_numpy(gaussian_levels(4))
        x = torch.randn(1000, dtype=torch.float64)
        assert torch.equal(nearest(x, levels), (x[:, None] - levels).abs().argmin(1))


class TestPacking:
    @given(bits=st.integers(1, 16), count=st.integers(0, 300), seed=st.integers(0, 2**16))
    @settings(max_examples=120, deadline=None)
    def test_comes_back_and_is_as_small_as_said(self, bits: int, count: int, seed: int) -> None:
        codes = np.random.default_rng(seed).integers(0, 2**bits, count)
        data = pack(codes, bits)
        assert len(data) == packed_bytes(count, bits)
        np.testing.assert_array_equal(unpack(data, bits, count), codes)

    @given(bits=st.integers(1, 16), count=st.integers(1, 60), seed=st.integers(0, 2**16))
    @settings(max_examples=60, deadline=None)
    def test_the_order_of_bits_is_the_documented_one(self, bits: int, count: int, seed: int) -> None:
        codes = np.random.default_rng(seed).integers(0, 2**bits, count)
        whole = sum(int(c) << (i * bits) for i, c in enumerate(codes))
        assert pack(codes, bits) == whole.to_bytes(packed_bytes(count, bits), "little")

    def test_golden_bytes(self) -> None:
        assert pack([1, 2, 3, 4, 5, 6, 7, 0], 3).hex() == "d1581f"
        assert pack([0x123, 0xABC], 12).hex() == "23c1ab"

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="3 bits"):
            pack([8], 3)
        with pytest.raises(ValueError, match="bytes"):
            unpack(b"\x00", 3, 8)
