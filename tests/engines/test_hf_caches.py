"""KV caches of transformers that hold another type, on tiny random models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.engines import Request
from assay.engines.hf.cache import cache_dtype, new_cache, set_cache_dtype, token_bytes
from assay.engines.hf.decoding import Row, decode_batch
from assay.engines.hf.engine import HfEngine
from assay.engines.hf.prompt_logprobs import token_logprobs
from assay.engines.hf.scorer import HfScorer, choose_batch, greedy_steps, output_head, window_states
from assay.engines.hf.spec import KV_CACHE_DTYPES, HfSpec
from assay.engines.scoring import Engagement, HookSpec, ScoreJob, ScoringPath, Window
from assay.errors import AssayError

pytestmark = pytest.mark.engine

torch.set_num_threads(1)

LENGTH, LAYERS, SLIDING = 30, 3, 8
NARROW = ("bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")
KEPT = {"bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def net(kind: str = "llama", dtype: str = "auto", large: float = 1.0) -> Any:
    """A model whose cache holds `dtype`; keys and values are `large` times what they would be."""
    torch.manual_seed(0)
    small = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 60,
    }
    if kind == "gemma3":
        config = transformers.Gemma3TextConfig(
            **small, head_dim=16, sliding_window=SLIDING, sliding_window_pattern=2
        )
        made = transformers.Gemma3ForCausalLM(config)
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small))
    for layer in made.model.layers:
        layer.self_attn.v_proj.weight.data *= large
        layer.self_attn.k_proj.weight.data *= large
    set_cache_dtype(made, dtype)
    return made.eval()


def windows(count: int = 3) -> list[Window]:
    generator = torch.Generator().manual_seed(1)
    return [
        Window(i, tuple(torch.randint(1, 60, (LENGTH,), generator=generator).tolist()))
        for i in range(count)
    ]


def states(model: Any, path: ScoringPath = ScoringPath.DECODE, **job: Any) -> Any:
    settings = ScoreJob(path, **({"batch": 2} | job))
    return torch.stack([s for _, s in window_states(model, windows(), settings, None)])


def filled(model: Any, tokens: int) -> Any:
    held = new_cache(model)
    with torch.inference_mode():
        for token in windows(1)[0].tokens[:tokens]:
            model.base_model(
                input_ids=torch.tensor([[token]] * 2), past_key_values=held, use_cache=True
            )
    return held


def resident_bytes(held: Any) -> int:
    """Bytes of the storage behind all that the layers of a cache hold."""
    held = [x for layer in held.layers for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held if x.ndim == 4
    }
    return sum(storages.values())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", NARROW)
def test_attention_reads_what_is_held_and_nothing_else(kind: str, dtype: str) -> None:
    """By hand: keys and values are put through a rounding of their own, in a cache of the model's
    type.
    """
    model = net(kind, dtype)
    kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    narrow = (
        kinds.get(dtype) or {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[dtype]
    )

    class Rounded(transformers.DynamicCache):  # type: ignore[misc]
        def update(self, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(
                k.to(narrow).to(k.dtype), v.to(narrow).to(v.dtype), *args, **kwargs
            )

    for path in (ScoringPath.DECODE, ScoringPath.CHUNKED):
        found = states(model, path, scored_from=11, chunk=4)
        # In the same batches: another sum of floats may round a value to the other side.
        for part, own in ((windows()[:2], found[:2]), (windows()[2:], found[2:])):
            held, ids = Rounded(config=model.config), torch.tensor([w.tokens[:-1] for w in part])
            step = 1 if path is ScoringPath.DECODE else 4
            blocks = [
                (0, 10),
                *((lo, min(lo + step, LENGTH - 1)) for lo in range(10, LENGTH - 1, step)),
            ]
            with torch.inference_mode():
                rows = [
                    model.base_model(
                        input_ids=ids[:, lo:hi], past_key_values=held
                    ).last_hidden_state
                    for lo, hi in blocks
                ]
            assert torch.equal(own, torch.cat(rows[1:], dim=1))
    assert not torch.equal(states(model), states(net(kind)))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_type_of_the_model_changes_nothing(kind: str) -> None:
    plain = net(kind)
    assert cache_dtype(plain) == torch.float32
    del plain.assay_cache_dtype  # as a model that no engine has loaded
    assert torch.equal(states(plain), states(net(kind)))
    assert torch.equal(states(net(kind).bfloat16()), states(net(kind, "bfloat16").bfloat16()))


@pytest.mark.parametrize("dtype", NARROW)
def test_memory_is_as_small_as_the_type_says(dtype: str) -> None:
    tokens = 20
    model = net("llama", dtype)
    held = filled(model, tokens)
    assert {layer.keys.dtype for layer in held.layers} == {cache_dtype(model)}
    assert resident_bytes(held) == 2 * tokens * (token_bytes(model) or 0)  # of two rows
    assert resident_bytes(held) * 4 == resident_bytes(filled(net("llama"), tokens)) * KEPT[dtype]
    # A sliding layer lets go of what no token sees; the view it keeps stands on one token more.
    sliding = [filled(net("gemma3", name), tokens) for name in ("auto", dtype)]
    assert resident_bytes(sliding[1]) * 4 == resident_bytes(sliding[0]) * KEPT[dtype]
    full, slid = 1 * tokens, 2 * SLIDING
    assert resident_bytes(sliding[1]) == 2 * 2 * 2 * 16 * KEPT[dtype] * (full + slid)


@pytest.mark.parametrize(
    ("dtype", "top", "large"), [("fp8_e4m3", 448.0, 1e4), ("fp8_e5m2", 57344.0, 1e7)]
)
def test_what_is_too_large_is_the_largest(dtype: str, top: float, large: float) -> None:
    held = filled(net("llama", dtype, large=large), 6)
    for layer in held.layers:
        assert (
            float(layer.keys.float().abs().max()) == float(layer.values.float().abs().max()) == top
        )


def test_generation_and_scores_go_through_the_same_cache() -> None:
    model = net("llama", "fp8_e5m2", large=8.0)
    head, prefixes = output_head(model), [w.tokens[:10] for w in windows()]
    steps = greedy_steps(model, head, prefixes, 8)
    rng = np.random.default_rng(0)
    # Rows that end leave the batch, so that the cache has to pick among them.
    rows = [Row(p, n, 0.0, 1.0, rng, frozenset()) for p, n in zip(prefixes, (2, 8, 5), strict=True)]
    decode_batch(model, rows, 0)
    for row, own in zip(rows, steps, strict=True):
        assert row.tokens == [step.token for step in own][: row.max_tokens]
    exact = net("llama", large=8.0)
    assert [s.logprob for s in greedy_steps(exact, head, prefixes, 8)[0]] != [
        s.logprob for s in steps[0]
    ]

    tokens = windows(1)[0].tokens
    (chunked,) = window_states(model, windows(1), ScoreJob(ScoringPath.CHUNKED, chunk=LENGTH), None)
    expected = torch.log_softmax(head.logits(chunked[1]), dim=-1)
    given = [float(expected[i, t]) for i, t in enumerate(tokens[1:])]
    assert token_logprobs(model, tokens)[1:] == pytest.approx(given, abs=1e-5)


class _Tokenizer(SimpleNamespace):
    chat_template = None
    eos_token_id = None
    pad_token_id = 0


def scorer(dtype: str) -> HfScorer:
    model = net("llama", dtype)
    model.generation_config = SimpleNamespace(eos_token_id=None)
    return HfScorer(HfEngine(HfSpec("model", kv_cache_dtype=dtype), model, _Tokenizer()))


def test_an_engine_says_what_its_cache_holds_and_counts_its_bytes() -> None:
    for dtype, name, size in (
        ("auto", "float32", 4),
        ("fp8_e4m3", "fp8_e4m3", 1),
        ("float16", "float16", 2),
    ):
        engine = scorer(dtype)
        token = 2 * 2 * 8 * LAYERS * size
        facts = engine.describe()
        assert (facts["kv_cache_dtype"], facts["kv_bytes_per_token"]) == (name, token)
        assert len(list(engine.score_windows(windows(), ScoreJob(ScoringPath.DECODE)))) == 3
        assert engine.engagement().bytes_read == 3 * sum(range(LENGTH - 1)) * token


@pytest.mark.parametrize("dtype", NARROW)
def test_prefill_reads_no_cache_and_is_refused(dtype: str) -> None:
    engine = scorer(dtype)
    assert engine.ability.paths == {ScoringPath.DECODE, ScoringPath.CHUNKED}
    assert "prefill path reads none" in engine.ability.reason
    with pytest.raises(
        AssayError, match=f"kv_cache_dtype={dtype} .* the prefill path reads none"
    ) as caught:
        next(engine.score_windows(windows(), ScoreJob()))
    assert "--path decode" in caught.value.remedy
    assert ScoringPath.PREFILL in scorer("auto").ability.paths


def test_a_model_that_keeps_other_state_is_refused() -> None:
    config = transformers.Qwen3NextConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=60,
    )
    model = SimpleNamespace(config=config)
    set_cache_dtype(model, "auto")
    with pytest.raises(AssayError, match="LinearAttention"):
        set_cache_dtype(model, "fp8_e4m3")


def test_every_name_that_is_accepted_has_a_type() -> None:
    for name in KV_CACHE_DTYPES:
        if name != "fp8":  # read as fp8_e4m3
            model = net()
            set_cache_dtype(model, name)
            held = str(cache_dtype(model)).removeprefix("torch.")
            wanted = str(model.dtype).removeprefix("torch.") if name == "auto" else name
            assert held.replace("float8_", "fp8_").removesuffix("fn") == wanted


@contextmanager
def limited(model: Any, cells: int) -> Iterator[list[int]]:
    """An allocator that has room for so many tokens in one forward pass; the list holds the rows of
    those that failed.
    """
    failed: list[int] = []

    def watch(_: Any, inputs: Any) -> None:
        if inputs[0].shape[0] * inputs[0].shape[1] > cells:
            failed.append(inputs[0].shape[0])
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory:"
                " you tried"
            )

    handle = model.get_input_embeddings().register_forward_pre_hook(watch)
    try:
        yield failed
    finally:
        handle.remove()


@pytest.mark.parametrize("path", list(ScoringPath))
def test_numbers_by_halves_are_those_of_the_whole_batch(path: ScoringPath) -> None:
    job = ScoreJob(path, scored_from=11, chunk=4, batch=8)
    whole = scorer("auto")
    expected = [rows.states for rows in whole.score_windows(windows(7), job)]
    assert whole.describe()["batch"] == {"windows": 8}
    assert whole.engagement().notes == {}
    # What another batch changes anyway, in the order of the sums.
    alone = [
        rows.states for rows in scorer("auto").score_windows(windows(7), replace(job, batch=1))
    ]
    own = max(float((a - b).abs().max()) for a, b in zip(alone, expected, strict=True))

    small = scorer("auto")
    most = {ScoringPath.PREFILL: LENGTH - 1, ScoringPath.CHUNKED: 10, ScoringPath.DECODE: 10}[path]
    with limited(small.engine.model, 2 * most) as failed:
        found = list(small.score_windows(windows(7), job))
        assert failed == [7, 3]
        assert (
            small.describe()["batch"]
            == small.engagement().notes["batch"]
            == {"windows": 1, "asked": 8}
        )
        list(small.score_windows(windows(7), job))
        assert failed == [7, 3]  # what did not fit is not tried again
    assert [rows.window.index for rows in found] == list(range(7))
    for rows, states_ in zip(found, expected, strict=True):
        torch.testing.assert_close(rows.states, states_, rtol=0, atol=2 * own + 1e-6)
    assert small.engagement().bytes_read == whole.engagement().bytes_read


def test_text_and_greedy_tokens_by_halves_are_the_same() -> None:
    whole, small = scorer("auto"), scorer("auto")
    asked = [
        Request(prompt=w.tokens[:10], max_tokens=6, temperature=0.9, seed=i, ignore_eos=True)
        for i, w in enumerate(windows(6))
    ]
    prefixes = [w.tokens[:10] for w in windows(6)]
    for made in (whole, small):
        made.engine._tokenizer.decode = lambda tokens, **_: " ".join(map(str, tokens))
    done: list[int] = []
    with limited(small.engine.model, 25) as failed:
        replies = small.engine.generate_batch(asked, lambda: done.append(1))
        assert replies == whole.engine.generate_batch(asked)
        assert (failed, len(done)) == ([6, 3], 6)
        for a, b in zip(
            small.generate_greedy(prefixes, 5), whole.generate_greedy(prefixes, 5), strict=True
        ):
            assert [step.token for step in a] == [step.token for step in b]
            assert [step.logprob for step in a] == pytest.approx(
                [step.logprob for step in b], abs=1e-5
            )
    with (
        limited(small.engine.model, 5),
        pytest.raises(AssayError, match="a prompt of 10 tokens on cpu"),
    ):
        small.engine.generate(asked[0])
    with (
        limited(small.engine.model, 5),
        pytest.raises(AssayError, match="a text of 30 tokens on cpu"),
    ):
        small.engine.score(windows(1)[0].tokens)


class Counts:
    passes = 1

    def __init__(self) -> None:
        self.batches: list[int] = []

    def attach(self, model: Any) -> Any:
        return nullcontext()

    def new_cache(self, batch: int, index: int) -> None:
        self.batches.append(batch)

    def engagement(self) -> Engagement:
        return Engagement(fires=sum(self.batches), notes={"own": 1})


class Forgets(Counts):
    def discard(self) -> None:
        self.batches.pop()


def test_a_hook_that_cannot_forget_a_batch_is_not_run_again_by_halves() -> None:
    engine, job = scorer("auto"), ScoreJob(batch=4)
    with limited(engine.engine.model, 2 * LENGTH):
        with pytest.raises(AssayError, match="4 windows of 30 tokens on cpu") as caught:
            list(
                engine.score_windows(
                    windows(4), replace(job, hook=HookSpec("test_hf_caches:Counts"))
                )
            )
        assert "--batch" in caught.value.remedy
        assert (
            len(
                list(
                    engine.score_windows(
                        windows(4), replace(job, hook=HookSpec("test_hf_caches:Forgets"))
                    )
                )
            )
            == 4
        )
    assert engine.engagement().fires == 4
    assert engine.engagement().notes == {"own": 1, "batch": {"windows": 2, "asked": 4}}


def test_a_batch_is_chosen_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(
        free: int,
        path: ScoringPath = ScoringPath.DECODE,
        *,
        hooked: bool = False,
        kind: str = "llama",
    ) -> int:
        monkeypatch.setattr("assay.engines.hf.scorer.free_memory", lambda device: free)
        return choose_batch(
            net(kind), 1024, ScoreJob(path, scored_from=513, batch=0), hooked=hooked
        )

    # By hand: 32 wide, 48 in the feed-forward, 4 heads of 8, 2 KV heads, 3 layers, 4 bytes a
    # number.
    cache = 1024 * 3 * 2 * 2 * 8 * 4
    work, states_ = 513 * (6 * 32 + 3 * 48 + 2 * 32) * 4, 2 * 1024 * 32 * 4
    one = cache + work + states_
    assert chosen(int(5.1 * one / 0.7)) == 5
    assert chosen(int(5.1 * (one + 2 * cache) / 0.7), hooked=True) == 5
    assert chosen(0) == 1
    assert (chosen(1 << 60), chosen(1 << 60, ScoringPath.PREFILL)) == (16, 4)
    found = [
        rows.window.index for rows in scorer("auto").score_windows(windows(5), ScoreJob(batch=0))
    ]
    assert found == [0, 1, 2, 3, 4]
