"""Engine strings and the planning of batches, which need no torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engines.hf.decoding import plan_batches
from assay.engines.hf.spec import HfSpec, parse_hf
from assay.errors import UsageError


def test_engine_strings() -> None:
    assert parse_hf("hf:./model") == HfSpec("./model")
    assert parse_hf("hf:m?kv_cache_dtype=fp8") == parse_hf("hf:m?kv_cache_dtype=fp8_e4m3")
    assert parse_hf("hf:m?threads=3&attention=assay") == HfSpec("m", attention="assay", threads=3)
    assert (
        parse_hf("hf:m?threads=auto")
        == parse_hf("hf:m")
        == HfSpec("m", device="auto", attention="sdpa")
    )
    assert parse_hf("./model?device=cuda&dtype=float32") == HfSpec("./model", "float32", "cuda")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("hf:", "names no model"),
        ("hf:?dtype=float32", "names no model"),
        ("hf:m?", "without options"),
        ("hf:m?dtype=int4", "unknown dtype 'int4'"),
        ("hf:m?kv_cache_dtype=fp8_e4m2", "unknown kv_cache_dtype 'fp8_e4m2'"),
        ("hf:m?kv_cache_dtype=", "unknown kv_cache_dtype ''"),
        ("hf:m?threads=many", "threads=many is not a whole number"),
        ("hf:m?threads=-1", "threads=-1 is not a whole number"),
        ("hf:m?speed=9", "the unknown option 'speed'"),
    ],
)
def test_wrong_engine_strings_say_what_is_wrong(spec: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_hf(spec)


LENGTHS = st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 700)), max_size=120)


@given(LENGTHS)
def test_every_request_runs_once_within_the_bounds(lengths: list[tuple[int, int]]) -> None:
    prompts, limits = [p for p, _ in lengths], [m for _, m in lengths]
    batches = list(plan_batches(prompts, limits, max_rows=8, max_cached_tokens=10_000))
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert 1 <= len(batch) <= 8
        widest = max(prompts[i] for i in batch) + max(limits[i] for i in batch)
        assert len(batch) == 1 or len(batch) * widest <= 10_000


def test_short_answers_do_not_wait_for_long_ones() -> None:
    batches = list(plan_batches([10] * 8, [500, 20] * 4, max_rows=4))
    assert [sorted(batch) for batch in batches] == [[0, 2, 4, 6], [1, 3, 5, 7]]
