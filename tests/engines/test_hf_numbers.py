"""Sampling, decoding and scoring against transformers itself, on a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from assay.engines import GIVEN_UP, Capability, Message, MissingCapability, Request
from assay.engines.hf.engine import HfEngine
from assay.errors import AssayError, UsageError

pytestmark = pytest.mark.engine

WORDS = [f"w{i}" for i in range(120)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with grouped heads and a vocabulary of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(tiny: Path) -> HfEngine:
    return HfEngine.load(f"hf:{tiny}?dtype=float32")


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, attn_implementation="eager").eval()


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(1)
    return [tuple(int(t) for t in rng.integers(3, 123, size=3 + 5 * i)) for i in range(count)]


def test_greedy_in_a_batch_is_greedy_by_transformers(engine: HfEngine, model: Any) -> None:
    import torch

    asked = [Request(prompt=p, max_tokens=24, ignore_eos=True) for p in prompts(6)]
    for request, reply in zip(asked, engine.generate_batch(asked), strict=True):
        ids = torch.tensor([request.prompt])
        want = model.generate(
            ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        text = " ".join(WORDS[t - 3] if t >= 3 else "" for t in want[0, ids.shape[1] :].tolist())
        assert reply.content.split() == text.split()
        assert (reply.completion_tokens, reply.finish_reason) == (24, "length")
        assert reply.prompt_tokens == len(request.prompt or ())


def test_what_is_not_written_by_the_deadline_is_given_up_and_what_ended_before_it_stays(
    engine: HfEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        Request(prompt=p, max_tokens=n, ignore_eos=True)
        for p, n in zip(prompts(3), (4, 40, 40), strict=True)
    ]
    ticks = iter(range(1000))
    monkeypatch.setattr("assay.engines.hf.decoding.time.monotonic", lambda: next(ticks))
    replies = engine.generate_batch(asked, deadline=8)
    assert [r.finish_reason for r in replies] == ["length", GIVEN_UP, GIVEN_UP]
    assert replies[0].completion_tokens == 4 and 4 < (replies[1].completion_tokens or 0) < 12
    assert [r.finish_reason for r in engine.generate_batch(asked, deadline=8)] == [GIVEN_UP] * 3


def test_a_seed_gives_one_text_whatever_shares_the_batch(engine: HfEngine) -> None:
    def sampled(seed: int) -> Request:
        return Request(prompt=prompts(1)[0], max_tokens=20, temperature=1.0, top_p=0.9, seed=seed)

    alone = engine.generate(sampled(7)).content
    others = [sampled(seed) for seed in range(9)]
    replies = engine.generate_batch(others)
    assert replies[7].content == alone
    assert len({reply.content for reply in replies}) > 5


def test_scores_are_those_of_one_plain_pass(
    engine: HfEngine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(
        "assay.engines.hf.prompt_logprobs.LOGITS_AT_ONCE", 20 * 123
    )  # chunks of 20 tokens
    ids = tuple(int(t) for t in np.random.default_rng(2).integers(3, 123, size=75))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    plain = torch.log_softmax(logits, -1)
    want = [float(plain[i, ids[i + 1]]) for i in range(74)]
    scores = engine.score(ids)
    assert scores.token_logprobs[0] is None
    np.testing.assert_allclose(scores.scored, want, atol=1e-4)
    assert (scores.token_count, scores.bytes, scores.token_ids) == (75, None, ids)


def test_scores_of_a_text_count_its_bytes(engine: HfEngine) -> None:
    scores = engine.score("w5 w6 w7")
    assert scores.bytes == 8
    assert scores.token_ids == engine.tokenize("w5 w6 w7") == (8, 9, 10)
    assert scores.bits_per_byte == pytest.approx(scores.nll / np.log(2) / 8)


def test_a_text_ends_at_eos_at_a_stop_word_or_at_its_limit(engine: HfEngine) -> None:
    request = Request(prompt=(9, 8, 7), max_tokens=400, temperature=1.5, seed=3)
    reply = engine.generate(request)
    assert reply.finish_reason == "stop"
    assert (reply.completion_tokens or 0) < 400
    free = engine.generate(Request(prompt=(9, 8, 7), max_tokens=30, ignore_eos=True))
    word = free.content.split()[4]
    cut = engine.generate(Request(prompt=(9, 8, 7), max_tokens=30, ignore_eos=True, stop=(word,)))
    assert cut.finish_reason == "stop"
    assert free.content.startswith(cut.content)
    assert word not in cut.content


def test_what_it_cannot_do_is_refused(engine: HfEngine, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingCapability, match="no chat template"):
        engine.generate(Request(messages=(Message("user", "hello"),), max_tokens=4))
    with pytest.raises(MissingCapability, match="one piece"):
        engine.stream(Request(prompt="w1", max_tokens=4))
    with pytest.raises(UsageError, match="empty text"):
        engine.score("")
    with pytest.raises(UsageError, match="empty prompt"):
        engine.generate(Request(prompt="", max_tokens=4))
    assert Capability.SCORE in engine.capabilities
    with pytest.raises(AssayError, match=r"is no checkpoint: the folder holds no config\.json"):
        HfEngine.load(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(AssayError, match="cannot load the model") as caught:
        HfEngine.load(f"hf:{tmp_path}")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("spread", [0.01, 2.0])
def test_draws_follow_the_nucleus_of_transformers(
    top_p: float, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that can be drawn, and how often, against transformers' own top-p filter."""
    import torch
    from transformers import TopPLogitsWarper

    from assay.engines.hf.decoding import draw_tokens

    monkeypatch.setattr("assay.engines.hf.decoding._HEAD", 4)  # so that the search widens
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(1, 300, generator=generator)
    kept = TopPLogitsWarper(top_p)(torch.zeros(1, 1, dtype=torch.long), logits.clone() / 0.7)
    want = torch.softmax(kept, -1)[0].double()
    draws = 20_000
    # Evenly spaced numbers hit every token as often as its share, to within one.
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    many = draw_tokens(
        logits.expand(draws, -1), torch.full((draws,), 0.7), torch.full((draws,), top_p), uniform
    )
    found = torch.bincount(many, minlength=300).double() / draws
    assert (found - want).abs().max() < 2 / draws


def test_greedy_rows_and_dead_rows() -> None:
    import torch

    from assay.engines.hf.decoding import draw_tokens

    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, float("nan"), 1.0], [0.0, float("nan"), 1.0]])
    heat, one = torch.tensor([0.0, 0.0, 1.0]), torch.ones(3)
    assert draw_tokens(logits, heat, one, one / 2).tolist() == [1, 0, 0]


def test_greedy_steps_are_those_of_transformers_with_its_two_likeliest(
    engine: HfEngine, model: Any
) -> None:
    import torch

    from assay.engines.hf.scorer import HfScorer

    prefixes = [
        tuple(int(t) for t in row) for row in np.random.default_rng(2).integers(3, 123, size=(4, 9))
    ]
    found = HfScorer(engine).generate_greedy(prefixes, 12)
    for prefix, steps in zip(prefixes, found, strict=True):
        ids = list(prefix)
        assert len(steps) == 12
        for step in steps:
            with torch.inference_mode():
                logprobs = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
            values, order = logprobs.topk(2)
            assert [step.token, step.runner_up] == order.tolist()
            assert [step.logprob, step.runner_up_logprob] == pytest.approx(
                values.tolist(), abs=1e-4
            )
            ids.append(step.token)


def test_a_text_of_its_own_begins_after_the_start_token_or_what_separates_documents() -> None:
    from types import SimpleNamespace

    from assay.engines.tokenizer import document_start

    def tokenizer(vocabulary: dict[str, int], puts: list[int], **names: int | None) -> Any:
        class Tokenizer(SimpleNamespace):
            def __call__(self, text: str) -> dict[str, list[int]]:
                return {"input_ids": [*puts, 7]}

        return Tokenizer(
            get_vocab=lambda: vocabulary, **{"bos_token_id": None, "eos_token_id": None, **names}
        )

    assert document_start(tokenizer({"<|endoftext|>": 5}, [1], bos_token_id=1)) == 1
    assert document_start(tokenizer({"<|endoftext|>": 5}, [], bos_token_id=1)) == 5
    assert document_start(tokenizer({}, [], bos_token_id=1, eos_token_id=2)) == 1
    assert document_start(tokenizer({}, [], eos_token_id=2)) == 2
    with pytest.raises(AssayError, match="no token that a text could begin after"):
        document_start(tokenizer({}, []))
