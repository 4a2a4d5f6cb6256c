"""8-bit floats against their definition, worked out in float64."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from hypothesis import given
from hypothesis import strategies as st

from assay.engines.hf.cache import cast, fp8_dtype, widen

FORMATS = ("e4m3", "e5m2")


def finite_values(form: str) -> np.ndarray:
    """All finite values ≥ 0 by their code: exponent and mantissa as the paper has them."""
    exponent_bits, mantissa_bits = int(form[1]), int(form[3])
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    # e4m3 gives up one code for NaN, e5m2 its largest exponent for infinity and NaN.
    count = 127 if form == "e4m3" else 2**7 - steps
    exponent, mantissa = np.divmod(np.arange(count), steps)
    normal = (1 + mantissa / steps) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, mantissa / steps * 2.0 ** (1 - bias), normal)


def nearest(x: np.ndarray, form: str) -> np.ndarray:
    """The nearest value, the even code where two are as near; beyond the largest, the largest. `x`
    is float64.
    """
    values = finite_values(form)
    size = np.minimum(np.abs(x), values[-1])
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    low, high = size - values[above - 1], values[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    found = np.where(up, values[above], values[above - 1])
    return np.copysign(np.where(np.isnan(x), np.nan, found), x)


def test_the_largest_values_are_those_of_the_formats() -> None:
    assert [finite_values(form)[-1] for form in FORMATS] == [448, 57344]
    for form in FORMATS:
        codes = torch.arange(len(finite_values(form)), dtype=torch.uint8).view(fp8_dtype(form))
        np.testing.assert_array_equal(codes.double().numpy(), finite_values(form))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits_goes_to_the_nearest(form: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    found = cast(x, fp8_dtype(form)).double().numpy()
    expected = nearest(x.double().numpy(), form)
    np.testing.assert_array_equal(found, expected)
    sure = ~np.isnan(expected)
    np.testing.assert_array_equal(
        np.signbit(found[sure]), np.signbit(expected[sure])
    )  # −0 stays −0


@given(st.lists(st.floats(width=32), min_size=1, max_size=50), st.sampled_from(FORMATS))
def test_float32_goes_to_the_nearest_once(values: list[float], form: str) -> None:
    x = torch.tensor(values)
    once = cast(x, fp8_dtype(form))
    np.testing.assert_array_equal(once.double().numpy(), nearest(x.double().numpy(), form))
    again = cast(once.float(), fp8_dtype(form))
    assert torch.equal(once.view(torch.uint8), again.view(torch.uint8)) or bool(x.isnan().any())


def test_ties_go_to_the_even_code_and_what_is_too_large_to_the_largest() -> None:
    e4m3 = cast(
        torch.tensor([1.0625, 1.1875, 465.0, float("inf"), -1e30, float("nan")]), fp8_dtype("e4m3")
    )
    assert e4m3.float().tolist()[:5] == [1.0, 1.25, 448.0, 448.0, -448.0]
    assert bool(e4m3.float()[5].isnan())
    assert cast(torch.tensor([7e4, float("-inf")]), fp8_dtype("e5m2")).float().tolist() == [
        57344,
        -57344,
    ]
    # 16-bit types are a plain cast.
    assert cast(torch.tensor([7e4]), torch.float16).isinf().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_codes_are_widened_as_torch_does(form: str, dtype: torch.dtype) -> None:
    # A view that is not contiguous, as layers of a cache keep.
    codes = (
        torch.arange(256, dtype=torch.uint8)
        .view(fp8_dtype(form))
        .reshape(2, 8, 16)[:, 1:]
        .transpose(1, 2)
    )
    found = widen(codes, dtype)
    assert found.dtype is dtype
    torch.testing.assert_close(found, codes.to(dtype), rtol=0, atol=0, equal_nan=True)
    kept = codes.to(dtype)
    assert widen(kept, torch.float32).dtype is torch.float32
