"""Rotations, levels, packing, lattices and PolarQuant weights against independent references."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from scipy.integrate import quad
from scipy.linalg import hadamard
from scipy.stats import norm

from assay.errors import UsageError
from assay_lab.kv.codecs.lattice_points import nearest, number, point, points
from assay_lab.quantisation.hadamard import Rotation, lengths, wht
from assay_lab.quantisation.levels import empirical_levels, gaussian_levels, mixed_widths
from assay_lab.quantisation.packing import pack, packed_bytes, unpack
from assay_lab.quantisation.polar import polar_bytes, polar_quantise, polar_round_trip
from assay_lab.quantisation.randomness import (
    normal_of_words,
    random_normal,
    random_signs,
    random_words,
    signs_on,
    words_of_keys,
)


@pytest.mark.parametrize("width", [1, 3, 64, 80, 256])
def test_lengths_do_not_hang_on_the_order_of_adding(width: int) -> None:
    x = torch.rand(500, width, generator=torch.Generator().manual_seed(width)) * 2 - 1
    found = lengths(x)
    exact = [math.sqrt(math.fsum(v * v for v in row)) for row in x.double().tolist()]
    np.testing.assert_allclose(found.numpy(), exact, rtol=2e-7)
    assert torch.equal(found, lengths(x.flip(-1))) and torch.equal(found[:7], lengths(x[:7]))
    assert torch.equal(found, lengths(x.T.contiguous().T))


def test_signs_are_those_of_their_seed() -> None:
    device = torch.device("cpu")
    with torch.inference_mode():
        first = signs_on(5, 64, device)
    assert torch.equal(first, random_signs(5, 64))
    assert not torch.equal(first, signs_on(6, 64, device))
    assert not first.is_inference()


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_wht_is_the_sylvester_matrix(n: int) -> None:
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n))
    expected = x.numpy() @ hadamard(n) / math.sqrt(n)
    np.testing.assert_allclose(wht(x).numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 3, 64), (7, 1), (0, 8)])
def test_wht_leaves_its_input(shape: tuple[int, ...]) -> None:
    x = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(5)))
    before = x.detach().clone()
    torch.testing.assert_close(wht(wht(x)), before)
    assert torch.equal(x, before)


@given(length=st.integers(1, 300), seed=st.integers(0, 2**64 - 1))
def test_a_rotation_keeps_lengths_and_is_undone(length: int, seed: int) -> None:
    rotation = Rotation(length, seed)
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    y = rotation.forward(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotation.inverse(y), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [80, 96, 192])
def test_a_rotation_of_any_length_spreads_a_single_value(length: int) -> None:
    y = Rotation(length, 3).forward(torch.eye(length))
    assert float(y.abs().max()) < 0.5


def test_words_are_those_of_splitmix64() -> None:
    # First outputs of the reference implementation for seed 1234567.
    assert random_words(1234567, 3).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    words = random_words(7, 64)
    expected = [-1.0 if int(w) >> 63 else 1.0 for w in words]
    assert random_signs(7, 64).tolist() == expected


def test_words_of_many_keys_are_those_of_each() -> None:
    keys = [0, 7, 2**63 - 1, -1, -(2**63)]
    found = words_of_keys(torch.tensor(keys), 5)
    for key, row in zip(keys, found.tolist(), strict=True):
        assert [word % 2**64 for word in row] == random_words(key, 5).tolist()


def test_normal_values_of_words_are_normal() -> None:
    from scipy import stats

    x = normal_of_words(words_of_keys(torch.arange(1000), 100)).flatten().double().numpy()
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert np.isfinite(x).all() and abs(stats.kurtosis(x)) < 0.05


def test_normal_values_are_normal() -> None:
    x = random_normal(5, 100_001).double()
    assert abs(float(x.mean())) < 0.02 and abs(float(x.std()) - 1) < 0.02
    assert abs(float((x**4).mean()) - 3) < 0.15


def error_of(levels: int) -> float:
    """Mean squared error of the Gaussian quantiser: what its cells lose of N(0, 1), by
    integration.
    """
    c = gaussian_levels(levels)
    edges = np.concatenate([[-np.inf], (c[1:] + c[:-1]) / 2, [np.inf]])
    return float(1.0 - (np.diff(norm.cdf(edges)) * c**2).sum())


@pytest.mark.parametrize("levels", [2, 3, 4, 8, 16])
def test_gaussian_levels_are_means_of_their_cells(levels: int) -> None:
    c = gaussian_levels(levels)
    edges = [-np.inf, *((c[1:] + c[:-1]) / 2), np.inf]
    for level, (a, b) in zip(c, itertools.pairwise(edges), strict=True):
        a, b = max(a, -12), min(b, 12)
        mass = quad(norm.pdf, a, b, epsabs=1e-13)[0]
        mean = quad(lambda t: t * norm.pdf(t), a, b, epsabs=1e-13)[0] / mass
        assert abs(level - mean) < 1e-8
    error = sum(
        quad(lambda t, level=level: (t - level) ** 2 * norm.pdf(t), max(a, -12), min(b, 12))[0]
        for level, (a, b) in zip(c, itertools.pairwise(edges), strict=True)
    )
    assert abs(error_of(levels) - error) < 1e-8


def test_gaussian_levels_of_the_literature() -> None:
    # Max (1960), table I: N = 4 and N = 8.
    np.testing.assert_allclose(gaussian_levels(4)[2:], [0.4528, 1.510], atol=5e-4)
    np.testing.assert_allclose(gaussian_levels(8)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=5e-4)
    assert error_of(4) == pytest.approx(0.1175, abs=5e-5)


def test_many_levels_follow_the_high_rate_law() -> None:
    # Panter and Dite: error → (√3 π / 2) / N².
    assert error_of(1024) * 1024**2 == pytest.approx(math.sqrt(3) * math.pi / 2, rel=0.01)
    assert np.all(np.diff(gaussian_levels(1024)) > 0)


def test_empirical_levels_beat_gaussian_ones_on_what_they_saw() -> None:
    x = np.random.default_rng(0).laplace(size=20_000)
    x /= x.std()
    own, other = empirical_levels(x, 8), gaussian_levels(8)

    def error(levels: np.ndarray) -> float:
        return float((np.abs(x[:, None] - levels).min(axis=1) ** 2).mean())

    assert error(own) < 0.95 * error(other)
    np.testing.assert_allclose(
        empirical_levels(np.random.default_rng(1).normal(size=200_000), 4),
        gaussian_levels(4),
        atol=0.02,
    )


def test_fractional_bits() -> None:
    assert mixed_widths(3.5, 64) == (3, 32)
    assert mixed_widths(4, 80) == (4, 0)
    with pytest.raises(UsageError):
        mixed_widths(0.5, 64)


@given(
    width=st.integers(1, 16),
    rows=st.integers(1, 3),
    count=st.integers(0, 70),
    kind=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    seed=st.integers(0, 2**32),
)
def test_packing_agrees_with_a_string_of_bits(
    width: int, rows: int, count: int, kind: torch.dtype, seed: int
) -> None:
    top = min(2**16, 2 ** (8 * kind.itemsize - kind.is_signed))
    values = torch.randint(0, top, (rows, count), generator=torch.Generator().manual_seed(seed)).to(
        kind
    )
    packed = pack(values, width)
    kept = [[v % 2**width for v in row] for row in values.tolist()]  # higher bits are ignored
    for row, data in zip(kept, packed, strict=True):
        bits = "".join(format(v, f"0{width}b")[::-1] for v in row)
        bits += "0" * (-len(bits) % 8)
        assert data.numpy().tobytes() == bytes(
            int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8)
        )
    assert packed.shape == (rows, packed_bytes(count, width))
    for fewer in (count, max(count - 3, 0)):
        back = unpack(packed, width, fewer)
        assert back.dtype == (torch.uint8 if width <= 8 else torch.int32)
        assert back.tolist() == [row[:fewer] for row in kept]


def test_columns_of_a_wider_tensor_are_packed_too() -> None:
    values = torch.arange(60).reshape(3, 20)
    for width in (3, 8, 11, 16):
        part = values.T[4:].T
        assert unpack(pack(part, width)[:, :], width, 16).tolist() == (part % 2**width).tolist()


def test_packed_bytes_are_golden() -> None:
    values = torch.arange(8)
    assert pack(values, 3).numpy().tobytes().hex() == "88c6fa"
    assert pack(values, 5).numpy().tobytes().hex() == "2088418a39"
    with pytest.raises(UsageError):
        unpack(torch.zeros(2, dtype=torch.uint8), 3, 8)


@pytest.mark.parametrize(("lattice", "q"), [("D4", 1), ("D4", 2), ("D4", 3)])
def test_points_of_d4_are_numbered_without_a_gap(lattice: str, q: int) -> None:
    cube = torch.tensor(list(itertools.product(range(-q, q + 1), repeat=4)), dtype=torch.float32)
    inside = cube[cube.sum(-1) % 2 == 0]
    assert len(inside) == points(lattice, q)
    assert sorted(number(inside, lattice, q).tolist()) == list(range(len(inside)))
    assert torch.equal(point(number(inside, lattice, q), lattice, q), inside)


def test_points_of_e8_are_numbered_without_a_gap() -> None:
    whole = torch.tensor(list(itertools.product(range(-1, 2), repeat=8)), dtype=torch.float32)
    half = torch.tensor(list(itertools.product((-0.5, 0.5), repeat=8)))
    inside = torch.cat([whole[whole.sum(-1) % 2 == 0], half[half.sum(-1) % 2 == 0]])
    assert len(inside) == points("E8", 1)
    assert sorted(number(inside, "E8", 1).tolist()) == list(range(len(inside)))
    assert torch.equal(point(number(inside, "E8", 1), "E8", 1), inside)
    last = torch.tensor([points("E8", 110) - 1])
    assert torch.equal(number(point(last, "E8", 110), "E8", 110), last)


@pytest.mark.parametrize(("lattice", "q"), [("D4", 2), ("E8", 1)])
def test_the_nearest_point_is_the_nearest(lattice: str, q: int) -> None:
    every = point(torch.arange(points(lattice, q)), lattice, q)
    y = (torch.rand(300, every.shape[-1], generator=torch.Generator().manual_seed(1)) * 2 - 1) * q
    found = nearest(y, lattice, q)
    best = torch.cdist(y.double(), every.double()).min(dim=1).values
    torch.testing.assert_close((y - found).double().norm(dim=-1), best, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_polar_weights_are_as_far_as_lloyd_max_says(bits: int) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    error = float(
        (polar_round_trip(weight, bits) - weight).square().mean() / weight.square().mean()
    )
    assert error == pytest.approx(error_of(2**bits), rel=0.1)
    assert polar_bytes(64, 512, bits) == 64 * (512 * bits // 8 + 2 * 4)
    with pytest.raises(UsageError):
        polar_round_trip(weight, 1)


def test_polar_quantise_changes_the_projections_alone() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
    )
    model = transformers.LlamaForCausalLM(config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    size = polar_quantise(model, 4, 64)
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == {
        n for n in before if "proj" in n
    }
    assert size < 0.6 * sum(4 * p.numel() for p in before.values())
