"""The engine's own 8-bit cache against the codec `fp8`, and codecs in a cache that holds another
type.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from test_kv_hook import LENGTH, Rounding, everywhere, model, windows

from assay.engines.hf.cache import set_cache_dtype
from assay.engines.hf.scorer import window_states
from assay.engines.scoring import ScoreJob, ScoringPath
from assay_lab.kv.cache_hook import CodecHook
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_spec

pytestmark = pytest.mark.engine

torch.set_num_threads(1)


def codec_hook(net: Any, spec: str, mode: Mode = Mode.DECODE) -> CodecHook:
    parsed = parse_spec(spec)
    layer_coders = LayerCoders(cache_shape(net), Rotary(net, LENGTH))
    coders = layer_coders.fit_all(lambda _, stream: parsed.of(stream)).by_stream
    return CodecHook(coders, mode, LENGTH, measure_windows=0)


def states(
    net: Any, hook: CodecHook | None, path: ScoringPath = ScoringPath.DECODE, first: int = 1
) -> Any:
    job = ScoreJob(path, scored_from=first, batch=2, chunk=LENGTH)
    if hook is None:
        return torch.stack([s for _, s in window_states(net, windows(), job, None)])
    with hook.attach(net):
        return torch.stack([s for _, s in window_states(net, windows(), job, hook)])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("form", ["e4m3", "e5m2"])
def test_a_cache_of_8_bits_has_the_numbers_of_the_codec(kind: str, form: str) -> None:
    """In mode decode, and where the codec too is in the way of the prefix, in mode inforward."""
    net = model(kind)
    coded = states(net, codec_hook(net, f"fp8(format={form})"))
    exact = states(net, None, ScoringPath.CHUNKED, 21)
    whole = states(
        net, codec_hook(net, f"fp8(format={form})", Mode.INFORWARD), ScoringPath.PREFILL, 21
    )
    set_cache_dtype(net, f"fp8_{form}")
    assert torch.equal(states(net, None), coded)
    # Blocks are summed in another order than one pass, which may round a value to the other side.
    chunked = states(net, None, ScoringPath.CHUNKED, 21)
    assert float((chunked - whole).abs().mean()) < 0.2 * float((exact - whole).abs().mean())


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.INFORWARD])
def test_a_codec_in_a_narrow_cache_is_rounded_again(kind: str, mode: Mode) -> None:
    net = model(kind)
    path = ScoringPath.DECODE if mode is Mode.DECODE else ScoringPath.PREFILL
    exact = states(net, codec_hook(net, "hadamard(bits=4)", mode), path, 21)
    set_cache_dtype(net, "fp8_e4m3")
    assert not torch.equal(states(net, codec_hook(net, "hadamard(bits=4)", mode), path, 21), exact)
    # What a codec gives that lies on the grid of the cache, the cache keeps as it is.
    twice = states(net, codec_hook(net, "fp8", mode), path, 1)
    set_cache_dtype(net, "auto")
    assert torch.equal(states(net, codec_hook(net, "fp8", mode), path, 1), twice)


def test_blocks_that_a_codec_replaces_saturate_too() -> None:
    net = model()
    for layer in net.model.layers:
        layer.self_attn.k_proj.weight.data *= 1e7
    set_cache_dtype(net, "fp8_e5m2")
    hook = CodecHook(everywhere(Rounding(step=1e5, granularity=4)), Mode.DECODE, LENGTH)
    found = states(net, hook, first=21)
    assert bool(torch.isfinite(found).all())
    # A byte a value: half of what the model's type would be.
    per_token = 2 * 2 * 16 * len(net.model.layers)
    assert hook.engagement().bytes_read == 3 * sum(range(20, LENGTH - 1)) * per_token
