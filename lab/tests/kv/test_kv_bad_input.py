"""What `assay kv eval` refuses: the whole command on a tiny model, one clear line for each, and
nothing for sound input.

That passages of the calibration text are found wherever they are cut takes longer windows
(`test_kv_calibration.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from assay.engines.scoring import TokenizerFacts
from assay.errors import AssayError
from assay.verdict import Severity
from assay_lab.kv import opening
from assay_lab.kv.calibrate import CalibrationPlan, run_calibrate
from assay_lab.kv.eval import run_eval
from assay_lab.options import EvalPlan
from kv.test_kv_hook import LENGTH
from kv.test_kv_lab import Tiny

MEAN = "prerope+mean+hadamard(bits=4)"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    engine = Tiny()
    monkeypatch.setattr(opening, "open_scorer", lambda spec: engine)
    return engine


def text_of(path: Path, seed: int) -> str:
    """A file of words that no other seed gives."""
    import random

    rng = random.Random(seed)
    path.write_text(
        "".join(rng.choice("abcdefghij klmnopqrstuvwxyz") for _ in range(9_000)), encoding="utf-8"
    )
    return str(path)


def plan(codec: str = "hadamard(bits=4)", **more: Any) -> EvalPlan:
    return EvalPlan("hf:small", codec, **{"windows": 8, "length": LENGTH, "batch": 2, **more})


def calibrated(tmp_path: Path, text: str) -> str:
    out = tmp_path / "c.safetensors"
    run_calibrate(
        CalibrationPlan(
            "hf:small", out, text=(text,), windows=16, length=LENGTH, tokens=256, batch=4
        )
    )
    return str(out)


def nan_keys(engine: Tiny) -> None:
    with torch.no_grad():
        engine.engine.model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")


def larger_vocabulary(engine: Tiny) -> None:
    facts = TokenizerFacts("0" * 64, 200, None, lambda text: [100 + ord(c) % 99 for c in text], str)
    type(engine).tokenizer = property(lambda self: facts)  # type: ignore[assignment]


def full_device(engine: Tiny) -> None:
    engine.last, engine.failure = (
        0,
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    )


@pytest.mark.parametrize(
    ("spoil", "more", "finding", "said"),
    [
        (nan_keys, {}, "fidelity.nonfinite", "not finite"),
        (nan_keys, {"mode": "inforward"}, "fidelity.nonfinite", "not finite"),
        (lambda engine: None, {"length": 4096}, "fidelity.window_too_long", "4,096 tokens are longer than the 2,048 positions"),  # noqa: E501
        (larger_vocabulary, {}, "fidelity.tokenizer", "100 embeddings"),
        (full_device, {}, "fidelity.out_of_memory", "out of memory"),
    ],
)  # fmt: skip
def test_the_command_ends_in_one_line(
    spoil: Callable[[Tiny], None], more: dict[str, Any], finding: str, said: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch  # noqa: E501
) -> None:  # fmt: skip
    monkeypatch.setattr(Tiny, "tokenizer", Tiny.tokenizer)  # put back afterwards
    spoil(tiny)
    with pytest.raises(AssayError, match=said) as caught:
        run_eval(plan(**more))
    assert caught.value.finding_id == finding
    assert "\n" not in str(caught.value)
    assert caught.value.remedy


def test_a_token_whose_keys_are_nan_fails_the_codec_and_is_named(tiny: Tiny) -> None:
    with torch.no_grad():
        tiny.engine.model.model.embed_tokens.weight[7] = float("nan")
    report = run_eval(plan())
    found = {f.id: f for f in report.findings}
    assert report.exit_code in (1, 2)
    assert "K stream of layer 0 are NaN or infinite" in found["kv.not_finite"].title
    assert found["kv.not_finite"].severity is Severity.ERROR


def test_a_calibration_serves_other_text_and_is_refused_for_its_own(
    tiny: Tiny, tmp_path: Path
) -> None:
    ours, other = text_of(tmp_path / "a.txt", 1), text_of(tmp_path / "b.txt", 2)
    table = calibrated(tmp_path, ours)
    assert run_eval(plan(MEAN, text=(other,), calibration=table)).exit_code != 2
    with pytest.raises(AssayError, match="calibrat") as caught:
        run_eval(plan(MEAN, text=(ours,), calibration=table))
    assert caught.value.finding_id == "kv.calibration_leak"


def test_a_calibration_of_other_weights_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    ours, other = text_of(tmp_path / "a.txt", 1), text_of(tmp_path / "b.txt", 2)
    table = calibrated(tmp_path, ours)
    with torch.no_grad():
        weight = tiny.engine.model.model.layers[0].self_attn.o_proj.weight
        weight.copy_(
            torch.randn(weight.shape, generator=torch.Generator().manual_seed(9)) * weight.std()
        )
    with pytest.raises(AssayError, match="another model") as caught:
        run_eval(plan(MEAN, text=(other,), calibration=table))
    assert caught.value.finding_id == "kv.calibration_mismatch"


def test_nan_in_keys_is_refused_when_a_calibration_is_made(tiny: Tiny, tmp_path: Path) -> None:
    nan_keys(tiny)
    with pytest.raises(AssayError, match="K of layer 1 holds NaN"):
        calibrated(tmp_path, text_of(tmp_path / "a.txt", 1))
