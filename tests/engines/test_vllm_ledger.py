"""Rows are booked by request and position; what is missing, doubled, foreign or not the window's
own is found out.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engines.vllm.ledger import Fed, RowLedger
from assay.errors import AssayError

TOKENS = {5: np.arange(10, 20, dtype=np.int32), 9: np.arange(30, 40, dtype=np.int32)}


def fed(key: int, lo: int, hi: int) -> Fed:
    return Fed(key, lo, TOKENS[key][lo:hi])


@given(st.integers(0, 8), st.lists(st.integers(1, 8), unique=True), st.booleans())
def test_any_blocks_and_order_give_every_row(first: int, cuts: list[int], turned: bool) -> None:
    edges = sorted({0, 9, *cuts})
    blocks = tuple(pairwise(edges))
    ledger = RowLedger(TOKENS, first, blocks)
    buffer = np.full((2 * ledger.rows, 1), -1)
    for lo, hi in blocks:
        order = (9, 5) if turned else (5, 9)
        states = np.concatenate([TOKENS[key][lo:hi] for key in order])[
            :, None
        ]  # a state is its own token
        moves = ledger.book([fed(key, lo, hi) for key in order])
        buffer[moves.target] = states[moves.source]
    ledger.check()
    assert buffer.ravel().tolist() == [*TOKENS[5][first:9], *TOKENS[9][first:9]]


def test_a_missing_row_is_an_error() -> None:
    ledger = RowLedger(TOKENS, 2, ((0, 9),))
    ledger.book([fed(5, 0, 9), fed(9, 0, 8)])
    with pytest.raises(AssayError, match="window 9: 1 rows are missing and 0"):
        ledger.check()


def test_a_doubled_row_is_an_error() -> None:
    ledger = RowLedger({5: TOKENS[5]}, 0, ((0, 9),))
    for lo, hi in ((0, 9), (3, 5)):
        ledger.book([fed(5, lo, hi)])
    with pytest.raises(AssayError, match="0 rows are missing and 2 came more"):
        ledger.check()


def test_other_steps_than_planned_are_an_error() -> None:
    ledger = RowLedger({5: TOKENS[5]}, 0, ((0, 9),))
    for lo, hi in ((0, 4), (4, 9)):
        ledger.book([fed(5, lo, hi)])
    with pytest.raises(AssayError, match="2 steps instead of 1"):
        ledger.check()


def test_other_tokens_are_an_error() -> None:
    ledger = RowLedger(TOKENS, 0, ((0, 9),))
    with pytest.raises(AssayError, match="other tokens than its own at position 4"):
        ledger.book([Fed(5, 4, np.array([99]))])


def test_a_foreign_request_is_an_error() -> None:
    with pytest.raises(AssayError, match="another run"):
        RowLedger(TOKENS, 0, ((0, 9),)).book([Fed(-1, 0, np.array([1]))])
