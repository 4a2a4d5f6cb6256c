"""Sums in whole numbers, and tables that stay on their device."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from assay.lab.quant.hadamard import (
    random_signs,
    signs_on,
    sum_of_squares,
)


@pytest.mark.parametrize("width", [1, 3, 64, 80, 256])
@pytest.mark.parametrize("largest", [1.0, 32.0])
def test_sums_of_squares(width: int, largest: float) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (torch.rand(500, width, generator=generator) * 2 - 1) * largest**0.5
    wanted = x.double().square().sum(-1)
    found = sum_of_squares(x, largest)
    assert float((found.double() - wanted).abs().max()) <= width * largest * 2.0**-22
    assert torch.equal(found, sum_of_squares(x.flip(-1), largest))
    assert torch.equal(found[:7], sum_of_squares(x[:7], largest))
    full = torch.full((1, width), largest**0.5)
    assert float(sum_of_squares(full, largest)) == pytest.approx(width * largest, rel=1e-6)
    assert float(sum_of_squares(torch.zeros(1, width), largest)) == 0.0


def test_signs_are_those_of_their_seed() -> None:
    device = torch.device("cpu")
    with torch.inference_mode():
        first = signs_on(5, 64, device)
    assert torch.equal(first, random_signs(5, 64))
    assert not torch.equal(first, signs_on(6, 64, device))
    assert not first.is_inference()
