"""Bounds of KL from a few ids: against the whole distributions, for any distributions and
any ids.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from assay.engines.scoring import LogitRows, Window
from assay.engines.server.topk import TopkLogprobs
from assay.fidelity.metrics.bounds import SLACK, BoundedStatistics, choose_ids, window_bounds
from assay.fidelity.observation import BoundedObservation, from_arrays, observation, to_arrays
from assay.runs import Kept


def rows(logits: np.ndarray, tokens: list[int]) -> LogitRows:
    return LogitRows(Window(0, tuple(tokens)), 1, torch.from_numpy(logits).float())


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float32).astype(np.float64)
    return (
        x
        - x.max(-1, keepdims=True)
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


def scored(
    logq: np.ndarray, sets: list[set[int]], gold: list[int], by: str = "reference"
) -> TopkLogprobs:
    found = tuple(
        {i: float(q[i]) for i in sorted({*ids, g})}
        for q, ids, g in zip(logq, sets, gold, strict=True)
    )
    return TopkLogprobs(1, tuple(float(q[g]) for q, g in zip(logq, gold, strict=True)), found, by)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[int], list[set[int]], bool]:
    """Logits of both sides [n, V], gold ids, and ids that are known; the last says that all of them
    are.
    """
    vocab, count = draw(st.integers(2, 12)), draw(st.integers(1, 4))
    seed, heat, apart = draw(st.integers(0, 2**31)), draw(st.floats(0.1, 12)), draw(st.floats(0, 6))
    rng = np.random.default_rng(seed)
    a = rng.normal(0, heat, (count, vocab))
    b = a + rng.normal(0, apart, (count, vocab))
    gold = [int(g) for g in rng.integers(0, vocab, count)]
    everything = draw(st.booleans())
    sizes = [vocab if everything else int(k) for k in rng.integers(0, vocab + 1, count)]
    return a, b, gold, [set(map(int, rng.permutation(vocab)[:k])) for k in sizes], everything


@given(cases())
@settings(max_examples=300)
def test_bounds_hold_for_any_distributions_and_any_ids(
    case: tuple[np.ndarray, np.ndarray, list[int], list[set[int]], bool],
) -> None:
    a, b, gold, sets, everything = case
    lp, lq = log_softmax(a), log_softmax(b)
    p, q = np.exp(lp), np.exp(lq)
    kl, reverse = (p * (lp - lq)).sum(-1), (q * (lq - lp)).sum(-1)
    tv = np.abs(p - q).sum(-1) / 2
    found = window_bounds(rows(a, [0, *gold]), scored(lq, sets, gold))
    assert (found.kl.numpy() <= kl + 1e-9).all()
    assert (found.kl_rev.numpy() <= reverse + 1e-9).all()
    assert (found.kl_upper.numpy() >= kl - 1e-9).all()
    assert (found.tv_lo.numpy() <= tv + 1e-9).all()
    assert (found.tv_hi.numpy() >= tv - 1e-9).all()
    same = lp.argmax(-1) == lq.argmax(-1)
    assert (found.top1.numpy() <= same).all()
    assert (same <= found.top1_possible.numpy()).all()
    np.testing.assert_allclose(found.nll_cand, -lq[range(len(gold)), gold], rtol=1e-12)
    np.testing.assert_allclose(found.nll_ref, -lp[range(len(gold)), gold], rtol=1e-6, atol=1e-6)
    if everything:
        np.testing.assert_allclose(found.kl, kl, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.kl_upper, kl, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.kl_rev, reverse, rtol=1e-6, atol=1e-5)
        assert (found.tail_ref.numpy() == 0).all()
        assert (found.top1.numpy() == same).all()


@given(cases())
@settings(max_examples=100)
def test_the_bucket_is_that_of_the_definition(
    case: tuple[np.ndarray, np.ndarray, list[int], list[set[int]], bool],
) -> None:
    a, b, gold, sets, _ = case
    lp, lq = log_softmax(a), log_softmax(b)
    found = window_bounds(rows(a, [0, *gold]), scored(lq, sets, gold))
    for i, ids in enumerate(sets):
        inside = sorted({*ids, gold[i]})
        outside = [v for v in range(a.shape[1]) if v not in inside]
        rest_p, rest_q = (
            math.fsum(np.exp(lp[i, outside])),
            max(0.0, 1 - math.fsum(np.exp(lq[i, inside]))),
        )
        value = float((np.exp(lp[i, inside]) * (lp[i, inside] - lq[i, inside])).sum())
        if rest_p > 0:
            value += rest_p * (math.log(rest_p) - math.log(min(1.0, rest_q + SLACK)))
        assert float(found.kl[i]) == pytest.approx(max(0.0, value), abs=1e-9)
        assert float(found.tail_ref[i]) == pytest.approx(rest_p, abs=1e-12)


def test_more_ids_bind_closer_and_the_same_distribution_gives_nothing() -> None:
    rng = np.random.default_rng(5)
    a = rng.normal(0, 3, (50, 200))
    b = a + rng.normal(0, 1, a.shape)
    gold = [int(g) for g in rng.integers(0, 200, 50)]
    means = []
    for count in (2, 5, 20, 100, 200):
        reference = rows(a, [0, *gold])
        sets = [set(row) for row in choose_ids(reference, count)]
        assert all(len(s) == count and g in s for s, g in zip(sets, gold, strict=True))
        means.append(float(window_bounds(reference, scored(log_softmax(b), sets, gold)).kl.mean()))
        own = window_bounds(reference, scored(log_softmax(a), sets, gold))
        assert float(own.kl.max()) < 1e-6
        assert bool(own.top1_possible.all())
    assert means == sorted(means)
    lp, lq = log_softmax(a), log_softmax(b)
    assert means[-1] == pytest.approx(float((np.exp(lp) * (lp - lq)).sum(-1).mean()))


def test_what_is_known_of_the_likeliest_token() -> None:
    """Where the candidate lists its best it is known; else only where one id outweighs all that is
    left over.
    """
    a = np.log([[0.5, 0.3, 0.1, 0.1]] * 4)
    lq = np.log(
        [
            [0.6, 0.2, 0.1, 0.1],
            [0.3, 0.2, 0.25, 0.25],
            [0.2, 0.3, 0.25, 0.25],
            [0.25, 0.25, 0.4, 0.1],
        ]
    )
    gold = [1, 1, 1, 1]
    known = window_bounds(rows(a, [0, *gold]), scored(lq, [{0, 1}] * 4, gold))
    assert known.top1.tolist() == [True, False, False, False]
    assert known.top1_possible.tolist() == [True, True, False, True]
    # The last: equal shares of 0.25 at both ids; 0.5 left over may hold a likelier one or not.
    listed = window_bounds(
        rows(a, [0, *gold]), scored(lq, [{0, 1}, {0, 1}, {0, 1}, {1, 2}], gold, "candidate")
    )
    assert listed.top1.tolist() == listed.top1_possible.tolist() == [True, True, False, False]


def test_ids_past_the_vocabulary_and_tokens_that_are_ruled_out() -> None:
    a = np.log([[0.5, 0.5], [0.5, 0.5]])
    scores = TopkLogprobs(
        1,
        (math.log(0.4), -math.inf),
        ({0: math.log(0.4), 7: math.log(0.2)}, {1: -math.inf, 0: 0.0}),
        "candidate",
    )
    found = window_bounds(rows(a, [0, 0, 1]), scores)
    assert float(found.kl[0]) == pytest.approx(
        0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.4), abs=1e-4
    )
    assert math.isnan(found.kl[1])
    assert not found.top1[1]
    assert not found.top1_possible[1]


def test_a_file_keeps_the_bounds(tmp_path: object) -> None:
    from pathlib import Path

    rng = np.random.default_rng(0)
    logits, gold = rng.normal(size=(3, 9)), [1, 2, 3]
    statistics = window_bounds(
        rows(logits, [0, *gold]), scored(log_softmax(logits), [{0}, {4}, {5}], gold)
    )
    assert isinstance(statistics, BoundedStatistics)
    seen = observation(Window(4, (0, *gold)), 1, statistics)
    assert isinstance(seen, BoundedObservation)
    kept = Kept(Path(str(tmp_path)))
    kept.put("w", to_arrays([seen]))
    (again,) = from_arrays(kept.get("w"), [Window(4, (0, *gold))])
    assert isinstance(again, BoundedObservation)
    np.testing.assert_array_equal(again.tail_cand, seen.tail_cand)
    np.testing.assert_array_equal(again.top1_possible, seen.top1_possible)
    assert (again.index, again.first) == (4, 1)
