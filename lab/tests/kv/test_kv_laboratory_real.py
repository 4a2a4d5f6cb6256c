"""`assay kv diagnose`, `noise`, `sweep` and the compressed cache on real weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

pytestmark = pytest.mark.engine

Kv = Callable[..., tuple[int, dict[str, Any]]]
PROMPT = (
    "The history of the lighthouse begins in the year 1820, when a small group of fishermen decided"
    " that"
)


def test_a_diagnosis_finds_the_lost_norm(kv: Kv, smollm2: Path) -> None:
    codec = "k:prerope+sinks(n=2)+kakeya(block=40, k=4, published_norm=true);v:hadamard(bits=6)"
    code, body = kv(
        "diagnose",
        smollm2,
        "--codec",
        codec,
        "--windows",
        2,
        "--length",
        64,
        "--skip-layers",
        "0-27",
    )
    assert code == 0
    layers = body["results"]["layers"]
    assert [(x["layer"], x["stream"]) for x in layers] == [
        (28, "k"),
        (28, "v"),
        (29, "k"),
        (29, "v"),
    ]
    for found in layers:
        assert len(found["heads"]) == 3
        assert found["stages"][-1]["relative_mse"] == pytest.approx(found["relative_mse"], rel=0.01)
    keys, values = layers[0], layers[1]
    assert [s["stage"] for s in keys["stages"]] == ["pca", "kmeans", "wht", "levels", "norm"]
    assert keys["stages"][-1]["added"] > 2 * keys["stages"][-2]["relative_mse"]
    assert keys["coded_tokens"] == 61 and values["coded_tokens"] == 63
    assert keys["attention"]["attention_kl"] > 0
    # Six bits after a rotation: 2^-12 times a constant near 2.7.
    assert 3e-4 < values["relative_mse"] < 3e-3
    assert values["bits_per_value"] == pytest.approx(6.25, abs=0.4)


@pytest.mark.slow
def test_an_exact_cache_has_no_error(kv: Kv, smollm2: Path) -> None:
    code, body = kv(
        "diagnose",
        smollm2,
        "--codec",
        "identity",
        "--windows",
        1,
        "--length",
        24,
        "--skip-layers",
        "0-28",
    )
    assert code == 0
    for found in body["results"]["layers"]:
        assert found["relative_mse"] == 0 and set(found["attention"].values()) == {0.0}
        assert found["residual"]["kurtosis"] is None


def test_noise_costs_more_the_larger_it_is(kv: Kv, smollm2: Path) -> None:
    code, body = kv(
        "noise",
        smollm2,
        "--sigma",
        "0.3,0.03,0.1",
        "--each",
        "stream",
        "--windows",
        4,
        "--length",
        48,
    )
    assert code == 0
    for curve in body["results"]["curves"]:
        kl = [p["kld"]["value"] for p in curve["points"]]
        assert [p["sigma"] for p in curve["points"]] == [0.03, 0.1, 0.3]
        assert 0 < kl[0] < kl[1] < kl[2]
        assert 1 < curve["slope"]["value"] < 3
        assert curve["slope"]["lo"] <= curve["slope"]["value"] <= curve["slope"]["hi"]


def test_a_sweep_keeps_its_rows_and_measures_its_choice_again(
    kv: Kv, smollm2: Path, tmp_path: Path
) -> None:
    out, page = tmp_path / "rows.json", tmp_path / "sweep.html"
    (tmp_path / "specs.txt").write_text("# two more\nhadamard(bits=2)\nmean+fp8\n")
    shared = (
        "sweep",
        smollm2,
        "--windows",
        8,
        "--fresh",
        8,
        "--length",
        40,
        "--mode",
        "inforward",
        "--out",
        out,
        "--codec",
        "hadamard(bits=8)",
    )
    code, body = kv(*shared, "--codec", "bf16", "--specs", tmp_path / "specs.txt", "--html", page)
    assert code == 0  # bf16 changes nothing, so something is accepted
    results = body["results"]
    assert [r["codec"] for r in results["rows"]] == ["hadamard(bits=8)", "bf16", "hadamard(bits=2)"]
    # What needs a calibration is told of and left out.
    assert set(results["failed"]) == {"mean+fp8"}
    assert body["findings"][0]["id"] == "kv.sweep_failed"
    assert results["front"] == ["hadamard(bits=2)", "hadamard(bits=8)", "bf16"]
    again = results["winner"]["fresh_windows"]
    difference = again["kld"]["mean"] - results["winner"]["same_windows"]["kld"]["mean"]
    assert results["winner"]["winners_curse"]["value"] == pytest.approx(difference)
    assert "KL against stored bytes" in page.read_text()
    kept = json.loads(out.read_text())
    kept["rows"]["hadamard(bits=8)"]["score_s"] = -1.0  # read from the file, not measured again
    out.write_text(json.dumps(kept))
    _, body = kv(*shared)
    assert body["results"]["rows"][0]["score_s"] == -1.0


def by_the_laboratory(
    net: Any, ids: Any, spec: str, count: int, calibration: Path | None = None
) -> list[int]:
    """Greedy tokens behind the cache that `assay kv eval` measures in its mode decode."""
    import torch

    from assay_lab.kv.cache_hook import CodecHook
    from assay_lab.kv.cache_shape import cache_shape
    from assay_lab.kv.calibration import read_calibration
    from assay_lab.kv.hook_plan import Mode
    from assay_lab.kv.layer_coders import LayerCoders
    from assay_lab.kv.rotary import Rotary
    from assay_lab.kv.spec import parse_spec

    parsed, length = parse_spec(spec), ids.shape[1] + count
    known = read_calibration(calibration) if calibration else None
    layer_coders = LayerCoders(cache_shape(net), Rotary(net, length), known)
    hook = CodecHook(
        layer_coders.fit_all(lambda _, s: parsed.of(s)).by_stream,
        Mode.DECODE,
        length,
        measure_windows=0,
    )
    found: list[int] = []
    with hook.attach(net), torch.inference_mode():
        cache = hook.new_cache(1, 0)
        logits = net(input_ids=ids, past_key_values=cache).logits
        hook.after_prefix(cache)
        for _ in range(count):
            found.append(int(logits[0, -1].argmax()))
            logits = net(input_ids=torch.tensor([found[-1:]]), past_key_values=cache).logits
    return found


@pytest.mark.parametrize(
    ("which", "predict"),
    [
        ("smollm2", None),
        ("gemma3", None),
        *(pytest.param(which, "all", marks=pytest.mark.slow) for which in ("smollm2", "gemma3")),
    ],
)
def test_text_behind_the_compressed_cache_is_that_of_the_laboratory(
    which: str, predict: str | None, request: pytest.FixtureRequest, kv: Kv, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    from assay_lab.kv.resident import resident_cache

    path, count, spec = request.getfixturevalue(which), 6, "prerope+sinks(n=4)+hadamard(bits=3)"
    calibration = None
    if predict:
        spec = f"prerope+sinks(n=4)+pca(bits=3, coding=fixed, predict={predict})"
        calibration, text = tmp_path / "calibration", tmp_path / "text"
        text.write_text("\n".join(topics[name] for name in sorted(topics)))
        settings = ("--windows", 8, "--length", 512, "--tokens", 4080)
        assert kv("calibrate", path, "--text", text, "--out", calibration, *settings)[0] == 0
    net = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    ids = AutoTokenizer.from_pretrained(path)(PROMPT * 7, return_tensors="pt")["input_ids"]
    length = ids.shape[1] + count
    cache = resident_cache(net, spec, length=length, calibration=calibration)
    exact = DynamicCache(config=net.config)
    asked = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    found = net.generate(ids, past_key_values=cache, **asked)[0, ids.shape[1] :].tolist()
    assert found == by_the_laboratory(net, ids, spec, count, calibration)
    with torch.inference_mode():
        net.base_model(
            input_ids=torch.cat([ids, torch.tensor([found[:-1]])], dim=1), past_key_values=exact
        )
    whole = sum(
        t.numel() * t.element_size() for layer in exact.layers for t in (layer.keys, layer.values)
    )
    assert cache.exact_bytes == whole
    assert cache.resident_bytes < 0.65 * whole
    assert cache.get_seq_length() == exact.get_seq_length() > 128
