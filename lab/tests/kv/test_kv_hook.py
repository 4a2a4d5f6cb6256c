"""The three modes of a codec in a real forward pass, with a coder simple enough to know what must
come out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from codec_cases import SPECS, samples

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import ScoreJob, ScoringPath, Window
from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_bytes import check_read, measured_bytes, stream_facts
from assay_lab.kv.cache_hook import CodecHook, spread
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.spec import parse_recipe

pytestmark = pytest.mark.engine

LAYERS, LENGTH = 4, 40


@dataclass
class Rounding:
    """Rounds to a grid; its "stream" is one byte a value and two for every exact one."""

    step: float = 0.5
    granularity: int = 1
    exact_first: int = 0
    exact_last: int = 0
    before_rope: bool = False
    lossless: bool = False
    table_bytes: int = 0
    predictor_keys: tuple[Any, ...] = ()

    def reconstruct(self, x: Any, predictors: Any = None) -> Any:
        # A codec of blocks sees whole blocks only.
        assert x.shape[1] % self.granularity == 0
        return x if self.lossless else torch.round(x / self.step) * self.step

    def encode(self, x: Any, predictors: Any = None) -> bytes:
        tokens = x.shape[1]
        exact = min(tokens, self.exact_first + self.exact_last)
        end = tokens - min(tokens, self.exact_last)
        end -= max(0, end - self.exact_first) % self.granularity
        self.held = x.float().clone()
        if end > self.exact_first:
            self.held[:, self.exact_first : end] = self.reconstruct(
                x[:, self.exact_first : end]
            ).float()
        return bytes(x[:, : tokens - exact].numel() + 2 * x[:, :exact].numel())

    def decode(self, stream: bytes, *, predictors: Any = None) -> Any:
        return self.held


class Bare(Rounding):
    """What comes back of the stream is a step off what attention read."""

    def decode(self, stream: bytes, *, predictors: Any = None) -> Any:
        return self.held + self.step


class Kept(Rounding):
    """The stream holds what it should have coded."""

    def encode(self, x: Any, predictors: Any = None) -> bytes:
        written = super().encode(x, predictors)
        self.held = x.float()
        return written


class Moved(Rounding):
    """Exact tokens come back as others."""

    def decode(self, stream: bytes, *, predictors: Any = None) -> Any:
        return self.held.roll(1, dims=1)


def model(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    small = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    }
    if kind == "gemma3":
        config = transformers.Gemma3TextConfig(
            **small, head_dim=32, sliding_window=8, sliding_window_pattern=2
        )
        return transformers.Gemma3ForCausalLM(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)).eval()


def windows(count: int = 3) -> list[Window]:
    generator = torch.Generator().manual_seed(1)
    return [
        Window(i, tuple(torch.randint(1, 100, (LENGTH,), generator=generator).tolist()))
        for i in range(count)
    ]


def everywhere(coder: Rounding) -> dict[tuple[int, str], Rounding]:
    return {(layer, stream): coder for layer in range(LAYERS) for stream in "kv"}


def states(
    net: Any, mode: Mode | None, coders: dict[Any, Any], **job: Any
) -> tuple[Any, CodecHook | None]:
    path = ScoringPath.DECODE if mode in (None, Mode.DECODE) else ScoringPath.PREFILL
    if job.pop("prefill", False):
        path = ScoringPath.PREFILL
    settings = ScoreJob(path, scored_from=job.pop("scored_from", 21), batch=job.pop("batch", 2))
    if block := job.pop("block", 0):
        settings = replace(settings, path=ScoringPath.CHUNKED, chunk=block)
    hook = CodecHook(coders, mode, LENGTH) if mode else None
    if hook:
        with hook.attach(net):
            found = [s for _, s in window_states(net, windows(), settings, hook)]
    else:
        found = [s for _, s in window_states(net, windows(), settings, None)]
    return torch.stack(found), hook


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", list(Mode))
def test_a_lossless_coder_changes_nothing_and_fires(kind: str, mode: Mode) -> None:
    net = model(kind)
    plain, _ = states(net, None, {}, prefill=mode is not Mode.DECODE)
    coded, hook = states(net, mode, everywhere(Rounding(lossless=True)))
    assert torch.equal(plain, coded)
    assert hook is not None
    found = hook.engagement()
    assert set(found.per_layer) == set(range(LAYERS))
    assert found.bytes_read or mode is not Mode.DECODE


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "coder",
    [
        Rounding(),
        Rounding(granularity=4),
        Rounding(exact_first=3, exact_last=5),
        Rounding(granularity=8, exact_first=2),
    ],
)
def test_decode_is_a_cache_that_is_rewritten_by_hand(kind: str, coder: Rounding) -> None:
    """Against a plain loop: after each token, every position that is due is rounded in an ordinary
    cache.
    """
    net = model(kind)
    prefix = 20
    expected = []
    for window in windows():
        cache = transformers.DynamicCache(config=net.config)
        ids = torch.tensor([window.tokens])
        with torch.inference_mode():
            net.base_model(input_ids=ids[:, :prefix], past_key_values=cache)
            rows = []
            done = coder.exact_first

            def rewrite(end: int, cache: Any = cache) -> None:
                nonlocal done
                ready = end - coder.exact_last
                ready -= max(0, ready - coder.exact_first) % coder.granularity
                for layer in cache.layers:
                    start = end - layer.keys.shape[-2]
                    for held in (layer.keys, layer.values):
                        for position in range(max(done, start), ready):
                            held[..., position - start, :] = coder.reconstruct(
                                held[0][:, [position - start] * coder.granularity]
                            )[:, :1].transpose(0, 1)[0]
                done = max(done, ready)

            rewrite(prefix)
            for position in range(prefix, LENGTH - 1):
                if coder.granularity == 1 and coder.exact_last == 0:
                    # The token is coded as it comes, so its own step reads it coded: by an observed
                    # layer.
                    hooks = [_rounded(layer, coder) for layer in cache.layers]
                    out = net.base_model(
                        input_ids=ids[:, position : position + 1], past_key_values=cache
                    )
                    for undo in hooks:
                        undo()
                    done = position + 1
                else:
                    out = net.base_model(
                        input_ids=ids[:, position : position + 1], past_key_values=cache
                    )
                    rewrite(position + 1)
                rows.append(out.last_hidden_state[0, 0])
        expected.append(torch.stack(rows))
    found, hook = states(net, Mode.DECODE, everywhere(coder))
    torch.testing.assert_close(found, torch.stack(expected), atol=1e-5, rtol=1e-4)
    assert hook is not None
    assert hook.engagement().fires


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("coder", "block"),
    [(Rounding(), 19), (Rounding(exact_first=3), 7), (Rounding(granularity=4), 4), (Rounding(granularity=8, exact_last=4), 4)],  # noqa: E501
)  # fmt: skip
def test_tokens_that_are_fed_together_see_what_each_sees_alone(
    kind: str, coder: Rounding, block: int
) -> None:
    net = model(kind)
    alone, _ = states(net, Mode.DECODE, everywhere(coder))
    together, hook = states(net, Mode.DECODE, everywhere(coder), block=block)
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-4)
    exact, _ = states(net, None, {})
    assert (alone - exact).abs().max() > 1e-2
    assert hook is not None
    assert hook.engagement().bytes_read


@pytest.mark.parametrize(
    ("coder", "block"), [(Rounding(exact_last=5), 2), (Rounding(granularity=4), 8), (Rounding(granularity=8, exact_first=2), 8)]  # noqa: E501
)  # fmt: skip
def test_tokens_that_would_see_other_codes_are_not_fed_together(
    coder: Rounding, block: int
) -> None:
    with pytest.raises(UsageError, match="cannot be fed together"):
        states(model(), Mode.DECODE, everywhere(coder), block=block)


def _rounded(layer: Any, coder: Rounding) -> Any:
    real = layer.update

    def update(k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        return real(coder.reconstruct(k), coder.reconstruct(v), *args, **kwargs)

    layer.update = update

    def undo() -> None:
        del layer.update

    return undo


def test_inforward_and_snapshot_differ_from_each_other_and_from_the_truth() -> None:
    net = model()
    plain, _ = states(net, None, {}, prefill=True)
    coders = everywhere(Rounding(step=0.3))
    inforward, _ = states(net, Mode.INFORWARD, coders)
    snapshot, _ = states(net, Mode.SNAPSHOT, coders)
    assert not torch.allclose(plain, inforward, atol=1e-4)
    assert not torch.allclose(inforward, snapshot, atol=1e-5)


@pytest.mark.parametrize("path", [ScoringPath.CHUNKED, ScoringPath.DECODE])
@pytest.mark.parametrize("mode", [Mode.INFORWARD, Mode.SNAPSHOT])
def test_other_paths_code_the_same_tokens(mode: Mode, path: ScoringPath) -> None:
    """Sinks and codes that come as each token does make no difference between one step and many."""
    net = model()
    coders = everywhere(Rounding(step=0.3, exact_first=3))
    whole, _ = states(net, mode, coders, scored_from=6)
    hook = CodecHook(coders, mode, LENGTH)
    job = ScoreJob(path, scored_from=6, chunk=7, batch=2)
    with hook.attach(net):
        cut = torch.stack([s for _, s in window_states(net, windows(), job, hook)])
    torch.testing.assert_close(whole, cut, atol=1e-4, rtol=1e-3)


def test_a_block_that_a_step_completes_is_coded_before_the_step_reads_it() -> None:
    """In the last layer, whose input no codec changes, the last token reads the same cache however
    its tokens came.
    """
    net = model()
    coders = {
        (LAYERS - 1, s): Rounding(step=0.3, granularity=13) for s in "kv"
    }  # 39 tokens are three blocks
    whole, _ = states(net, Mode.INFORWARD, coders, scored_from=LENGTH - 1)
    hook = CodecHook(coders, Mode.INFORWARD, LENGTH)
    job = ScoreJob(ScoringPath.CHUNKED, scored_from=6, chunk=17, batch=2)
    with hook.attach(net):
        cut = torch.stack([s for _, s in window_states(net, windows(), job, hook)])
    assert (
        hook.engagement().fires == 2 * 2 * 2
    )  # blocks are completed in two of three steps, in two batches
    torch.testing.assert_close(whole[:, -1], cut[:, -1], atol=1e-4, rtol=1e-3)
    # Token 20 came before its block was full.
    assert not torch.allclose(
        cut[:, 15], states(net, Mode.INFORWARD, coders, scored_from=21)[0][:, 0], atol=1e-4
    )
    torch.testing.assert_close(
        cut[:, 0], states(net, Mode.INFORWARD, coders, scored_from=6)[0][:, 0], atol=1e-4, rtol=1e-3
    )


def test_with_one_layer_inforward_and_snapshot_are_the_same() -> None:
    """Nothing can build up where only the first layer is coded."""
    net = model()
    coders = {(0, s): Rounding(step=0.3) for s in "kv"}
    inforward, _ = states(net, Mode.INFORWARD, coders)
    snapshot, _ = states(net, Mode.SNAPSHOT, coders)
    torch.testing.assert_close(inforward, snapshot)


def test_keys_before_rope_are_coded_before_rope() -> None:
    net = model()
    after, _ = states(net, Mode.INFORWARD, everywhere(Rounding(step=0.3)))
    before, _ = states(net, Mode.INFORWARD, everywhere(Rounding(step=0.3, before_rope=True)))
    exact, _ = states(net, Mode.INFORWARD, everywhere(Rounding(step=1e-6, before_rope=True)))
    plain, _ = states(net, None, {}, prefill=True)
    assert not torch.allclose(after, before, atol=1e-4)
    torch.testing.assert_close(exact, plain, atol=1e-3, rtol=1e-3)


def test_bytes_count_every_stream_and_the_exact_ones() -> None:
    net = model()
    coders = {(0, "k"): Rounding(exact_first=2)}
    _, hook = states(net, Mode.DECODE, coders)
    assert hook is not None
    tokens, values = LENGTH - 1, 2 * 16
    assert [f.stored for f in hook.facts[0, "k"]] == [(tokens - 2) * values + 2 * 2 * values] * 3
    assert [f.stored for f in hook.facts[0, "v"]] == [2 * tokens * values] * 3
    assert [f.exact for f in hook.facts[3, "k"]] == [2 * tokens * values] * 3
    assert hook.facts[0, "v"][0].error == 0 < hook.facts[0, "v"][0].power
    assert 0 < hook.facts[0, "k"][0].error < 0.25 * 0.25 * tokens * values  # half a step at most
    assert all(f.apart == 0 for found in hook.facts.values() for f in found)
    # What an engine hands over is the same, by way of JSON.
    engagement = hook.engagement()
    sent = replace(engagement, notes=json.loads(json.dumps(engagement.notes)))
    assert stream_facts(sent) == hook.facts
    assert measured_bytes(sent, tokens).ratio == pytest.approx(
        16 * tokens / (16 * tokens - (tokens - 2)), rel=1e-6
    )


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize(
    "wrong", [Bare(exact_first=2), Kept(), Kept(granularity=4), Moved(exact_first=2)]
)
def test_streams_that_do_not_give_back_what_attention_read_have_no_ratio(
    wrong: Rounding, mode: Mode
) -> None:
    _, hook = states(model(), mode, {(1, "v"): wrong})
    assert hook is not None
    with pytest.raises(
        AssayError, match="stream v of layer 1 does not give back what attention read"
    ) as raised:
        measured_bytes(hook.engagement(), LENGTH - 1)
    assert raised.value.finding_id == "kv.stream_mismatch"


@pytest.mark.parametrize(
    ("spec", "mode", "kind"),
    [
        *((spec, Mode.DECODE, "llama") for spec in SPECS),
        *((spec, Mode.INFORWARD, "llama") for spec in ("int", "fp8", "pca")),
        *(
            pytest.param(spec, Mode.INFORWARD, "llama", marks=pytest.mark.slow)
            for spec in SPECS
            if spec not in ("int", "fp8", "pca")
        ),
        *((spec, Mode.SNAPSHOT, "llama") for spec in ("int", "pca", "kakeya(block=128)")),
        *(
            (spec, Mode.DECODE, "gemma3")
            for spec in ("int", "fp8", "pca", "sinks+recent(n=3)+hadamard(bits=1)")
        ),
    ],
)
def test_the_streams_of_every_codec_give_back_what_attention_read(
    spec: str, mode: Mode, kind: str
) -> None:
    net = model(kind)
    shape = cache_shape(net)
    coders = {
        (layer, stream): (
            parse_recipe(spec.replace("block=128", "block=8").replace("block=100", "block=8")).fit(
                samples(LayerStream(stream, layer, shape.layers, shape.kv_heads, shape.head_dim))
            )
        )
        for layer in range(shape.layers)
        for stream in "kv"
    }
    _, hook = states(net, mode, coders)
    assert hook is not None and any(
        f.apart or f.error for found in hook.facts.values() for f in found
    ) != (spec == "identity")
    for key, found in hook.facts.items():
        check_read(key, found)


def test_measured_windows_are_spread_over_the_run() -> None:
    class Sized(Rounding):
        """A stream as long as the window is bright."""

        def encode(self, x: Any, predictors: Any = None) -> bytes:
            super().encode(x, predictors)
            return bytes(int(100_000 * x.abs().mean()))

    def stored(measure: int, windows_known: int | None) -> list[int]:
        net, coders = model(), everywhere(Sized())
        hook = CodecHook(
            coders, Mode.INFORWARD, LENGTH, measure_windows=measure, windows=windows_known
        )
        with hook.attach(net):
            for _ in window_states(net, windows(7), ScoreJob(ScoringPath.PREFILL, batch=3), hook):
                pass
        return [f.stored for f in hook.facts[1, "v"]]

    every = stored(7, 7)
    assert len(set(every)) == 7
    assert stored(3, 7) == [every[i] for i in (1, 3, 5)]
    assert stored(3, None) == every[:3]
    assert spread(8, 5) == set(range(5)) and spread(4, 128) == {16, 48, 80, 112}
