"""The row statistics against float64 by brute force, and at their edges."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from assay.engines.scoring import LogitRows, Window
from assay.fidelity.metrics import token_statistics
from assay.fidelity.metrics.row_sums import first_max
from assay.fidelity.metrics.token_statistics import (
    batch_statistics,
    row_statistics,
    window_statistics,
)


def brute_force(ref: np.ndarray, cand: np.ndarray, gold: np.ndarray) -> dict[str, np.ndarray]:
    """Everything in float64, one formula a line."""
    ref, cand = ref.astype(np.float64), cand.astype(np.float64)
    p = np.exp(ref - ref.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    q = np.exp(cand - cand.max(1, keepdims=True))
    q /= q.sum(1, keepdims=True)
    rows = np.arange(len(gold))
    return {
        "nll_ref": -np.log(p[rows, gold]),
        "nll_cand": -np.log(q[rows, gold]),
        "kl": (p * (np.log(p) - np.log(q))).sum(1),
        "kl_rev": (q * (np.log(q) - np.log(p))).sum(1),
        "top1": p.argmax(1) == q.argmax(1),
        "p_ref": p[rows, gold],
        "p_cand": q[rows, gold],
        "conf": p.max(1),
        "tv": 0.5 * np.abs(p - q).sum(1),
        "beyond": np.array([beyond(row, b) for row, b in zip(ref, q.argmax(1), strict=True)]),
    }


def beyond(row: np.ndarray, chosen: int) -> bool:
    """Whether a logit lies more than one step of bf16 below the largest, from bf16's own
    neighbours.
    """
    largest = row.max()
    size = max(abs(float(largest)), abs(float(row[chosen])))
    below = torch.tensor(2.0 ** float(np.floor(np.log2(size))), dtype=torch.bfloat16)
    step = (torch.nextafter(below, torch.tensor(np.inf, dtype=torch.bfloat16)) - below).item()
    return bool(largest - row[chosen] > step)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(2, 400),
    scale=st.sampled_from([0.1, 3.0, 12.0]),
    noise=st.sampled_from([0.0, 1e-4, 0.05, 2.0]),
    offset=st.sampled_from([0.0, -30.0, 100.0]),
)
@settings(max_examples=60, deadline=None)
def test_agrees_with_float64(
    seed: int, vocab: int, scale: float, noise: float, offset: float
) -> None:
    rng = np.random.default_rng(seed)
    ref = (rng.standard_normal((7, vocab)) * scale).astype(np.float32)
    cand = (ref + rng.standard_normal((7, vocab)) * noise + offset).astype(np.float32)
    gold = rng.integers(0, vocab, 7)
    found = row_statistics(*map(torch.from_numpy, (ref, cand, gold)))
    for name, expected in brute_force(ref, cand, gold).items():
        np.testing.assert_allclose(
            getattr(found, name).numpy(), expected, atol=2e-5, rtol=1e-5, err_msg=name
        )


def test_equal_logits_differ_by_exactly_nothing() -> None:
    logits = torch.randn(5, 1000) * 5
    found = row_statistics(logits, logits.clone(), torch.arange(5))
    assert (found.kl == 0).all()
    assert (found.nll_ref == found.nll_cand).all()
    assert found.top1.all()


def test_a_ruled_out_token_counts_by_the_side_that_rules_it_out() -> None:
    ref = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, 0.0, 0.0]])
    cand = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -torch.inf]])
    found = row_statistics(ref, cand, torch.tensor([0, 0]))
    assert found.kl[0].item() == pytest.approx(np.log(1.5), abs=1e-6)
    assert found.kl[1].item() == np.inf
    assert found.kl_rev[0].item() == np.inf


def test_a_flip_counts_where_the_gap_is_more_than_a_step_of_bf16() -> None:
    """Between 16 and 32 logits of bf16 lie 0.125 apart; below zero and in float32 the step is the
    same.
    """
    ref = torch.tensor(
        [[20.0, 19.875, 0.0], [20.0, 19.86, 0.0], [-20.0, -20.125, -40.0], [-15.9, -16.1, -40.0]]
    )
    cand = ref.clone()
    cand[:, 1] += 1.0
    found = row_statistics(ref, cand, torch.tensor([0, 0, 0, 0]))
    assert not found.top1.any()
    assert found.beyond.tolist() == [False, True, False, True]
    assert not row_statistics(ref, ref.clone(), torch.tensor([0, 0, 0, 0])).beyond.any()


def test_total_variation_is_that_of_scipy() -> None:
    """Half of scipy's city-block distance between its own softmax of both rows."""
    distance = pytest.importorskip("scipy.spatial.distance")
    softmax = pytest.importorskip("scipy.special").softmax
    ref, cand = np.random.default_rng(5).normal(size=(2, 8, 3000)) * 4
    found = row_statistics(
        torch.from_numpy(ref).float(), torch.from_numpy(cand).float(), torch.arange(8)
    )
    wanted = [
        distance.cityblock(softmax(a), softmax(b)) / 2 for a, b in zip(ref, cand, strict=True)
    ]
    np.testing.assert_allclose(found.tv.numpy(), wanted, rtol=1e-5)
    ruled_out = row_statistics(
        torch.tensor([[0.0, -np.inf]]), torch.tensor([[-np.inf, 0.0]]), torch.tensor([0])
    )
    assert ruled_out.tv.item() == 1.0


def test_not_finite_rows_are_marked_and_leave_the_others_alone() -> None:
    ref = torch.randn(3, 10)
    cand = ref.clone()
    cand[1, 4] = torch.nan
    found = row_statistics(ref, cand, torch.tensor([1, 2, 3]))
    assert found.kl.isnan().tolist() == [False, True, False]
    assert found.top1.tolist() == [True, False, True]


def test_ties_go_to_the_lower_id() -> None:
    ref, cand = torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0, 0.9, 0.0]])
    assert row_statistics(ref, cand, torch.tensor([0])).top1.item()


def test_blocks_do_not_change_the_result_and_padding_is_cut() -> None:
    window = Window(0, tuple(range(70)))
    ref = torch.randn(69, 80)
    cand = torch.cat([ref + 0.1 * torch.randn(69, 80), torch.full((69, 16), 50.0)], dim=1)
    whole = row_statistics(ref, cand[:, :80], torch.arange(1, 70))
    blocks = window_statistics(LogitRows(window, 1, ref), LogitRows(window, 1, cand))
    torch.testing.assert_close(blocks.kl, whole.kl)
    torch.testing.assert_close(blocks.nll_cand, whole.nll_cand)


def test_different_tokens_are_refused() -> None:
    rows = LogitRows(Window(0, (1, 2, 3)), 1, torch.randn(2, 5))
    with pytest.raises(ValueError, match="different tokens"):
        window_statistics(rows, LogitRows(Window(0, (1, 2, 4)), 1, torch.randn(2, 5)))


@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(4, 300), kept=st.integers(1, 299))
@settings(max_examples=60, deadline=None)
def test_what_the_reference_leaves_out_is_one_bucket(seed: int, vocab: int, kept: int) -> None:
    """Against float64 by brute force, and never above the KL of the whole distributions."""
    kept = min(kept, vocab - 1)
    rng = np.random.default_rng(seed)
    whole = rng.standard_normal((6, vocab)) * 4
    whole -= np.log(np.exp(whole).sum(1, keepdims=True))
    cand = (whole + rng.standard_normal((6, vocab)) * 0.3 + 7).astype(np.float32)
    order = np.argsort(-whole, axis=1)
    part = whole.copy()
    np.put_along_axis(part, order[:, kept:], -np.inf, axis=1)
    gold = order[:, 0].copy()
    found = row_statistics(
        torch.from_numpy(part), torch.from_numpy(cand), torch.from_numpy(gold), rest=True
    )

    p, q = np.exp(whole), np.exp(cand.astype(np.float64))
    q /= q.sum(1, keepdims=True)
    lumped_p, lumped_q = (
        np.concatenate(
            [
                np.take_along_axis(x, order[:, :kept], 1),
                np.take_along_axis(x, order[:, kept:], 1).sum(1)[:, None],
            ],
            1,
        )
        for x in (p, q)
    )
    kl = (lumped_p * np.log(lumped_p / lumped_q)).sum(1)
    np.testing.assert_allclose(found.kl.numpy(), kl, atol=5e-6)
    np.testing.assert_allclose(
        found.kl_rev.numpy(), (lumped_q * np.log(lumped_q / lumped_p)).sum(1), atol=5e-6
    )
    np.testing.assert_allclose(found.tv.numpy(), np.abs(lumped_p - lumped_q).sum(1) / 2, atol=1e-6)
    np.testing.assert_allclose(found.nll_ref.numpy(), -np.log(p[np.arange(6), gold]), atol=1e-6)
    np.testing.assert_allclose(found.conf.numpy(), p.max(1), atol=1e-6)
    assert (kl <= (p * np.log(p / q)).sum(1) + 1e-9).all()


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([300, 512, 513, 1000]),
    levels=st.sampled_from([2, 50, 10**6]),
    lost=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
)
@settings(max_examples=30, deadline=None)
def test_the_first_largest_is_that_of_torch(
    seed: int, vocab: int, levels: int, lost: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, levels, (6, vocab), generator=generator).float()
    if lost is not None:
        x[:3, torch.randint(0, vocab, (3,), generator=generator)] = lost
    # A slice of wider rows, as where one side has padding.
    wide = torch.cat([x, torch.full((6, 40), 1e9)], 1)[:, :vocab]
    for given_ in (x, wide):
        values, indices = first_max(given_)
        torch.testing.assert_close(values, x.max(-1).values, equal_nan=True)
        assert indices.tolist() == x.max(-1).indices.tolist()


def test_statistics_do_not_depend_on_how_many_rows_are_taken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab, count = 700, 23
    logits = torch.randn(2, count, vocab, generator=torch.Generator().manual_seed(1)) * 4
    window = Window(0, tuple(range(count + 1)))
    sides = [LogitRows(window, 1, part) for part in logits]
    whole = row_statistics(*logits, torch.arange(1, count + 1))
    for block, cache in ((4 * vocab * 9, 4 * vocab * 4), (1, 1), (1 << 30, 1 << 30)):
        monkeypatch.setattr(token_statistics, "BLOCK_BYTES", {"cpu": block, "cuda": block})
        monkeypatch.setattr(token_statistics, "CACHE_BYTES", {"cpu": cache, "cuda": cache})
        found = window_statistics(*sides)
        for field in fields(found):
            torch.testing.assert_close(getattr(found, field.name), getattr(whole, field.name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_count_as_the_numbers_that_they_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(2, 5, 900, generator=generator) * 4).to(dtype)
    kept, gold = logits.clone(), torch.arange(5)
    found, wanted = row_statistics(*logits, gold), row_statistics(*logits.float(), gold)
    for field in fields(found):
        torch.testing.assert_close(
            getattr(found, field.name), getattr(wanted, field.name), rtol=0, atol=0
        )
    assert torch.equal(logits, kept)


def test_a_row_of_both_infinities_leaves_its_neighbours_alone() -> None:
    logits = torch.randn(2, 3, 600, generator=torch.Generator().manual_seed(4))
    gold = torch.tensor([1, 2, 3])
    alone = row_statistics(*logits, gold)
    logits[0, 1, 40], logits[1, 1, 41] = -torch.inf, -torch.inf
    found = row_statistics(*logits, gold)
    assert found.kl[1].item() == found.kl_rev[1].item() == torch.inf
    for rows in (0, 2):
        assert found.kl[rows] == alone.kl[rows]


def test_an_id_that_one_side_does_not_know_is_refused() -> None:
    sides = [LogitRows(Window(0, (1, 2, 5)), 1, torch.randn(2, vocab)) for vocab in (5, 9)]
    with pytest.raises(ValueError, match="outside of the 5"):
        window_statistics(*sides)


def batch_of(lengths: tuple[int, ...], vocab: int, rest: bool) -> list[list[LogitRows]]:
    """Both sides of windows of these lengths; with `rest` the reference has only a part of its
    distributions.
    """
    generator = torch.Generator().manual_seed(4)
    sides: list[list[LogitRows]] = [[], []]
    for index, length in enumerate(lengths):
        window = Window(index, tuple(torch.randint(vocab, (length,), generator=generator).tolist()))
        ref = torch.randn(length - 2, vocab, generator=generator).log_softmax(-1)
        if rest:
            ref = ref.masked_fill(ref < ref.median(-1, keepdim=True).values, float("-inf"))
        sides[0].append(LogitRows(window, 2, ref, rest=rest))
        sides[1].append(LogitRows(window, 2, torch.randn(length - 2, vocab, generator=generator)))
    return sides


@pytest.mark.parametrize("rest", [False, True])
def test_windows_of_a_batch_keep_their_own_numbers(rest: bool) -> None:
    sides = batch_of((5, 40, 3), 60, rest)
    for ref, cand, found in zip(*sides, batch_statistics(*sides), strict=True):
        wanted = row_statistics(
            ref.values, cand.values, torch.tensor(ref.window.tokens[2:]), rest=rest
        )
        for field in fields(found):
            one, other = getattr(found, field.name), getattr(wanted, field.name)
            assert len(one) == len(ref.window.tokens) - 2
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_parts_of_distributions_do_not_go_with_whole_ones() -> None:
    whole, parts = batch_of((6, 7), 30, False), batch_of((6, 7), 30, True)
    with pytest.raises(ValueError, match="in one batch"):
        batch_statistics([whole[0][0], parts[0][1]], whole[1])
