"""What transformers cannot score is said in one line, on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.engines.hf import scorer as window_scoring
from assay.engines.hf.engine import _on_device
from assay.engines.hf.spec import HfSpec
from assay.engines.scoring import (
    ScoreJob,
    Window,
)
from assay.errors import AssayError


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        max_position_embeddings=16,
    )
    yield transformers.LlamaForCausalLM(config).eval()


def windows(length: int, count: int = 5) -> list[Window]:
    return [Window(i, tuple(range(i, i + length))) for i in range(count)]


def test_windows_longer_than_the_positions_are_refused(model: Any) -> None:
    assert len(list(window_scoring.window_states(model, windows(16), ScoreJob(), None))) == 5
    with pytest.raises(AssayError, match="17 tokens are longer than the 16 positions") as caught:
        list(window_scoring.window_states(model, windows(17), ScoreJob(), None))
    assert caught.value.remedy == "give --length 16 or less"


def test_a_batch_is_halved_until_it_fits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = window_scoring._batch_states
    tried = []

    def full(model: Any, part: Any, job: Any, hook: Any) -> Any:
        tried.append(len(part))
        if len(part) > 1:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
        return whole(model, part, job, hook)

    expected = [s for _, s in window_scoring.window_states(model, windows(8), ScoreJob(batch=1), None)]
    monkeypatch.setattr(window_scoring, "_batch_states", full)
    found = list(window_scoring.window_states(model, windows(8), ScoreJob(batch=4), None))
    assert tried == [4, 2, 1, 1, 1, 1, 1]
    assert [w.index for w, _ in found] == [0, 1, 2, 3, 4]
    for (_, states), own in zip(found, expected, strict=True):
        torch.testing.assert_close(states, own)


def test_one_window_that_does_not_fit_is_an_error_with_a_remedy(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(window_scoring, "_batch_states", full)
    with pytest.raises(AssayError, match="single window of 8 tokens") as caught:
        list(window_scoring.window_states(model, windows(8), ScoreJob(), None))
    assert caught.value.finding_id == "fidelity.out_of_memory"
    assert "--length" in caught.value.remedy


def test_a_device_that_is_not_there_is_named(model: Any) -> None:
    with pytest.raises(AssayError, match="'nosuch'"):
        _on_device(model, HfSpec("m", device="nosuch"))
    if not torch.cuda.is_available():
        with pytest.raises(AssayError, match="'cuda'"):
            _on_device(model, HfSpec("m", device="cuda"))
