"""Plans of windows, and how many fit side by side."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engines.scoring import ScoreJob, ScoringPath
from assay.engines.vllm.window_plan import batch_size, cache_reads, plan_window

lengths = st.integers(2, 40).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(1, n - 1), st.integers(1, n))
)


@pytest.mark.parametrize(
    ("job", "prompt", "blocks"),
    [
        (ScoreJob(scored_from=4), 9, [(0, 9)]),
        (ScoreJob(ScoringPath.CHUNKED, scored_from=4, chunk=4), 9, [(0, 3), (3, 7), (7, 9)]),
        (ScoreJob(ScoringPath.CHUNKED, scored_from=1, chunk=4), 9, [(0, 4), (4, 8), (8, 9)]),
        (ScoreJob(ScoringPath.DECODE, scored_from=7), 6, [(0, 6), (6, 7), (7, 8), (8, 9)]),
        (ScoreJob(ScoringPath.DECODE, scored_from=9), 8, [(0, 8), (8, 9)]),
    ],
)
def test_plans_of_a_window_of_ten(
    job: ScoreJob, prompt: int, blocks: list[tuple[int, int]]
) -> None:
    plan = plan_window(10, job)
    assert (plan.prompt, list(plan.blocks)) == (prompt, blocks)


@given(lengths, st.sampled_from(ScoringPath))
def test_every_token_but_the_last_is_fed_once(
    facts: tuple[int, int, int], path: ScoringPath
) -> None:
    length, scored_from, chunk = facts
    plan = plan_window(length, ScoreJob(path, scored_from, chunk))
    fed = [i for lo, hi in plan.blocks for i in range(lo, hi)]
    assert fed == list(range(length - 1))
    assert plan.largest <= length - 1
    if path is ScoringPath.DECODE:
        assert all(hi - lo == 1 for lo, hi in plan.blocks[1:])


def test_bytes_that_are_read_are_those_of_earlier_steps() -> None:
    assert cache_reads(plan_window(10, ScoreJob()).blocks) == 0
    assert cache_reads(((0, 3), (3, 7), (7, 9))) == 10


def test_a_batch_fits_into_step_and_cache() -> None:
    plan = plan_window(100, ScoreJob())
    room = {"step_tokens": 8192, "sequences": 64, "cache_tokens": 100_000, "block": 16}
    assert batch_size(8, plan, 100, **room) == 8
    assert batch_size(500, plan, 100, **room) == 64
    assert batch_size(8, plan, 100, **{**room, "step_tokens": 300}) == 3
    # 100 tokens take 7 blocks of 16.
    assert batch_size(8, plan, 100, **{**room, "cache_tokens": 2 * 112}) == 2
    assert batch_size(8, plan, 100, **{**room, "step_tokens": 98}) == 0
