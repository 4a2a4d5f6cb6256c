"""The processor follows its requests through the batch as vLLM moves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_stand_in import install


@pytest.fixture
def forcing(monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch)
    from assay.engines.vllm.forcing import TeacherForcing

    return TeacherForcing(None, torch.device("cpu"), False)


def params(*forced: int) -> SimpleNamespace:
    return SimpleNamespace(extra_args={"assay_forced": list(forced)} if forced else None)


def tell(forcing: Any, removed: Any = (), added: Any = (), moved: Any = ()) -> None:
    forcing.update_state(SimpleNamespace(removed=removed, added=added, moved=moved))


def chosen(forcing: Any, rows: int) -> list[int]:
    logits = torch.zeros(rows, 10)
    logits[:, 9] = 5.0  # what the model would take
    return list(forcing.apply(logits).argmax(-1))


def test_each_row_gets_its_next_token(forcing: Any) -> None:
    first: list[int] = []
    tell(forcing, added=[(0, params(3, 4), None, first), (1, params(), None, [])])
    assert chosen(forcing, 2) == [3, 9]
    first.append(3)
    forcing.update_state(None)
    assert chosen(forcing, 2) == [4, 9]
    assert not forcing.is_argmax_invariant()


def test_rows_are_removed_moved_and_swapped(forcing: Any) -> None:
    import vllm.v1.sample.logits_processor as processors

    way = processors.MoveDirectionality
    tell(
        forcing,
        added=[(0, params(1), None, []), (1, params(2), None, []), (2, params(3), None, [])],
    )
    assert chosen(forcing, 3) == [1, 2, 3]
    tell(forcing, moved=[(0, 2, way.SWAP)])
    assert chosen(forcing, 3) == [3, 2, 1]
    tell(forcing, removed=[0], moved=[(2, 0, way.UNIDIRECTIONAL)])
    assert chosen(forcing, 2) == [1, 2]
    tell(forcing, removed=[1], added=[(1, params(), None, [])])
    assert chosen(forcing, 2) == [1, 9]
    tell(forcing, moved=[(0, 1, way.SWAP)])
    assert chosen(forcing, 2) == [9, 1]


def test_only_the_wanted_token_stays_possible(forcing: Any) -> None:
    tell(forcing, added=[(0, params(7), None, [])])
    row = forcing.apply(torch.zeros(1, 10))[0]
    assert row[7] == 0
    assert row.isneginf().sum() == 9
