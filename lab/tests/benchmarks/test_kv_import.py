"""Calibrations of older tools: read, checked, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import save_file

from assay.errors import AssayError, UsageError
from assay_lab.kv.cache_shape import CacheShape, cache_shape
from assay_lab.kv.calibration import read_calibration
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.layer_coders import LayerCoders
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.spec import parse_recipe
from kv_import import convert, read_levels, read_moments, read_sidecar

SHAPE = CacheShape(2, 2, 4, 16, (None, None), "LlamaForCausalLM")
RIDGE = 1e-3
LEVELS = [-1.51, -0.45, 0.46, 1.5]


def moments(layers: int = 2, heads: int = 2, width: int = 16) -> dict[str, torch.Tensor]:
    """What such a tool writes: Σ from made-up queries, the Cholesky factor of Σ + ridge, and its
    inverse.
    """
    generator = torch.Generator().manual_seed(4)
    found = {}
    for layer in range(layers):
        q = torch.randn(heads, 200, width, generator=generator, dtype=torch.float64)
        sigma = q.mT @ q / 200
        mean = sigma.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None]
        chol = torch.linalg.cholesky(sigma + RIDGE * mean * torch.eye(width))
        for name, tensor in (
            ("sigma", sigma),
            ("chol", chol),
            ("inv_chol", torch.linalg.inv(chol)),
        ):
            found[f"layer_{layer}_{name}"] = tensor.float().contiguous()
    return found


def saved(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def test_moments_are_read_with_either_or_both_forms(tmp_path: Path) -> None:
    whole = moments()
    both = read_moments(saved(tmp_path / "a.safetensors", whole), SHAPE)
    assert set(both) == {0, 1}
    torch.testing.assert_close(both[1], whole["layer_1_sigma"])
    chol = {k: v for k, v in whole.items() if k.endswith("chol") and k.startswith("layer_1")}
    alone = read_moments(saved(tmp_path / "b.safetensors", chol), SHAPE)
    assert set(alone) == {1}
    lower = whole["layer_1_chol"]
    torch.testing.assert_close(alone[1], lower @ lower.mT)


def change(name: str, to: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    whole = moments()
    return whole | {name: to(whole[name]).contiguous()}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (moments(heads=3), r"shape \[3, 16, 16\], the model needs \[2, 16, 16\]"),
        (moments(width=8), r"shape \[2, 8, 8\]"),
        (moments(layers=3), "layers 0 to 1"),
        ({"q": torch.zeros(2)}, "'q'"),
        (change("layer_0_sigma", lambda t: t / 0.0), "no finite numbers"),
        (change("layer_0_sigma", lambda t: t + torch.triu(torch.ones(16, 16), 1)), "not symmetric"),
        (change("layer_0_sigma", lambda t: 2 * t), "not of its Σ"),
        (change("layer_1_inv_chol", lambda t: t.mT), "not its inverse"),
        ({"layer_0_sigma": -torch.eye(16).expand(2, 16, 16).contiguous()}, "negative eigenvalues"),
        ({"layer_0_inv_chol": torch.eye(16).expand(2, 16, 16).contiguous()}, "neither"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(AssayError, match=said):
        read_moments(saved(tmp_path / "m.safetensors", tensors), SHAPE)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"no")
    for path in (tmp_path / "m.safetensors", tmp_path / "none.safetensors"):
        with pytest.raises(AssayError, match="cannot be read"):
            read_moments(path, SHAPE)


def test_what_stands_beside_is_checked_and_partly_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    assert read_sidecar(path, SHAPE) == {}
    beside = path.with_suffix(".json")
    beside.write_text(
        json.dumps({"head_dim": 16, "ridge": 1e-3, "ctx_len": 2048, "model_path": "/home/x"})
    )
    assert read_sidecar(path, SHAPE) == {"ridge": 1e-3, "ctx_len": 2048}
    beside.write_text(json.dumps({"num_kv_heads": 8}))
    with pytest.raises(AssayError, match="num_kv_heads 8, the model has 2"):
        read_sidecar(path, SHAPE)
    for text in ("[]", "{"):
        beside.write_text(text)
        with pytest.raises(AssayError, match=r"JSON object|cannot be read"):
            read_sidecar(path, SHAPE)


def levels(path: Path, values: list[float]) -> Path:
    path.write_bytes(np.array(values, dtype="<f4").tobytes())
    return path


def test_levels_are_read_and_refused(tmp_path: Path) -> None:
    torch.testing.assert_close(
        read_levels(levels(tmp_path / "k.f32", LEVELS)), torch.tensor(LEVELS)
    )
    for values, said in (
        ([1.0, 2.0, 3.0], "12 bytes"),
        ([], "0 bytes"),
        ([1.0], "4 bytes"),
        ([0.0, 1.0, 1.0, 2.0], "do not rise"),
        ([0.0, float("nan")], "do not rise"),
        (list(map(float, range(512))), "2048 bytes"),
    ):
        with pytest.raises(AssayError, match=said):
            read_levels(levels(tmp_path / "w.f32", values))
    (tmp_path / "odd.f32").write_bytes(b"12345")
    with pytest.raises(AssayError, match="5 bytes"):
        read_levels(tmp_path / "odd.f32")
    with pytest.raises(AssayError, match="cannot be read"):
        read_levels(tmp_path / "none.f32")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration without weights: that is all an import reads."""
    folder = tmp_path_factory.mktemp("model")
    transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=100,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_an_import_serves_the_codecs_that_it_was_made_for(checkpoint: Path, tmp_path: Path) -> None:
    old, out = saved(tmp_path / "q.safetensors", moments()), tmp_path / "new.safetensors"
    table = levels(tmp_path / "k_b2.f32", LEVELS)
    found = convert(str(checkpoint), out, old, [table])
    assert found["tensors"] == ["layer_0_sigma", "layer_1_sigma", "levels_k_2"]
    assert set(found["imported"]["files"]) == {"q.safetensors", "k_b2.f32"}

    net = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(checkpoint))
    calibration = read_calibration(out)
    calibration.check_model(cache_shape(net))
    calibration.check_text({"sha256": "x"}, [])
    layer_coders = LayerCoders(cache_shape(net), Rotary(net, 64), calibration)
    # Preconditioning with the ridge of the old tool gives its own factor back.
    fitted = layer_coders.fit(parse_recipe("prerope+qprecond(ridge=0.001)+hadamard"), 1, "k")
    rows, columns = np.tril_indices(16)
    np.testing.assert_allclose(
        fitted.tables["chol"],
        moments()["layer_1_chol"].numpy()[:, rows, columns],
        rtol=1e-4,
        atol=1e-5,
    )
    kakeya = layer_coders.fit(parse_recipe("kakeya(bits=2, levels=calibrated)"), 0, "k")
    np.testing.assert_array_equal(kakeya.tables["levels"], np.array(LEVELS, dtype=np.float32))
    # After RoPE it is the average over rotations, which the file does not have.
    after = calibration.samples(
        LayerStream("k", 0, 2, 2, 16), before_rope=False, rotary=layer_coders.rotary
    )
    assert after.metric is not None
    plain = moments()["layer_0_sigma"]
    assert not torch.allclose(after.metric, plain, atol=1e-2)
    torch.testing.assert_close(
        after.metric.diagonal(dim1=1, dim2=2).sum(1),
        plain.diagonal(dim1=1, dim2=2).sum(1),
        rtol=1e-3,
        atol=0.0,
    )
    for spec, stream in (
        ("mean+fp8", "k"),
        ("kakeya(bits=3, levels=calibrated)", "k"),
        ("qprecond+fp8", "v"),
    ):
        with pytest.raises(AssayError, match="calibration"):
            layer_coders.fit(parse_recipe(spec), 0, stream)

    for wrong in ((), (None, [table, table])):
        with pytest.raises(UsageError):
            convert(str(checkpoint), out, *wrong)
    with pytest.raises(AssayError, match="of another model"):
        convert(str(checkpoint), out, saved(tmp_path / "w.safetensors", moments(heads=1)))


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssayError, match="configuration"):
        convert(str(tmp_path), tmp_path / "o", levels_k=[levels(tmp_path / "k.f32", LEVELS)])
