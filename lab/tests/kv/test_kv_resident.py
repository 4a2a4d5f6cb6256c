"""The compressed cache: it gives what the laboratory measures, and holds nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from test_kv_hook import LAYERS, LENGTH, model, windows

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import ScoreJob, ScoringPath
from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_hook import CodecHook
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.resident import HeldStream, resident_cache
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_recipe, parse_spec

# Small tensors: threads would only wait for each other.
torch.set_num_threads(1)

SPECS = [
    "identity",
    "hadamard(bits=3)",
    "prerope+sinks(n=4)+hadamard(bits=3)",
    "recent(n=5)+fp8",
    "sinks(n=2)+int(bits=3, group=4, residual=3)",
    "k:prerope+kakeya(block=8, bits=2, k=4)",
]
PREFIX = 20


def laboratory(net: Any, spec: str, prefix: int) -> Any:
    """States of the tokens after the prefix, as the laboratory has them."""
    parsed = parse_spec(spec)
    layer_coders = LayerCoders(cache_shape(net), Rotary(net, LENGTH))
    coders = layer_coders.fit_all(lambda _, stream: parsed.of(stream)).by_stream
    hook = CodecHook(coders, Mode.DECODE, LENGTH, measure_windows=0)
    job = ScoreJob(ScoringPath.DECODE, scored_from=prefix + 1, batch=2)
    with hook.attach(net):
        return torch.stack([s for _, s in window_states(net, windows(2), job, hook)])


def resident(net: Any, spec: str, prefix: int) -> tuple[Any, Any]:
    """The same through the compressed cache, and the cache."""
    ids = torch.tensor([w.tokens for w in windows(2)])
    cache = resident_cache(net, spec, length=LENGTH)
    rows = []
    with torch.inference_mode():
        net.base_model(input_ids=ids[:, :prefix], past_key_values=cache)
        for at in range(prefix, LENGTH - 1):
            out = net.base_model(input_ids=ids[:, at : at + 1], past_key_values=cache)
            rows.append(out.last_hidden_state)
    return torch.cat(rows, dim=1), cache


def held(cache: Any) -> int:
    """Bytes of everything that the streams of a cache reach, found without their help."""
    seen: set[int] = set()

    def size(thing: Any) -> int:
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            new = storage.data_ptr() not in seen
            seen.add(storage.data_ptr())
            return int(storage.nbytes()) if new else 0
        if isinstance(thing, bytes):
            return len(thing)
        if isinstance(thing, list | tuple):
            return sum(map(size, thing))
        return 0

    found = 0
    for layer in cache.layers:
        assert layer.keys is None and layer.values is None
        for stream in layer.assay_streams:
            found += sum(size(v) for v in vars(stream).values())
    return found


slowly = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "spec", "prefix"),
    [("llama", spec, PREFIX) for spec in SPECS[:-1:2]]
    + [("gemma3", spec, PREFIX) for spec in SPECS[1:-1:2]]
    + [("llama", SPECS[-1], LENGTH - 6)]
    + [
        slowly(kind, spec, prefix)
        for kind in ("llama", "gemma3")
        for spec in SPECS
        for prefix in (3, PREFIX)
    ],
)
def test_attention_sees_what_the_laboratory_measures(kind: str, spec: str, prefix: int) -> None:
    net = model(kind)
    expected = laboratory(net, spec, prefix)
    found, cache = resident(net, spec, prefix)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert cache.get_seq_length() == LENGTH - 1
    assert held(cache) == cache.resident_bytes


def expected(coder: Any, x: Any, start: int, end: int, window: int | None) -> Any:
    """What tokens from `start` on see, from all exact tokens: coded where that is due, exact
    elsewhere.
    """
    at_once = coder.granularity == 1 and coder.exact_last == 0 and start >= coder.exact_first
    lo = coder.exact_first
    hi = (end if at_once else start) - coder.exact_last
    hi -= max(0, hi - lo) % coder.granularity
    seen = x[..., :end, :].clone()
    if start and hi > lo:
        seen[..., lo:hi, :] = torch.stack([coder.reconstruct(row[:, lo:hi]) for row in x])
    return seen if window is None or start == 0 else seen[..., max(0, start - window + 1) :, :]


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize(
    "spec",
    [
        "sinks(n=3)+hadamard",
        "recent(n=5)+fp8",
        "sinks(n=2)+int(bits=3, group=4, residual=3)",
        "int(residual=0, group=8)",
    ],
)
@given(chunks=st.lists(st.integers(1, 30), min_size=1, max_size=9))
@settings(max_examples=10, deadline=None)
def test_any_chunks_see_what_is_due(spec: str, window: int | None, chunks: list[int]) -> None:
    coder = parse_recipe(spec).fit(Samples(LayerStream("k", 0, 1, 2, 16)))
    coder.coder.block_tokens = 8  # small, so that many blocks fill up and are let go of
    stream = HeldStream(0, coder, None, window, 300)  # type: ignore[arg-type]
    x = torch.randn(2, 2, sum(chunks), 16, generator=torch.Generator().manual_seed(len(chunks)))
    start = 0
    for count in chunks:
        seen = stream.update(x[..., start : start + count, :])
        torch.testing.assert_close(
            seen, expected(coder, x, start, start + count, window), rtol=1e-5, atol=1e-5
        )
        start += count
    # No more exact tokens than a block, the recent ones, the sinks.
    exact = sum(t.shape[-2] for t in (stream._tail, stream._sinks) if t is not None)
    assert exact <= 7 + coder.exact_last + coder.exact_first
    if window is not None:
        assert len(stream._blocks) <= (window - 1) // 8 + 2


def test_a_codec_that_loses_something_changes_the_states() -> None:
    net = model()
    exact, _ = resident(net, "identity", PREFIX)
    coded, _ = resident(net, "hadamard(bits=3)", PREFIX)
    assert not torch.allclose(exact, coded, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_it_is_as_small_as_its_streams(kind: str) -> None:
    net = model(kind)
    ids = torch.randint(1, 100, (1, 700), generator=torch.Generator().manual_seed(0))
    cache, exact = (
        resident_cache(net, "hadamard(bits=4)", length=700),
        transformers.DynamicCache(config=net.config),
    )
    with torch.inference_mode():
        net.base_model(input_ids=ids, past_key_values=cache)
        net.base_model(input_ids=ids, past_key_values=exact)
    whole = sum(
        t.numel() * t.element_size() for layer in exact.layers for t in (layer.keys, layer.values)
    )
    assert cache.exact_bytes == whole
    if kind == "llama":
        # 640 of 700 tokens are coded, in float32 otherwise: 60 exact ones and 4 bits with their
        # factors.
        coded, width = 640 * 2 * 16, 32 * 4
        expected = 2 * LAYERS * (coded // 2 + 640 * 2 * 2 + 5 + 60 * width)
        assert cache.resident_bytes == expected
        assert cache.resident_bytes < 0.25 * whole
    assert held(cache) == cache.resident_bytes


def test_sliding_layers_drop_what_nobody_sees() -> None:
    net = model("gemma3")
    _, cache = resident(net, "sinks(n=4)+int(bits=4, group=4, residual=0)", PREFIX)
    sliding = [layer for layer in cache.layers if layer.is_sliding]
    full = [layer for layer in cache.layers if not layer.is_sliding]
    assert sliding and full
    most = max(s.resident_bytes for layer in sliding for s in layer.assay_streams)
    assert most < min(s.resident_bytes for layer in full for s in layer.assay_streams)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_takes_it_with_beams_too(beams: int) -> None:
    net = model()
    ids = torch.tensor([windows(1)[0].tokens[:PREFIX]])
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    plain = net.generate(ids, **settings)
    found = net.generate(
        ids, past_key_values=resident_cache(net, "identity", length=64), **settings
    )
    assert torch.equal(plain, found)
    coded = net.generate(
        ids, past_key_values=resident_cache(net, "prerope+hadamard(bits=6)", length=64), **settings
    )
    assert coded.shape == plain.shape


def test_rows_are_selected_and_a_cache_is_used_again() -> None:
    net = model()
    _, cache = resident(net, "sinks(n=2)+kakeya(block=8, bits=3, k=4)", LENGTH - 3)
    both = cache.resident_bytes
    cache.batch_select_indices(torch.tensor([1]))
    one = cache.resident_bytes
    # Ranks of blocks differ a little from row to row.
    assert one == pytest.approx(both / 2, rel=0.01)
    cache.batch_repeat_interleave(3)
    assert cache.resident_bytes == 3 * one
    cache.reset()
    assert cache.resident_bytes == cache.get_seq_length() == 0


def test_what_it_cannot_do_is_said() -> None:
    net = model()
    with pytest.raises(AssayError, match="calibration"):
        resident_cache(net, "mean+fp8", length=9)
    cache = resident_cache(net, "prerope+fp8", length=9)
    with pytest.raises(UsageError, match="9 tokens"), torch.inference_mode():
        net.base_model(input_ids=torch.ones(1, 12, dtype=torch.long), past_key_values=cache)
    with pytest.raises(AssayError, match="assisted"):
        resident(net, "fp8", PREFIX)[1].crop(-1)
