"""Damage to checkpoints: the same for one seed, in the copy only, and exactly what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from assay.demo.bf16 import bf16_to_float32, float32_to_bf16
from assay.demo.damage import BLOCK_BYTES, BLOCKS, DAMAGES, damage_checkpoint, round_to_nearest
from assay.errors import AssayError, UsageError

LAYERS, HIDDEN = 6, 192
PROJECTIONS = ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")


def tensor_names() -> list[str]:
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(LAYERS):
        names += [f"model.layers.{layer}.{name}.weight" for name in PROJECTIONS]
        names.append(f"model.layers.{layer}.input_layernorm.weight")
    return names


def write_checkpoint(folder: Path) -> Path:
    """A small checkpoint, its shard written by hand from the description of the format."""
    rng = np.random.default_rng(5)
    header, body = {}, b""
    for name in tensor_names():
        shape = [HIDDEN] if "norm" in name else [HIDDEN, 256]
        # The upper half of a float32, cut off: a bf16.
        bits = (rng.normal(0, 0.05, shape).astype("<f4").view("<u4") >> 16).astype("<u2")
        header[name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [len(body), len(body) + bits.nbytes],
        }
        body += bits.tobytes()
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + body)
    (folder / "config.json").write_text(json.dumps({"rope_parameters": {"rope_theta": 100000.0}}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    vocabulary = {"<s>": 0, "</s>": 1, **{f"word{i}": i + 2 for i in range(60)}}
    added = [{"id": 0, "content": "<s>"}, {"id": 1, "content": "</s>"}]
    (folder / "tokenizer.json").write_text(
        json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}})
    )
    return folder


def read_values(folder: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors, read by the library of the format."""
    from safetensors import deserialize

    found = {}
    for name, entry in deserialize((folder / "model.safetensors").read_bytes()):
        bits = np.frombuffer(bytes(entry["data"]), "<u2").astype("<u4") << 16
        found[name] = bits.view("<f4").reshape(entry["shape"])
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "whole")


def changed(before: Path, after: Path) -> set[str]:
    old, new = read_values(before), read_values(after)
    return {name for name in old if not np.array_equal(old[name], new[name], equal_nan=True)}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_damage_changes_the_copy_alone_and_repeats(
    name: str, whole: Path, tmp_path: Path
) -> None:
    before = contents(whole)
    first = contents(damage_checkpoint(name, whole, tmp_path / "first", seed=3))
    second = contents(damage_checkpoint(name, whole, tmp_path / "second", seed=3))
    assert contents(whole) == before
    assert first == second != before
    assert first.keys() == before.keys()
    assert len(first["model.safetensors"]) == len(before["model.safetensors"])
    read_values(tmp_path / "first")  # the shard can still be read


@pytest.mark.parametrize(
    "name", ["random_blocks", "stuck_exponent_bit", "nan_row", "wrong_tokenizer"]
)
def test_another_seed_breaks_elsewhere(name: str, whole: Path, tmp_path: Path) -> None:
    first = contents(damage_checkpoint(name, whole, tmp_path / "first", seed=1))
    assert contents(damage_checkpoint(name, whole, tmp_path / "second", seed=2)) != first


def test_random_blocks_stay_within_their_size(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("random_blocks", whole, tmp_path / "broken")
    old = np.frombuffer((whole / "model.safetensors").read_bytes(), np.uint8)
    new = np.frombuffer((broken / "model.safetensors").read_bytes(), np.uint8)
    sectors = {int(i) // BLOCK_BYTES for i in np.flatnonzero(old != new)}
    assert BLOCKS / 2 < len(sectors) <= BLOCKS


def test_swapped_layers_twice_is_the_original(whole: Path, tmp_path: Path) -> None:
    once = damage_checkpoint("swapped_layers", whole, tmp_path / "once")
    twice = damage_checkpoint("swapped_layers", once, tmp_path / "twice")
    assert contents(twice) == contents(whole)
    old, new = read_values(whole), read_values(once)
    for name in PROJECTIONS:
        assert np.array_equal(
            old[f"model.layers.1.{name}.weight"], new[f"model.layers.4.{name}.weight"]
        )


def test_scaled_k_triples_keys_and_nothing_else(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("scaled_k", whole, tmp_path / "broken")
    old, new = read_values(whole), read_values(broken)
    assert changed(whole, broken) == {n for n in old if "k_proj" in n}
    name = "model.layers.2.self_attn.k_proj.weight"
    np.testing.assert_allclose(new[name], 3 * old[name], rtol=2**-8)


def test_nan_row_is_one_row(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("nan_row", whole, tmp_path / "broken")
    (name,) = changed(whole, broken)
    bad = np.isnan(read_values(broken)[name])
    assert "v_proj" in name
    assert bad.all(axis=1).sum() == 1 == bad.any(axis=1).sum()


def test_zeroed_layer_keeps_its_norms(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("zeroed_layer", whole, tmp_path / "broken")
    names = changed(whole, broken)
    assert names == {f"model.layers.2.{name}.weight" for name in PROJECTIONS}
    assert not any(read_values(broken)[name].any() for name in names)


def test_norm_plus_one(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("norm_plus_one", whole, tmp_path / "broken")
    old, new = read_values(whole), read_values(broken)
    assert changed(whole, broken) == {n for n in old if "norm" in n}
    np.testing.assert_allclose(new["model.norm.weight"], 1 + old["model.norm.weight"], rtol=2**-8)


def test_stuck_bit_is_a_factor_of_16(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("stuck_exponent_bit", whole, tmp_path / "broken")
    (name,) = changed(whole, broken)
    old, new = read_values(whole)[name], read_values(broken)[name]
    hit = old != new
    assert hit.sum() == 32_768
    assert set(np.unique(new[hit] / old[hit])) == {1 / 16, 16.0}


def test_int2_leaves_four_values_in_a_group(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("int2", whole, tmp_path / "broken")
    groups = read_values(broken)["model.layers.0.mlp.down_proj.weight"].reshape(-1, 32)
    assert max(len(np.unique(group)) for group in groups) == 4


def test_rope_theta_and_templates(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("rope_theta", whole, tmp_path / "broken")
    assert (
        json.loads((broken / "config.json").read_text())["rope_parameters"]["rope_theta"] == 3000.0
    )
    import jinja2

    asked = [{"role": "user", "content": "hello"}]
    for name, expected in (
        ("wrong_template", "[INST] hello [/INST]"),
        ("plain_template", "### Instruction:\nhello\n\n### Response:\n"),
    ):
        text = (damage_checkpoint(name, whole, tmp_path / name) / "chat_template.jinja").read_text()
        # transformers compiles templates with blocks trimmed.
        rendered = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(text)
        assert rendered.render(messages=asked, add_generation_prompt=True) == expected


def test_a_model_without_rope_theta_is_refused(whole: Path, tmp_path: Path) -> None:
    (whole / "config.json").write_text("{}")
    with pytest.raises(AssayError, match="no rope_theta"):
        damage_checkpoint("rope_theta", whole, tmp_path / "broken")


def test_permuted_vocabulary_keeps_special_tokens(whole: Path, tmp_path: Path) -> None:
    broken = damage_checkpoint("wrong_tokenizer", whole, tmp_path / "broken")
    old = json.loads((whole / "tokenizer.json").read_text())["model"]["vocab"]
    new = json.loads((broken / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(new.values()) == sorted(old.values())
    assert (new["<s>"], new["</s>"]) == (0, 1)
    assert sum(new[word] == old[word] for word in old) < 15


def test_unknown_names_and_folders_without_shards(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown damage 'gremlins'"):
        damage_checkpoint("gremlins", whole, tmp_path / "broken")
    with pytest.raises(UsageError, match="is no checkpoint: it holds no config"):
        damage_checkpoint("int2", tmp_path, tmp_path / "broken")
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        damage_checkpoint("int2", whole, tmp_path / "there")
    (whole / "model.safetensors").unlink()
    with pytest.raises(AssayError, match="no safetensors file"):
        damage_checkpoint("int2", whole, tmp_path / "broken")


@given(
    st.lists(
        st.floats(
            width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99
        )
    )
)
def test_bf16_rounds_to_the_nearest_with_ties_to_even(values: list[float]) -> None:
    exact = np.array(values, dtype=np.float32)
    bits = float32_to_bf16(exact)
    back = bf16_to_float32(bits).astype(np.float64)
    for step in (-1, 1):
        neighbour = bf16_to_float32((bits.astype(np.int32) + step).astype(np.uint16)).astype(
            np.float64
        )
        mine, other = np.abs(back - exact), np.abs(neighbour - exact)
        finite = np.isfinite(neighbour) & (np.sign(neighbour) == np.sign(back))
        assert (mine[finite] <= other[finite]).all()
        tie = finite & (mine == other)
        assert (bits[tie] % 2 == 0).all()


@given(st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_rounding_errs_by_half_a_step_at_most(bits: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(4, 64)).astype(np.float32)
    rounded = round_to_nearest(values, bits=bits, group=16)
    grouped = values.reshape(4, 4, 16)
    step = (grouped.max(-1) - grouped.min(-1)) / (2**bits - 1)
    error = np.abs(rounded.reshape(4, 4, 16) - grouped).max(-1)
    assert (error <= step / 2 * (1 + 1e-4)).all()
