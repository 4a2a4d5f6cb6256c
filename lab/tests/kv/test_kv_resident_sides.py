"""The compressed cache with codecs that predict: every stream gets what a decoder has of its sides,
and no more is kept.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import ScoreJob, ScoringPath
from assay_lab.kv.cache_hook import CodecHook
from assay_lab.kv.calibration import Calibration, read_calibration, write_calibration
from assay_lab.kv.handover import Handover
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.resident import HeldStream, resident_cache
from kv.predicting import leaning
from kv.test_kv_hook import LENGTH, model, windows
from kv.test_kv_sides import SPEC, coders_of, layer_coders_of

pytestmark = pytest.mark.engine

MIXED = "k:prerope+recent(n=3)+hadamard(bits=8);v:recent(n=3)+pca(step=0.2, classes=2, predict=all)"


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of the small models' calibrations."""
    folder = tmp_path_factory.mktemp("calibrations")
    for kind in ("llama", "gemma3"):
        layer_coders = layer_coders_of(kind)
        write_calibration(
            folder / kind,
            Calibration(layer_coders.calibration.tensors, {"cache": layer_coders.shape.to_json()}),  # type: ignore[union-attr]
        )
    return {kind: folder / kind for kind in ("llama", "gemma3")}


def with_file(kind: str, calibrations: dict[str, Path]) -> Any:
    """The layer_coders with what its file holds, where samples are coded."""
    return replace(layer_coders_of(kind), calibration=read_calibration(calibrations[kind]))


def resident(net: Any, cache: Any, prefix: int) -> Any:
    """States of the tokens after the prefix, one at a time."""
    ids = torch.tensor([w.tokens for w in windows(2)])
    with torch.inference_mode():
        net.base_model(input_ids=ids[:, :prefix], past_key_values=cache)
        rows = [
            net.base_model(input_ids=ids[:, at : at + 1], past_key_values=cache).last_hidden_state
            for at in range(prefix, LENGTH - 1)
        ]
    return torch.cat(rows, dim=1)


@pytest.mark.parametrize(
    ("kind", "spec", "prefix"),
    [
        ("llama", SPEC, 20),
        ("gemma3", SPEC, 20),
        ("llama", MIXED, 3),
        ("gemma3", "v:pca(step=0.2, classes=2, predict=all)", 20),
        ("llama", "k:identity;v:pca(bits=3, coding=fixed, predict=k)", 20),
    ],
)
def test_attention_sees_what_the_laboratory_measures(
    kind: str, spec: str, prefix: int, calibrations: dict[str, Path]
) -> None:
    net = model(kind)
    hook = CodecHook(
        coders_of(with_file(kind, calibrations), spec).by_stream,
        Mode.DECODE,
        LENGTH,
        measure_windows=0,
    )
    job = ScoreJob(ScoringPath.DECODE, scored_from=prefix + 1, batch=2)
    with hook.attach(net):
        expected = torch.stack([s for _, s in window_states(net, windows(2), job, hook)])
    cache = resident_cache(net, spec, length=LENGTH, calibration=calibrations[kind])
    found = resident(net, cache, prefix)
    exact = resident(net, resident_cache(net, "identity", length=LENGTH), prefix)
    # A value on the edge between two levels may fall to either side, by how sums are ordered.
    assert float((found - expected).norm()) < 0.05 * float((exact - expected).norm())
    assert any(layer.assay_done for layer in cache.layers)
    assert all(not handover._pieces for layer in cache.layers for handover in layer.assay_done)


def test_beams_take_it_too(calibrations: dict[str, Path]) -> None:
    net = model()
    ids = torch.tensor([windows(1)[0].tokens[:20]])
    settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    cache = resident_cache(net, SPEC, length=LENGTH, calibration=calibrations["llama"])
    assert net.generate(ids, past_key_values=cache, **settings).shape == (1, 28)


KINDS = st.sampled_from(["exact", "identity", "coded"])


@pytest.mark.parametrize("ends", [(0, 0), (3, 0), (2, 5)])
@given(
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    kinds=st.tuples(KINDS, KINDS, KINDS),
    spans=st.sampled_from([(None, None), (12, 12), (None, 12), (20, 12)]),
    order=st.sampled_from([(0, 1), (1, 0, 1)]),
)
@settings(max_examples=12, deadline=None)
def test_any_chunks_see_what_is_due(
    ends: tuple[int, int],
    chunks: list[int],
    kinds: tuple[str, str, str],
    spans: tuple[int | None, int | None],
    order: tuple[int, ...],
) -> None:
    """Two layers whose streams are exact, lossless or coded; the last one predicts from all before
    it.
    """
    keys = [(0, "k"), (0, "v"), (1, "k"), (1, "v")]
    coders: dict[Any, Any] = {}
    for number, (key, kind) in enumerate(zip(keys, (*kinds, "coded"), strict=True)):
        if kind == "coded":
            coders[key] = leaning(key, tuple(keys[:number]), first=ends[0], last=ends[1])
        elif kind == "identity":
            coders[key] = _identity(key, ends)
    given_to = {key: Handover(key[0], None) for key in keys[:-1]}
    streams = {
        key: HeldStream(
            key[0],
            coders.get(key),
            None,  # type: ignore[arg-type]
            spans[key[0]],
            300,
            predictors=[
                given_to[source] for source in (coders[key].predictor_keys if key in coders else ())
            ],
            handover=given_to.get(key),
        )
        for key in keys
    }
    generator = torch.Generator().manual_seed(len(chunks))
    x = {key: torch.randn(2, 2, sum(chunks), 4, generator=generator) for key in keys}
    start = 0
    for number, count in enumerate(chunks):
        end = start + count
        back: dict[Any, Any] = {}
        for key in keys:
            seen = streams[key].update(x[key][..., start:end, :])
            coder, wanted = coders.get(key), x[key][..., :end, :].clone()
            back[key] = wanted
            if coder is not None and not coder.lossless:
                predictors = (
                    torch.cat([back[s] for s in coder.predictor_keys], dim=1)
                    if coder.predictor_keys
                    else None
                )
                whole = [
                    coder.reconstruct(row, None if predictors is None else predictors[i])
                    for i, row in enumerate(wanted)
                ]
                back[key] = torch.stack(whole)
                lo, at_once = (
                    coder.exact_first,
                    coder.exact_last == 0 and start >= coder.exact_first,
                )
                hi = (end if at_once else start) - coder.exact_last
                if start and hi > lo:
                    wanted[..., lo:hi, :] = back[key][..., lo:hi, :]
            window = spans[key[0]]
            if window is not None and start:
                wanted = wanted[..., max(0, start - window + 1) :, :]
            assert torch.equal(seen, wanted), (key, start, count)
        if number == len(chunks) // 2:
            for stream in streams.values():
                stream.select(torch.tensor(order))
            x = {key: t[list(order)] for key, t in x.items()}
        start = end


def _identity(key: tuple[int, str], ends: tuple[int, int]) -> Any:
    from assay_lab.kv.codecs.samples import LayerStream, Samples
    from assay_lab.kv.spec import parse_recipe

    coder = parse_recipe(f"sinks(n={ends[0]})+recent(n={ends[1]})+identity").fit(
        Samples(LayerStream(key[1], key[0], 4, 2, 4))
    )
    coder.coder.block_tokens = 8
    return coder


def test_what_was_not_handed_over_is_a_mistake() -> None:
    handover = Handover(3, None)
    with pytest.raises(ValueError, match="layer 3"):
        handover.take(0, 1, 0)
    handover.put(torch.ones(1, 2, 4, 3), 10)
    handover.put(2 * torch.ones(1, 2, 3, 3), 14)
    assert handover.take(11, 17, 11)[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]
    # Tokens that nothing sees any more are gone.
    assert handover.take(8, 12, 10)[0, 1, :, 2].tolist() == [0, 0, 1, 1]
    for lo, hi, seen_from in ((8, 12, 9), (9, 12, 9), (15, 18, 12)):
        with pytest.raises(ValueError, match="not decoded"):
            handover.take(lo, hi, seen_from)
