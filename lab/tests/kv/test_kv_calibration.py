"""The calibration file: how exact its samples are, how large it is, and that files of version 1 are
read.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file

from assay.engines.scoring import Window
from assay.errors import AssayError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.calibration import Calibration, passages, read_calibration, write_calibration
from assay_lab.kv.sample_packing import coded_samples, decoded_samples
from assay_lab.kv.sampler import Sampler, gram


def keys(heads: int = 2, tokens: int = 4096, width: int = 128, seed: int = 0) -> torch.Tensor:
    """Samples as those of Qwen2.5: correlated channels of very different size, far from zero, heavy
    tails, some sinks.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, tokens, width, generator=generator)
    x *= 1 + 0.3 * torch.randn(heads, tokens, 1, generator=generator).abs()
    mix = torch.randn(heads, width, width, generator=generator)
    x = (x * torch.logspace(1, -2, width)) @ mix / width**0.5
    x += 40 * torch.randn(heads, 1, width, generator=generator)
    x[:, :6] *= 30
    return x.to(torch.bfloat16)


def test_samples_come_back_with_an_error_in_proportion_along_every_direction() -> None:
    x = keys()
    parts = coded_samples(x)
    y = decoded_samples(parts)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert torch.equal(y[:, :6], x[:, :6])  # sinks are kept as they are
    usual = torch.ones(x.shape[1], dtype=torch.bool)
    usual[parts["rows"].long()] = False
    assert usual.sum() > 0.98 * x.shape[1]
    before, error = x.float()[:, usual], (y.float() - x.float())[:, usual]
    own = (before - before.mean(1, keepdim=True)).double()
    # Rounding to bf16 at the size of the mean is in the samples themselves already; the rest is
    # 1/3072 of the variance.
    floor = (before.abs() * 2.0**-9).square().mean(1).double()
    for head in range(2):
        values, vectors = torch.linalg.eigh(own[head].T @ own[head] / own.shape[1])
        along = (error[head].double() @ vectors).square().mean(0)
        assert (along <= 3 * values / 3072 + 2 * floor[head].max()).all()


def test_a_calibration_of_the_1_5b_takes_at_most_60_mb(tmp_path: Path) -> None:
    """28 layers, 2 KV heads of 128, 4,096 tokens, from one layer; version 1 took 117 MB of samples
    alone.
    """
    moments = torch.eye(128).expand(2, 128, 128).contiguous()
    layer = {
        "layer_0_k": keys(),
        "layer_0_v": keys(seed=1),
        "layer_0_gram": moments,
        "layer_0_sigma_rope": moments.clone(),
    }
    write_calibration(tmp_path / "c.safetensors", Calibration(layer, {}))
    assert 28 * (tmp_path / "c.safetensors").stat().st_size < 60e6


def test_a_file_of_version_1_is_read_and_any_other_is_refused_by_name(tmp_path: Path) -> None:
    x = keys(tokens=64)
    metadata = {
        "format": "assay-kv-calibration",
        "version": "1",
        "provenance": json.dumps({"samples": 64}),
    }
    save_file({"layer_0_k": x}, tmp_path / "old", metadata=metadata)
    old = read_calibration(tmp_path / "old")
    assert torch.equal(old.tensors["layer_0_k"], x) and old.provenance == {"samples": 64}
    save_file({"layer_0_k": x}, tmp_path / "new", metadata={**metadata, "version": "9"})
    with pytest.raises(AssayError, match="version '9'"):
        read_calibration(tmp_path / "new")


def test_few_samples_stay_as_they_are(tmp_path: Path) -> None:
    x, levels = keys(tokens=100), torch.linspace(-1, 1, 4)
    write_calibration(tmp_path / "c", Calibration({"layer_0_k": x, "levels_k_2": levels}, {"a": 1}))
    back = read_calibration(tmp_path / "c")
    assert torch.equal(back.tensors["layer_0_k"], x) and torch.equal(
        back.tensors["levels_k_2"], levels
    )
    assert back.provenance == {"a": 1}


def test_a_cut_or_altered_code_is_refused(tmp_path: Path) -> None:
    parts = coded_samples(keys(tokens=600))
    for change in ({"coded": parts["coded"][:-9]}, {"coded": parts["coded"].flip(0)}):
        save_file(
            {f"layer_0_k.{name}": value for name, value in {**parts, **change}.items()},
            tmp_path / "c",
            metadata={"format": "assay-kv-calibration", "version": "2", "provenance": "{}"},
        )
        with pytest.raises(AssayError, match="cannot read the calibration"):
            read_calibration(tmp_path / "c")


def windows_of(tokens: list[int], length: int, first: int = 0) -> list[Window]:
    return [
        Window(i, tuple(tokens[lo : lo + length]))
        for i, lo in enumerate(range(first, len(tokens) - length, length))
    ]


def test_passages_of_the_calibration_text_are_found_wherever_they_are_cut() -> None:
    draw = random.Random(1)
    text = [draw.randrange(50_000) for _ in range(40_000)]
    other = [draw.randrange(50_000) for _ in range(40_000)]
    known = Calibration({}, {"passages": passages(windows_of(text, 256)), "windows": []})
    known.check_text({"sha256": "other"}, windows_of(other, 256))
    # A heading of 64 tokens before every window is no leak; a twentieth of the text is one.
    known.check_text({"sha256": "other"}, windows_of(text[:64] + other, 256))
    for scored in (
        windows_of(text, 300, first=77),
        windows_of(other[:20_000] + text[5_000:7_000], 512),
    ):
        with pytest.raises(AssayError, match="of its passages stand there too") as raised:
            known.check_text({"sha256": "other"}, scored)
        assert raised.value.finding_id == "kv.calibration_leak"


def test_a_calibration_of_a_sibling_of_the_same_shape_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, other = torch.randn(2, 96, 64, generator=generator) / 8
    known = Calibration({"layer_0_gram": gram(weight, 2, 16)}, {})
    rounded = weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    for same in (weight, weight.bfloat16(), rounded):
        known.check_weights(same)
    with pytest.raises(AssayError, match="of another model of the same shape"):
        known.check_weights(other)
    per_head = weight.reshape(96, 2, 2, 16)
    assert torch.allclose(
        gram(weight, 2, 16)[1],
        sum(per_head[:, 1, i].T @ per_head[:, 1, i] for i in range(2)),
        atol=1e-4,
    )


def test_nan_in_keys_is_refused_when_a_calibration_is_made() -> None:
    shape = CacheShape(1, 2, 4, 16, (None,), "x")
    sampler = Sampler(shape, 9, 8)
    sampler.begin(1)
    states = torch.randn(1, 2, 8, 16)
    sampler.on_states(0, "v", states)
    states[0, 1, 2, 3] = float("nan")
    sampler.on_states(0, "k", states)
    sampler.on_queries(0, torch.randn(1, 4, 8, 16))
    with pytest.raises(AssayError, match="K of layer 0 holds NaN") as raised:
        sampler.tensors(cast(Any, None), {0: torch.zeros(8, 64)})
    assert raised.value.finding_id == "kv.not_finite"
