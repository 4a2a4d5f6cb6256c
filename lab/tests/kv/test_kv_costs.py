"""The measured sensitivity: what an error costs, on a small model and on real weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from assay.engines.hf.scorer import HfScorer
from assay.engines.hf.spec import HfSpec
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.calibration import Calibration, read_calibration
from assay_lab.kv.capture import capture
from assay_lab.kv.evaluator import CodecEvaluator, Fitting, Passages, ScoringSetup
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.layer_sensitivity import measure_sensitivity
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_spec
from kv.test_kv_hook import LENGTH, model, windows


def test_it_foretells_what_other_errors_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    net, some = model(), windows(6)
    with torch.no_grad():
        for weight in net.parameters():
            # As it comes, this model says the same whatever it reads.
            weight.mul_(4.0 if weight.ndim > 1 else 1.0)
    scorer = HfScorer(cast(Any, SimpleNamespace(model=net, spec=HfSpec("small"), describe=dict)))
    shape = cache_shape(net)
    tensors = capture(cast(Any, scorer), some, shape, tokens=230, batch=6)
    layer_coders = LayerCoders(shape, Rotary(net, LENGTH), Calibration(tensors, {}))
    lab = CodecEvaluator(
        scorer, ScoringSetup("hf:small", Mode.INFORWARD, 6), Passages(some), Fitting(layer_coders)
    )
    costs = measure_sensitivity(lab)
    assert costs.shape == (shape.layers, 2) and bool((costs > 0).all())
    coarser = parse_spec("prerope+sinks(n=4)+pca(step=0.8, classes=1, rdo=0)")
    for layer, stream in ((0, "k"), (2, "v")):
        coders = layer_coders.fit_all(lambda _, s: coarser.of(s), [layer], stream).by_stream
        seen = lab.measure(str(coarser), layers=(layer,), streams=stream, measure_windows=1).seen
        kl = sum(float(w.kl.sum()) for w in seen) / sum(len(w.kl) for w in seen)
        x = tensors[f"layer_{layer}_{stream}"].float()[:, tensors["positions"] >= 4]
        e = (x - coders[layer, stream].reconstruct(x)).double().transpose(0, 1).flatten(1)
        samples = layer_coders.calibration.samples(
            coders[layer, stream].site, before_rope=True, rotary=None
        )  # type: ignore[union-attr]
        error = float(torch.einsum("ti,ij,tj->t", e, samples.joint_metric(), e).mean())
        assert kl > 1e-6
        assert kl == pytest.approx(float(costs[layer, "kv".index(stream)]) * error, rel=0.25)


@pytest.mark.engine
@pytest.mark.slow
def test_a_calibration_keeps_it(
    kv: Callable[..., tuple[int, dict[str, Any]]], smollm2: Path, tmp_path: Path
) -> None:
    from pydoc_data.topics import topics

    names, out = sorted(topics), tmp_path / "c.safetensors"
    for which, chosen in (("train", names[::2]), ("test", names[1::2])):
        (tmp_path / f"{which}.txt").write_text(
            "\n\n".join(topics[n] for n in chosen), encoding="utf-8"
        )
    code, _ = kv(
        "calibrate", smollm2, "--text", tmp_path / "train.txt", "--out", out,
        "--windows", 24, "--length", 64, "--tokens", 1280, "--sensitivity", 1, "--batch", 8,
    )  # fmt: skip
    assert code == 0
    known = read_calibration(out)
    assert known.tensors["sensitivity"].shape == (30, 2) and bool(
        (known.tensors["sensitivity"] > 0).all()
    )
    assert known.provenance["sensitivity_windows"] == 1
    spec = "prerope+sinks(n=4)+pca(step=0.003, weights=measured, predict=all)"
    measure = (
        "eval",
        smollm2,
        "--text",
        tmp_path / "test.txt",
        "--windows",
        2,
        "--length",
        64,
        "--calibration",
        out,
    )
    _, body = kv(*measure, "--codec", spec)
    assert 2 < body["results"]["bytes"]["ratio"] < 8
    assert body["results"]["kld"]["mean"] < 0.1
