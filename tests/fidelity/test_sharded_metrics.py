"""Statistics from ranks that hold a shard of the vocabulary each: threads for many shapes, two
processes over gloo for real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from test_fidelity_metrics import brute_force

from assay.engines.scoring import Head, StateRows, VocabularyShard, Window
from assay.fidelity.metrics.token_statistics import (
    RowStatistics,
    batch_statistics,
    window_statistics,
)
from together import Together

VOCAB, WIDTH, TOKENS = 997, 24, 70


def on_rank(
    rank: int,
    bounds: Sequence[int],
    heads: Sequence[Head],
    states: Sequence[torch.Tensor],
    tokens: tuple[int, ...],
    gather: Callable[[torch.Tensor], torch.Tensor],
) -> RowStatistics:
    """What a rank computes: its rows of both heads, cut where the smaller vocabulary ends."""
    vocab = min(head.vocab_size for head in heads)
    lo, hi = min(bounds[rank], vocab), min(bounds[rank + 1], vocab)
    own = [
        Head(
            h.weight[lo:hi],
            None if h.bias is None else h.bias[lo:hi],
            softcap=h.softcap,
            scale=h.scale,
        )
        for h in heads
    ]
    window = Window(0, tokens)
    sides = [StateRows(window, 1, s, head) for s, head in zip(states, own, strict=True)]
    shard = VocabularyShard(lo, vocab, len(bounds) - 1, gather)
    return batch_statistics([sides[0]], [sides[1]], shard)[0]


def by_threads(bounds: Sequence[int], *rest: Any) -> list[RowStatistics]:
    ranks = len(bounds) - 1
    together = Together(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        running = [
            pool.submit(on_rank, rank, bounds, *rest, partial(together.gather, rank))
            for rank in range(ranks)
        ]
        return [future.result(60) for future in running]


def case(
    seed: int, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, **facts: Any
) -> tuple[Any, ...]:
    """Heads, states and tokens of two sides that are close to each other."""
    rng = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, WIDTH, generator=rng)
    other = weight + 0.02 * torch.randn(vocab, WIDTH, generator=rng)
    bias = torch.randn(vocab, generator=rng)
    heads = (Head(weight.to(dtype), bias.to(dtype), **facts), Head(other.to(dtype), None, **facts))
    states = torch.randn(2, TOKENS, WIDTH, generator=rng) * 0.3
    states[1] += states[0]
    tokens = tuple(torch.randint(0, vocab, (TOKENS + 1,), generator=rng).tolist())
    return heads, tuple(states.to(dtype)), tokens


def whole(heads: Any, states: Any, tokens: Any) -> RowStatistics:
    sides = [StateRows(Window(0, tokens), 1, s, h) for s, h in zip(states, heads, strict=True)]
    return window_statistics(*sides)


def close(found: RowStatistics, wanted: RowStatistics | dict[str, Any]) -> None:
    values = wanted if isinstance(wanted, dict) else vars(wanted)
    for name, expected in values.items():
        np.testing.assert_allclose(
            getattr(found, name).numpy(), np.asarray(expected), atol=3e-6, rtol=1e-5, err_msg=name
        )


@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(2, 600),
    cuts=st.lists(st.integers(0, 600), min_size=0, max_size=3),
    facts=st.sampled_from([{}, {"softcap": 3.0}, {"scale": 0.25}]),
)
@settings(max_examples=40, deadline=None)
def test_shards_of_any_size_give_what_the_whole_gives(
    seed: int, vocab: int, cuts: list[int], facts: dict[str, float]
) -> None:
    given_ = case(seed, vocab=vocab, **facts)
    bounds = [0, *sorted(min(c, vocab) for c in cuts), vocab]
    found = by_threads(bounds, *given_)
    close(found[0], whole(*given_))
    for other in found[1:]:  # every rank has the same statistics bit for bit
        assert all(
            torch.equal(getattr(other, f.name), getattr(found[0], f.name)) for f in fields(other)
        )


def test_the_smaller_vocabulary_counts_and_a_rank_may_have_none_of_it() -> None:
    (ref, cand), states, _ = case(1)
    tokens = tuple(i % 500 for i in range(TOKENS + 1))
    smaller = Head(cand.weight[:500])
    wanted = whole((ref, smaller), states, tokens)
    close(by_threads((0, 300, 640, VOCAB), (ref, smaller), states, tokens)[2], wanted)


def test_the_lowest_id_wins_a_tie_across_ranks() -> None:
    states = torch.ones(3, 1)
    one, other = torch.zeros(8, 1), torch.zeros(8, 1)
    one[2], one[5] = 4.0, 4.0
    other[5], other[6] = 4.0, 4.0
    tokens = (0, 5, 6, 2)
    for bounds in ((0, 8), (0, 4, 8), (0, 6, 8), (0, 2, 4, 6, 8)):
        found = by_threads(bounds, (Head(one), Head(other)), (states, states), tokens)[0]
        assert not found.top1.any()  # 2 against 5
        same = by_threads(bounds, (Head(one), Head(one.clone())), (states, states), tokens)[0]
        assert same.top1.all() and (same.kl == 0).all() and (same.tv < 1e-7).all()


@pytest.mark.parametrize("place", [0, 5, 7])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_on_one_rank_is_marked_on_all(place: int, value: float) -> None:
    """A NaN or +inf in one rank's logits marks the row everywhere; −inf is a token that is ruled
    out.
    """
    ref, cand = torch.randn(2, 8, 1, generator=torch.Generator().manual_seed(3))
    cand[place] = value
    tokens = (0, 3, 4)
    states = torch.ones(2, 1)
    given_ = ((Head(ref), Head(cand)), (states, states), tokens)
    for found in by_threads((0, 4, 8), *given_):
        for name, expected in vars(whole(*given_)).items():
            torch.testing.assert_close(
                getattr(found, name), expected, equal_nan=True, rtol=1e-5, atol=1e-6
            )


def _process(rank: int, ranks: int, rendezvous: str, out: str) -> None:
    """One of the processes of a group over gloo."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    sent = 0

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal sent
        sent += tensor.numel() * tensor.element_size()
        parts = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(parts, tensor)
        return torch.stack(parts)

    found = on_rank(rank, (0, 512, VOCAB), *case(7, torch.bfloat16), gather)
    torch.save((vars(found), sent), f"{out}.{rank}")
    dist.destroy_process_group()


@pytest.mark.engine
def test_two_processes_over_gloo_agree_with_float64_of_the_whole_vocabulary(tmp_path: Path) -> None:
    import torch.multiprocessing as processes

    processes.spawn(_process, (2, str(tmp_path / "meet"), str(tmp_path / "out")), nprocs=2)
    (one, sent), (other, _) = (torch.load(f"{tmp_path / 'out'}.{rank}") for rank in range(2))
    assert sent == 96 * TOKENS  # twelve numbers a token, whatever the vocabulary
    heads, states, tokens = case(7, torch.bfloat16)
    logits = [h.logits(s).numpy() for h, s in zip(heads, states, strict=True)]
    gold = np.array(tokens[1:])
    assert all(torch.equal(one[name], other[name]) for name in one)
    close(RowStatistics(**one), brute_force(*logits, gold))
