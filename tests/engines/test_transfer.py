"""Tensors that come back together are those that would come back one by one."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from assay.engines.scoring import copied_together, to_device, to_host


def test_one_copy_brings_all() -> None:
    parts = [torch.randn(3), torch.randn(2, 4), torch.randn(0), torch.tensor(7.0)]
    copies = []

    def copy(joined: torch.Tensor) -> torch.Tensor:
        copies.append(joined)
        return joined.clone()

    found = copied_together(parts, copy)
    assert len(copies) == 1
    assert all(
        torch.equal(one, other) and one.shape == other.shape
        for one, other in zip(found, parts, strict=True)
    )


def test_what_is_in_the_main_memory_stays_where_it_is() -> None:
    here = torch.randn(4)
    assert to_device(here, torch.device("cpu")) is here
    assert to_host([{"a": here}, {}])[0]["a"] is here
