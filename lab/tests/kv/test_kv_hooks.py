"""The seam: a codec as plain settings, fitted where the model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import HookSpec, ScoreJob, load_hook
from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_bytes import measured_bytes, stream_facts
from assay_lab.kv.cache_hook import CodecHook
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.hook_plan import HookPlan, Mode, hook_spec, path_of
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.rotary import Rotary
from kv.test_kv_hook import LENGTH, model, windows

SPEC: dict[str, Any] = {"codec": "hadamard(bits=4)", "mode": "decode", "length": LENGTH}


def scored(net: Any, hook: Any, mode: str) -> Any:
    job = ScoreJob(path_of(mode), scored_from=21, batch=2)
    with hook.attach(net):
        return torch.stack([s for _, s in window_states(net, windows(), job, hook)])


@pytest.mark.parametrize("mode", list(Mode))
def test_settings_through_json_do_what_fitted_coders_do(mode: Mode) -> None:
    net = model()
    spec = hook_spec("hf:somewhere", **SPEC | {"mode": mode.value, "skip_layers": [1]})
    sent = HookSpec(spec.target, json.loads(json.dumps(spec.config)))
    by_spec = load_hook(sent)
    layer_coders = LayerCoders(cache_shape(net), Rotary(net, LENGTH))
    by_hand = CodecHook(
        HookPlan.from_config(sent.config).coders(layer_coders).by_stream, mode, LENGTH
    )
    assert torch.equal(scored(net, by_spec, mode), scored(net, by_hand, mode))
    assert by_spec.engagement() == by_hand.engagement()
    assert set(by_spec.engagement().per_layer) == {0, 2, 3}
    assert 1.5 < measured_bytes(by_spec.engagement(), LENGTH - 1).ratio < 3.5
    streams = stream_facts(by_spec.engagement())
    assert streams[1, "k"][0].error == 0 < streams[0, "k"][0].error < streams[0, "k"][0].power
    assert len({f.sha256 for f in streams[0, "k"]}) == 3


def test_layers_and_streams_are_chosen() -> None:
    net = model()
    layer_coders = LayerCoders(cache_shape(net), Rotary(net, LENGTH))

    def specs(**more: Any) -> dict[tuple[int, str], str]:
        plan = HookPlan.from_config(hook_spec("hf", **SPEC | more).config)
        return {key: coder.spec for key, coder in plan.coders(layer_coders).by_stream.items()}

    assert list(specs(layers=[3, 1], skip_layers=[1], streams="v")) == [(3, "v")]
    found = specs(layer_codecs={2: "k:fp8;v:hadamard(bits=6)"})
    assert found[2, "k"] == "fp8"
    assert found[2, "v"] == "hadamard(bits=6)"
    assert found[0, "k"] == found[3, "v"] == "hadamard"
    for wrong in ({"layers": [4]}, {"skip_layers": [4]}, {"layer_codecs": {4: "fp8"}}):
        with pytest.raises(UsageError, match="layer 4 does not exist"):
            specs(**wrong)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"codec": "hadamrd"}, "hadamrd"),
        ({"mode": "sideways"}, "sideways"),
        ({"streams": "q"}, "'q'"),
        ({"layer_codecs": {0: "fp8(bits=3)"}}, "bits"),
    ],
)
def test_what_cannot_be_read_is_refused_before_an_engine_starts(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        hook_spec("hf:m", **SPEC | change)


def test_other_engines_and_missing_calibrations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'gguf'"):
        hook_spec("gguf:m", **SPEC)
    hook = load_hook(hook_spec("hf", **SPEC | {"calibration": tmp_path / "none.safetensors"}))
    with pytest.raises(AssayError, match=r"none\.safetensors"), hook.attach(model()):
        pass
