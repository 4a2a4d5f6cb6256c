"""Round-to-nearest weights: the grid, its bytes, and a model that is changed and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from assay.errors import UsageError
from assay_lab.quantisation.integers import quantise_dequantise, quantise_model, stored_bytes


@given(
    bits=st.integers(2, 8),
    group=st.sampled_from([8, 32, 100]),
    width=st.integers(1, 130),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50, deadline=None)
def test_error_is_at_most_half_a_step_and_levels_are_few(
    bits: int, group: int, width: int, symmetric: bool, seed: int
) -> None:
    weight = torch.randn(3, width, generator=torch.Generator().manual_seed(seed))
    found = quantise_dequantise(weight, bits, group, symmetric=symmetric)
    for lo in range(0, width, group):
        part, back = weight[:, lo : lo + group], found[:, lo : lo + group]
        for row, rounded in zip(part, back, strict=True):
            if symmetric:
                step = row.abs().max() / (2 ** (bits - 1) - 1)
            else:
                step = (row.max().clamp_min(0) - row.min().clamp_max(0)) / (2**bits - 1)
            assert (row - rounded).abs().max() <= 0.5 * step * 1.01 + 1e-6 or not symmetric
            assert (row - rounded).abs().max() <= 1.01 * step + 1e-6
            assert rounded.unique().numel() <= 2**bits


def test_values_on_the_grid_stay() -> None:
    weight = torch.arange(16, dtype=torch.float32).repeat(2, 2) - 8
    torch.testing.assert_close(quantise_dequantise(weight, 4, 16), weight)


def test_a_real_minimum_is_lossless_on_its_own_grid_and_a_rounded_zero_point_is_not() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (5, 64), generator=generator)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scale, least = (
        torch.rand(5, 1, generator=generator) + 0.5,
        torch.randn(5, 1, generator=generator),
    )
    weight = codes * scale + least
    torch.testing.assert_close(quantise_dequantise(weight, 4, 32, minimum=True), weight)
    assert (quantise_dequantise(weight, 4, 32) - weight).abs().max() > 0.05


def test_bytes() -> None:
    weight = torch.zeros(10, 256)
    assert stored_bytes(weight, 4, 128, minimum=True) == 10 * (128 + 8)
    assert stored_bytes(weight, 4, 128, symmetric=True) == 10 * (128 + 4)
    assert stored_bytes(weight, 4, 128) == 10 * (128 + 5)


def test_a_model_keeps_its_head_and_norms() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
    )
    model = transformers.LlamaForCausalLM(config)
    before = {name: p.clone() for name, p in model.named_parameters()}
    size = quantise_model(model, bits=4, group=32)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "proj" in name}
    whole = sum(p.numel() * 4 for p in before.values())
    assert 0.1 * whole < size < 0.6 * whole


def test_impossible_bits_are_refused() -> None:
    for options in ({"bits": 9}, {"group": 0}, {"symmetric": True, "minimum": True}):
        with pytest.raises(UsageError, match="bits"):
            quantise_model(None, **options)
