"""A diagnosis of codecs that predict: errors and bytes are those of streams decoded one after the
other.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from assay_lab.kv.diagnose.capture import Decoded, watch
from assay_lab.kv.diagnose.stages import relative_mse
from assay_lab.kv.diagnose.stream import diagnose_stream
from assay_lab.kv.predictors import last_readers
from kv.test_kv_hook import model, windows
from kv.test_kv_sides import SPEC, coders_of, layer_coders_of


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        (SPEC, None),
        (SPEC, [2, 3]),
        ("v:pca(step=0.2, classes=2, predict=all)", None),
        ("k:identity;v:sinks(n=3)+pca(bits=3, coding=fixed, predict=k)", None),
    ],
)
def test_streams_are_predicted_from_what_came_back(spec: str, layers: Any) -> None:
    layer_coders = layer_coders_of()
    coders = coders_of(layer_coders, spec, layers).by_stream
    scorer = SimpleNamespace(engine=SimpleNamespace(model=model()))
    traffic = watch(scorer, windows(2), layer_coders.shape, queries=5, batch=2)
    decoded = Decoded(traffic, last_readers(coders))
    back: dict[Any, Any] = {}
    for (layer, stream), coder in coders.items():
        found = diagnose_stream(coder, traffic, decoded, layer, stream)
        exact = (traffic.keys if stream == "k" else traffic.values)[layer].float()
        parts = []
        streams = []
        for window in range(2):
            near = [
                back[key][window]
                if key in back
                else (traffic.keys if key[1] == "k" else traffic.values)[key[0]][window].float()
                for key in coder.predictor_keys
            ]
            predictors = torch.cat(near) if near else None
            streams.append(coder.encode(exact[window], predictors))
            parts.append(coder.decode(streams[-1], predictors=predictors))
        back[layer, stream] = torch.stack(parts)
        if coder.lossless:
            assert found["relative_mse"] == 0
            continue
        lo = coder.exact_first
        wanted = relative_mse(exact[:, :, lo:], back[layer, stream][:, :, lo:]).mean()
        # A value on the edge between two levels may fall to either side, by how sums are ordered.
        assert found["relative_mse"] == pytest.approx(float(wanted), rel=0.02)
        assert found["stages"][-1]["relative_mse"] == pytest.approx(float(wanted), rel=0.02)
        bits = 8 * len(streams[0]) / exact[0].numel()
        assert found["bits_per_value"] == pytest.approx(bits, rel=0.01)
        # Only what the next layer still needs is held.
        assert all(key[0] >= layer - 1 for key in decoded._held)
    assert any(coder.predictor_keys for coder in coders.values())
