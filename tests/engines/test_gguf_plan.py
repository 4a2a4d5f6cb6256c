"""How a gguf: engine is written, and how windows are cut into calls. Needs no llama.cpp."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engines.gguf.library import load_library
from assay.engines.gguf.scorer import GgufScorer, plan_blocks
from assay.engines.gguf.spec import GgufSpec, parse_gguf
from assay.engines.scoring import ScoreJob, ScoringPath
from assay.errors import AssayError, UsageError


def test_specs() -> None:
    assert parse_gguf("gguf:a/b.gguf") == GgufSpec("a/b.gguf")
    assert parse_gguf("gguf:m.gguf?kv=q8_0&threads=3&gpu_layers=-1&ubatch=64") == GgufSpec(
        "m.gguf", k="q8_0", v="q8_0", threads=3, gpu_layers=-1, ubatch=64
    )
    assert parse_gguf("gguf:m.gguf?kv=q8_0&v=f16").v == "f16"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gguf:", "names no file"),
        ("gguf:m.gguf?", "without options"),
        ("gguf:m.gguf?dtype=f16", "the unknown option 'dtype'"),
        ("gguf:m.gguf?kv=q3", "unknown cache type 'q3'"),
        ("gguf:m.gguf?threads=many", "threads='many' is not a whole number"),
        ("gguf:m.gguf?ubatch=0", "ubatch='0'"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_gguf(spec)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    load_library.cache_clear()
    with pytest.raises(AssayError, match="needs llama-cpp-python") as caught:
        GgufScorer.load("gguf:m.gguf")
    assert "llm-assay[gguf]" in caught.value.remedy


@given(
    length=st.integers(2, 90),
    first=st.integers(1, 80),
    chunk=st.integers(1, 40),
    prefill=st.integers(1, 40),
    path=st.sampled_from(ScoringPath),
)
def test_blocks_read_every_token_once_and_score_whole_blocks(
    length: int, first: int, chunk: int, prefill: int, path: ScoringPath
) -> None:
    if first >= length:
        return
    job = ScoreJob(path=path, scored_from=first, chunk=chunk)
    blocks = plan_blocks(length, job, prefill)
    assert [t for lo, hi in blocks for t in range(lo, hi)] == list(range(length - 1))
    # Row p predicts token p + 1; no block mixes rows that count with rows that do not.
    assert not any(lo < first - 1 < hi for lo, hi in blocks)
    scored = [(lo, hi) for lo, hi in blocks if lo >= first - 1]
    if path is ScoringPath.DECODE:
        assert all(hi - lo == 1 for lo, hi in scored)
    elif path is ScoringPath.CHUNKED:
        assert all(hi - lo == chunk for lo, hi in scored[:-1])
    before = blocks if path is ScoringPath.PREFILL else [b for b in blocks if b not in scored]
    assert all(hi - lo <= prefill for lo, hi in before)
