"""GPTQ against the rule that it makes fast, worked out in numpy column by column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from assay_lab.quantisation.gptq import gptq, gptq_model
from assay_lab.quantisation.integers import quantise_dequantise


def slow(weight: np.ndarray, gram: np.ndarray, bits: int, group: int, damping: float) -> np.ndarray:
    """Optimal brain quantisation in order: after each column the inverse of what is left of H is
    worked out anew.
    """
    w = weight.astype(np.float64).copy()
    h = gram + damping * np.diag(gram).mean() * np.eye(len(gram))
    levels = 2**bits - 1
    for j in range(w.shape[1]):
        if j % group == 0:
            lo, hi = (
                np.minimum(w[:, j : j + group].min(1), 0),
                np.maximum(w[:, j : j + group].max(1), 0),
            )
            scale = (hi - lo) / levels
            zero = np.round(-lo / scale)
        rounded = (np.clip(np.round(w[:, j] / scale) + zero, 0, levels) - zero) * scale
        inverse = np.linalg.inv(h[j:, j:])
        w[:, j:] -= np.outer((w[:, j] - rounded) / inverse[0, 0], inverse[0])
        w[:, j] = rounded
    return w


def drawn(rows: int, width: int, tokens: int = 400) -> tuple[Any, Any]:
    """A weight, and the Gram matrix of inputs that correlate and differ in size."""
    noise = torch.Generator().manual_seed(4)
    mix = torch.randn(width, width, generator=noise) * torch.linspace(0.2, 2.0, width)
    x = torch.randn(tokens, width, generator=noise) @ mix
    return torch.randn(rows, width, generator=noise), x.T @ x


@pytest.mark.parametrize(
    ("width", "group"),
    [(40, 8), (72, 24), pytest.param(300, 64, marks=pytest.mark.slow), (260, 200)],
)
def test_it_is_the_slow_rule(width: int, group: int) -> None:
    weight, gram = drawn(6, width)
    found = gptq(weight, gram, 4, group).double().numpy()
    wanted = slow(weight.numpy(), gram.double().numpy(), 4, group, 0.01)
    # A value that lies between two levels may fall either way in float32, and takes those behind it
    # along.
    assert (np.abs(found - wanted) < 1e-3).mean() > 0.97
    assert loss(found - weight.numpy(), gram) == pytest.approx(
        loss(wanted - weight.numpy(), gram), rel=0.02
    )


def loss(error: Any, gram: Any) -> float:
    e = np.asarray(error, dtype=np.float64)
    return float(((e @ gram.double().numpy()) * e).sum())


def test_outputs_are_nearer_than_those_of_rounding_to_nearest() -> None:
    weight, gram = drawn(16, 128)
    for bits, symmetric in ((4, False), (4, True), (3, False)):
        own, plain = (
            loss((f - weight).numpy(), gram)
            for f in (
                gptq(weight, gram, bits, 32, symmetric=symmetric),
                quantise_dequantise(weight, bits, 32, symmetric=symmetric),
            )
        )
        assert own < 0.9 * plain, (bits, symmetric, own, plain)


def test_rounded_weights_have_no_more_levels_than_the_grid() -> None:
    weight, gram = drawn(5, 96)
    for part in gptq(weight, gram, 3, 32).reshape(5, 3, 32).reshape(15, 32):
        assert len(part.unique()) <= 8
    gram[:, 7] = gram[7] = 0  # an input that is always zero
    assert (gptq(weight, gram, 3, 32)[:, 7] == 0).all()


def test_without_correlation_it_is_rounding_to_nearest() -> None:
    weight, _ = drawn(8, 64)
    assert torch.allclose(
        gptq(weight, torch.eye(64), 4, 16), quantise_dequantise(weight, 4, 16), atol=1e-5
    )


def test_a_whole_model_keeps_its_logits_better_than_rounding_to_nearest(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from assay_lab.quantisation.integers import quantise_model
    from tiny_target import make_target

    folder = make_target(tmp_path, layers=3)
    noise = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 300, (60,), generator=noise).tolist() for _ in range(12)]

    def apart(change: Any) -> tuple[float, Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        fresh = torch.randint(0, 300, (8, 60), generator=torch.Generator().manual_seed(2))
        with torch.no_grad():
            before = model(fresh).logits.log_softmax(-1)
            head = model.lm_head.weight.clone()
            change(model)
            after = model(fresh).logits.log_softmax(-1)
        assert torch.equal(head, model.lm_head.weight)
        return float((before.exp() * (before - after)).sum(-1).mean()), model

    nearest, _ = apart(lambda m: quantise_model(m, 3, 32))
    own, model = apart(lambda m: gptq_model(m, texts, 3, 32))
    assert 0 < own < nearest
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
