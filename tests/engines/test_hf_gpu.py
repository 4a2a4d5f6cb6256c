"""On a GPU: it is found, and a real lack of its memory halves a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.engines.device import free_memory
from assay.engines.hf.scorer import HfScorer, choose_batch
from assay.engines.scoring import ScoreJob, ScoringPath, Window
from assay.environment import describe
from assay.errors import AssayError

if not torch.cuda.is_available():
    pytest.skip("there is no GPU", allow_module_level=True)

LENGTH = 1024


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=1024,
        intermediate_size=16_384,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(1000)}, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(
        folder
    )
    return folder


@pytest.fixture
def scorer(checkpoint: Path) -> Iterator[HfScorer]:
    engine = HfScorer.load(f"hf:{checkpoint}?dtype=float32")
    yield engine
    engine.close()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def windows(count: int) -> list[Window]:
    return [Window(i, tuple((7 * i + 3 * j) % 1000 for j in range(LENGTH))) for i in range(count)]


def leave(room: int) -> None:
    """Let torch take `room` more bytes of the GPU."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + room) / total)


def test_the_gpu_is_found_and_said(scorer: HfScorer) -> None:
    assert scorer.describe()["device"].startswith("cuda")
    list(scorer.score_windows(windows(1), ScoreJob()))
    assert describe()["gpu"] == torch.cuda.get_device_name()
    assert free_memory("cuda") > 1 << 30


@pytest.mark.parametrize("path", list(ScoringPath))
def test_a_batch_that_does_not_fit_is_halved_with_the_same_numbers(
    scorer: HfScorer, path: ScoringPath
) -> None:
    job = ScoreJob(path, scored_from=1000, chunk=8, batch=16)
    expected = [rows.states for rows in scorer.score_windows(windows(16), job)]
    alone = [
        rows.states for rows in scorer.score_windows(windows(16), ScoreJob(path, 1000, 8, batch=1))
    ]
    own = max(float((a - b).abs().max()) for a, b in zip(alone, expected, strict=True))
    torch.cuda.synchronize()
    block = LENGTH * 16_384 * 4  # one tensor of the feed-forward of one window
    leave(8 * block)
    found = [rows.states for rows in scorer.score_windows(windows(16), job)]
    note: Any = scorer.engagement().notes["batch"]
    assert note["asked"] == 16
    assert 1 <= note["windows"] < 16
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=4 * own + 1e-5)
    leave(block // 4)
    with pytest.raises(AssayError, match=r"a single window of 1,024 tokens on cuda"):
        list(scorer.score_windows(windows(2), job))


def test_a_chosen_batch_fits(scorer: HfScorer) -> None:
    for path in ScoringPath:
        job = ScoreJob(path, scored_from=513, batch=0)
        assert 1 <= choose_batch(scorer.engine.model, LENGTH, job) <= 64
        assert len(list(scorer.score_windows(windows(64), job))) == 64
        assert "asked" not in scorer.describe()["batch"]
