"""Codecs that predict from other streams: what the harness puts in the cache is what a decoder
makes of the streams.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import ScoreJob, ScoringPath
from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_bytes import check_read, stream_facts
from assay_lab.kv.cache_hook import CodecHook
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.calibration import Calibration
from assay_lab.kv.capture import capture
from assay_lab.kv.fitters import fitters, predicts
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.live_stream import LiveStream
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_spec
from kv.predicting import leaning
from kv.test_kv_hook import LENGTH, model, windows

pytestmark = pytest.mark.engine

SPEC = "prerope+sinks(n=2)+pca(step=0.2, classes=2, predict=all)"


@cache
def layer_coders_of(kind: str = "llama") -> LayerCoders:
    """A layer_coders with a calibration of the small model itself, every layer of which costs as
    much.
    """
    net = model(kind)
    shape = cache_shape(net)
    scorer = SimpleNamespace(engine=SimpleNamespace(model=net))
    tensors = capture(scorer, windows(12), shape, tokens=480, batch=4)
    tensors["sensitivity"] = torch.full((shape.layers, 2), 0.5)
    return LayerCoders(shape, Rotary(net, LENGTH), Calibration(tensors, {}))


def coders_of(layer_coders: LayerCoders, spec: str, layers: Any = None) -> CoderSet:
    parsed = parse_spec(spec)
    return layer_coders.fit_all(lambda _, stream: parsed.of(stream), layers)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("mode", "spec"),
    [
        *((mode, SPEC) for mode in Mode),
        (
            Mode.DECODE,
            (
                "k:prerope+sinks(n=2)+pca(step=0.3, predict=below, weights=measured);"
                "v:sinks(n=2)+pca(bits=3, coding=fixed, predict=all)"
            ),
        ),
        (
            Mode.DECODE,
            (
                "k:prerope+recent(n=3)+hadamard(bits=8);v:recent(n=3)+pca(step=0.2, classes=2,"
                " predict=all)"
            ),
        ),
        (Mode.INFORWARD, "v:pca(step=0.2, classes=2, predict=all)"),
    ],
)
def test_the_cache_holds_what_a_decoder_makes_of_the_streams(
    kind: str, mode: Mode, spec: str
) -> None:
    net = model(kind)
    layer_coders = layer_coders_of(kind)
    coders = coders_of(layer_coders, spec).by_stream
    hook = CodecHook(coders, mode, LENGTH, measure_windows=2)
    path = ScoringPath.DECODE if mode is Mode.DECODE else ScoringPath.PREFILL
    with hook.attach(net):
        list(window_states(net, windows(2), ScoreJob(path, scored_from=21, batch=2), hook))
        exact = {key: track.exact.clone() for key, track in hook._tracks.items()}
        cache = hook._cache
    for window in range(2):
        decoded: dict[Any, torch.Tensor] = {}
        for layer in range(layer_coders.shape.layers):
            for stream in "kv":
                rotation = layer_coders.rotary.at(layer, 0, LENGTH - 1)  # type: ignore[union-attr]
                x = exact[layer, stream][window].float()
                x = rotation.remove(x) if stream == "k" else x
                coder = coders.get((layer, stream))
                if coder is None:
                    decoded[layer, stream] = x
                    continue
                predictors = (
                    torch.cat([decoded[key] for key in coder.predictor_keys])
                    if coder.predictor_keys
                    else None
                )
                back = coder.decode(coder.encode(x, predictors), predictors=predictors)
                decoded[layer, stream] = back
                back = rotation.apply(back) if stream == "k" else back
                held = cache.layers[layer].keys if stream == "k" else cache.layers[layer].values
                kept = held.shape[-2]
                # A value on the edge between two levels may fall to either side, by how sums are
                # ordered.
                off = (held[window] - back[:, -kept:]).norm() / back[:, -kept:].norm()
                assert float(off) < 0.02
    facts = stream_facts(hook.engagement())
    assert all(f.stored > 0 for found in facts.values() for f in found)
    assert any(coder.predictor_keys for coder in coders.values())


def test_what_the_decoder_does_not_have_is_no_side() -> None:
    llama, gemma = layer_coders_of(), layer_coders_of("gemma3")
    plain = {key: coder.predictor_keys for key, coder in coders_of(llama, SPEC).by_stream.items()}
    assert plain[0, "k"] == ()
    assert plain[0, "v"] == ((0, "k"),)
    assert plain[2, "k"] == ((1, "k"), (1, "v"))
    assert plain[2, "v"] == ((1, "k"), (1, "v"), (2, "k"))
    assert gemma.shape.windows == (8, None, 8, None)
    sliding = {key: coder.predictor_keys for key, coder in coders_of(gemma, SPEC).by_stream.items()}
    assert sliding[1, "v"] == ((1, "k"),)
    assert sliding[2, "k"] == ((1, "k"), (1, "v"))


def test_prediction_makes_streams_shorter() -> None:
    """Values that are a linear map of the keys of their token cost next to nothing."""
    layer_coders = layer_coders_of()
    tensors = dict(layer_coders.calibration.tensors)  # type: ignore[union-attr]
    for layer in range(4):
        tensors[f"layer_{layer}_v"] = tensors[f"layer_{layer}_k"].flip(-1)
    known = LayerCoders(layer_coders.shape, layer_coders.rotary, Calibration(tensors, {}))
    step = "prerope+pca(step=0.05, predict={}, weights=measured, classes=1)"
    found = {}
    for predict in ("none", "k"):
        coder = coders_of(known, step.format(predict)).by_stream[1, "v"]
        predictors = (
            coders_of(known, step.format(predict))
            .by_stream[1, "k"]
            .reconstruct(tensors["layer_1_k"].float())
        )
        found[predict] = len(
            coder.encode(tensors["layer_1_v"].float(), predictors if coder.predictor_keys else None)
        )
    assert found["k"] < 0.7 * found["none"]


def test_a_pool_fits_what_one_process_fits() -> None:
    layer_coders, spec = layer_coders_of(), parse_spec(SPEC)
    assert predicts(spec, layer_coders.shape)
    assert not predicts(parse_spec("prerope+pca"), layer_coders.shape)
    with fitters(layer_coders, 1) as one:
        here = one.start(spec, range(4))().by_stream
    assert {k: sorted(c.tables) for k, c in here.items()} == {
        k: sorted(c.tables) for k, c in coders_of(layer_coders, SPEC).by_stream.items()
    }


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("k:prerope+sinks(n=4)+pca;v:pca(predict=k)", "same sinks"),
        ("k:prerope+int(bits=4);v:pca(predict=k)", "token by token"),
        ("k:pca;v:pca(predict=all)", "after RoPE"),
        ("k:prerope+pca;v:mean(of=block)+pca(predict=k)", "token by token"),
    ],
)
def test_sides_that_come_too_late_are_refused(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        coders_of(layer_coders_of(), spec)


def test_measured_steps_need_what_was_measured() -> None:
    with pytest.raises(UsageError, match="shares one step"):
        parse_spec("pca(bits=3, weights=measured)")
    layer_coders = layer_coders_of()
    tensors = {k: v for k, v in layer_coders.calibration.tensors.items() if k != "sensitivity"}  # type: ignore[union-attr]
    with pytest.raises(AssayError, match="measured sensitivity of layer 0"):
        coders_of(
            LayerCoders(layer_coders.shape, layer_coders.rotary, Calibration(tensors, {})),
            "prerope+pca(step=0.1, weights=measured)",
        )


def test_a_prediction_from_too_few_samples_is_refused() -> None:
    layer_coders = layer_coders_of()
    known = layer_coders.calibration.tensors  # type: ignore[union-attr]
    few = {
        k: v[:90] if k == "positions" else v[:, :90] if k[-2:] in ("_k", "_v") else v
        for k, v in known.items()
    }
    short = LayerCoders(layer_coders.shape, layer_coders.rotary, Calibration(few, {}))
    coders_of(short, "prerope+pca(step=0.2)", [0])
    with pytest.raises(AssayError, match=r"layer 1, stream k, from 64 channels .* at least 128"):
        coders_of(short, SPEC, [0, 1])


def test_a_predicted_stream_may_fall_on_other_levels_and_must_err_as_much_as_what_attention_read() -> (  # noqa: E501
    None
):
    draw = torch.Generator().manual_seed(0)
    x, predictors = (torch.randn(1, 2, 200, 4, generator=draw) for _ in range(2))
    track = LiveStream((1, "v"), leaning((1, "v"), ((0, "v"),)), None)
    track.append(x)
    track.mark(200)
    same, other = (track.coder.reconstruct(x[0], predictors[0] + shift) for shift in (0.0, 0.3))  # type: ignore[union-attr]
    assert ((same - other).square().sum() > 0.5 * (same - x[0]).square().sum()).item()
    for read in (same, other):
        found, _ = track.facts(0, 0, predictors[0], read)
        check_read((1, "v"), [found])
    for wrong in (x[0], same + 0.25, torch.zeros_like(same)):
        found, _ = track.facts(0, 0, predictors[0], wrong)
        with pytest.raises(AssayError, match="does not give back what attention read"):
            check_read((1, "v"), [found])
