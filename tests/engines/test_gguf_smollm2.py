"""llama.cpp with a real model: paths, batches, cache types, and the tokenizer against
transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from assay.engines.gguf.scorer import GgufScorer
from assay.engines.scoring import ScoreJob, ScoringPath, Window, vocabulary_sha256
from assay.errors import AssayError, UsageError
from assay.runs import cache_dir
from llama_cpp_package import require_llama_cpp

pytestmark = [pytest.mark.engine, pytest.mark.llama]

TEXT = (
    "The tower is 324 metres tall, about the same height as an 81-storey building, and the tallest"
    " in Paris. " * 3
)


@pytest.fixture(scope="module")
def gguf_file(smollm2: Path) -> Path:
    require_llama_cpp()
    return next(cache_dir("gguf").glob("smollm2/*.gguf"))


@pytest.fixture(scope="module")
def scorer(gguf_file: Path) -> Iterator[GgufScorer]:
    engine = GgufScorer.load(f"gguf:{gguf_file}")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def windows(scorer: GgufScorer) -> list[Window]:
    ids = scorer.tokenizer.encode(TEXT)
    return [Window(i, tuple(ids[24 * i : 24 * i + 24])) for i in range(3)]


def logits(scorer: GgufScorer, windows: list[Window], job: ScoreJob) -> np.ndarray:
    return np.stack([rows.values.numpy() for rows in scorer.score_windows(windows, job)])


def test_vocabulary_is_that_of_transformers(scorer: GgufScorer, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    facts = scorer.tokenizer
    assert facts.sha256 == vocabulary_sha256(tokenizer.get_vocab())
    assert facts.vocab_size == len(tokenizer)
    assert facts.bos_id is None  # it names <|im_start|> and puts none
    ids = tokenizer(TEXT + "<|im_end|> Grüße, 東京 🗼", add_special_tokens=False)["input_ids"]
    assert facts.encode(TEXT + "<|im_end|> Grüße, 東京 🗼") == ids
    assert facts.decode(ids) == TEXT + "<|im_end|> Grüße, 東京 🗼"
    assert facts.decode(ids[-1:]) == "\ufffd"  # a part of a character


def test_sentencepiece_vocabulary_is_that_of_transformers(gemma3: Path) -> None:
    require_llama_cpp()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gemma3))
    engine = GgufScorer.load(f"gguf:{next(cache_dir('gguf').glob('gemma3/*.gguf'))}")
    assert engine.tokenizer.sha256 == vocabulary_sha256(tokenizer.get_vocab())
    assert engine.tokenizer.bos_id == tokenizer.bos_token_id
    assert engine.tokenizer.encode(TEXT) == tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    engine.close()


def test_predicts_like_transformers(
    scorer: GgufScorer, windows: list[Window], smollm2: Path
) -> None:
    """Q4_1 holds this model's weights exactly, but llama.cpp rounds activations to 8 bits: close,
    not equal.
    """
    from assay.engines.hf.scorer import HfScorer
    from assay.fidelity.metrics.token_statistics import window_statistics

    reference = HfScorer.load(f"hf:{smollm2}?dtype=float32")
    job = ScoreJob()
    pairs = zip(
        reference.score_windows(windows, job), scorer.score_windows(windows, job), strict=True
    )
    seen = [window_statistics(ref, cand) for ref, cand in pairs]
    kl = np.concatenate([s.kl.numpy() for s in seen])
    assert 0 < kl.mean() < 0.02
    assert np.mean([s.top1.double().mean() for s in seen]) > 0.9


@pytest.mark.parametrize("path", [ScoringPath.CHUNKED, ScoringPath.DECODE])
def test_paths_agree(scorer: GgufScorer, windows: list[Window], path: ScoringPath) -> None:
    whole = logits(scorer, windows, ScoreJob(scored_from=9))
    assert whole.shape == (3, 24 - 9, scorer.tokenizer.vocab_size)
    stepped = logits(scorer, windows, ScoreJob(path, scored_from=9, chunk=4))
    np.testing.assert_allclose(stepped, whole, atol=0.5)
    read = scorer.engagement().bytes_read
    assert read is not None
    # 30 layers × 3 heads × 64 × K and V × 2 bytes = 23,040 a token.
    steps = sum(range(9, 24)) + 8 if path is ScoringPath.DECODE else 8 + 12 + 16 + 20 + 23
    assert read == pytest.approx(3 * steps * 23_040, rel=0.02)


def test_batches_of_windows_do_not_mix(scorer: GgufScorer, windows: list[Window]) -> None:
    together = logits(scorer, windows, ScoreJob(batch=2))
    alone = np.concatenate([logits(scorer, [w], ScoreJob(batch=1)) for w in windows])
    np.testing.assert_allclose(together, alone, atol=0.5)
    assert together.std() > 1


def test_quantised_cache_is_engaged(
    gguf_file: Path, scorer: GgufScorer, windows: list[Window]
) -> None:
    """Prefill reads the cache in llama.cpp, so that a coarser one shows on every path."""
    coarse = GgufScorer.load(f"gguf:{gguf_file}?kv=q4_0")
    whole, rough = (logits(engine, windows, ScoreJob()) for engine in (scorer, coarse))
    difference = np.abs(whole - rough).mean()
    assert difference > 0.02
    assert coarse.engagement().bytes_read < 0.4 * scorer.engagement().bytes_read
    assert coarse.describe()["kv_cache"] == {"k": "q4_0", "v": "q4_0"}
    coarse.close()


def test_description_has_no_folder(scorer: GgufScorer, gguf_file: Path) -> None:
    described = scorer.describe()
    assert described["model"] == gguf_file.name
    assert "Q4_1" in described["description"]
    assert str(gguf_file.parent) not in str(described)


def test_files_that_cannot_be_loaded(gguf_file: Path, tmp_path: Path) -> None:
    with pytest.raises(AssayError, match="no such file"):
        GgufScorer.load(f"gguf:{tmp_path}/missing.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[:2_000_000])
    with pytest.raises(AssayError, match=r"cannot load .*cut.gguf: \w+") as caught:
        GgufScorer.load(f"gguf:{cut}")
    assert "gave no reason" not in caught.value.message
    cut.write_bytes(b"no gguf at all")
    with pytest.raises(AssayError, match="magic"):
        GgufScorer.load(f"gguf:{cut}")


def test_hooks_are_refused(scorer: GgufScorer, windows: list[Window]) -> None:
    from assay.engines.scoring import HookSpec

    with pytest.raises(UsageError, match="no hooks"):
        list(scorer.score_windows(windows, ScoreJob(hook=HookSpec("a:b"))))


def test_greedy_steps_are_what_scoring_says_of_the_same_tokens(
    scorer: GgufScorer, windows: list[Window]
) -> None:
    found = scorer.generate_greedy([w.tokens[:12] for w in windows], 6)
    grown = [
        Window(w.index, (*w.tokens[:12], *(s.token for s in steps)))
        for w, steps in zip(windows, found, strict=True)
    ]
    # Token by token on both sides: a quantised product of many tokens at once rounds in another
    # way.
    scored = logits(scorer, grown, ScoreJob(ScoringPath.DECODE, scored_from=12, batch=3))
    for rows, steps in zip(scored, found, strict=True):
        for row, step in zip(rows.astype(np.float64), steps, strict=True):
            assert int(row.argmax()) == step.token
            assert row[step.token] - row[step.runner_up] == pytest.approx(step.gap, abs=2e-2)
            assert row[step.runner_up] >= np.sort(row)[-2] - 2e-2
