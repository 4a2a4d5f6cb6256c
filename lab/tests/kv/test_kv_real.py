"""`assay kv` from the command line on real weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import invoke

pytestmark = pytest.mark.engine

Kv = Callable[..., tuple[int, dict[str, Any]]]
SMALL = ("--windows", 8, "--length", 48)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two texts that share nothing: halves of Python's own documentation."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("texts")
    names = sorted(topics)
    found = {}
    for which, chosen in (("train", names[::2]), ("test", names[1::2])):
        found[which] = folder / f"{which}.txt"
        found[which].write_text("\n\n".join(topics[n] for n in chosen), encoding="utf-8")
    return found


@pytest.fixture(scope="module")
def calibration(
    smollm2: Path, texts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("calibration") / "c.safetensors"
    arguments = ["kv", "calibrate", smollm2, "--out", out, "--text", texts["train"], "--windows", 8]
    assert invoke([*map(str, arguments), "--length", "256", "--tokens", "1024"]) == 0
    return out


def test_identity_differs_by_exactly_nothing_and_still_fires(kv: Kv, smollm2: Path) -> None:
    code, body = kv("eval", smollm2, "--codec", "identity", *SMALL)
    assert code == 0
    results = body["results"]
    assert results["self_test"] is True
    assert results["kld"]["max"] == 0
    assert results["engaged"]["fires"] > 0
    assert set(results["engaged"]["per_layer"]) == {str(i) for i in range(30)}
    assert 0.95 < results["bytes"]["ratio"] < 1.05
    assert str(smollm2) not in json.dumps(results)


@pytest.mark.slow
def test_fewer_bits_are_smaller_and_worse(kv: Kv, smollm2: Path) -> None:
    found = []
    for bits in (6, 3):
        _, body = kv("eval", smollm2, "--codec", f"hadamard(bits={bits})", *SMALL)
        found.append((body["results"]["bytes"]["ratio"], body["results"]["kld"]["mean"]))
    assert found[0][0] < found[1][0]
    assert 0 < found[0][1] < found[1][1]


@pytest.mark.parametrize("mode", ["inforward", "snapshot"])
def test_other_modes_score_all_tokens(kv: Kv, tiny_llama: Path, mode: str) -> None:
    _, body = kv("eval", tiny_llama, "--codec", "fp8", "--mode", mode, *SMALL)
    assert body["results"]["tokens"] == 8 * 47
    assert body["results"]["kld"]["mean"] > 0


def test_skipped_layers_stay_exact(kv: Kv, tiny_llama: Path) -> None:
    _, body = kv("eval", tiny_llama, "--codec", "hadamard(bits=3)", "--skip-layers", "0", *SMALL)
    assert set(body["results"]["engaged"]["per_layer"]) == {"1"}
    assert 1 < body["results"]["bytes"]["ratio"] < 2
    code, body = kv("eval", tiny_llama, "--codec", "fp8", "--skip-layers", "2", *SMALL)
    assert code == 2
    assert "layer 2" in body["findings"][0]["title"]


def test_a_calibrated_mean_helps_keys(
    kv: Kv, smollm2: Path, texts: dict[str, Path], calibration: Path
) -> None:
    shared = ("--calibration", calibration, "--text", texts["test"], "--stream", "k", *SMALL)
    _, plain = kv("eval", smollm2, "--codec", "prerope+sinks(n=4)+hadamard(bits=3)", *shared)
    _, mean = kv("eval", smollm2, "--codec", "prerope+sinks(n=4)+mean+hadamard(bits=3)", *shared)
    assert mean["results"]["kld"]["mean"] < plain["results"]["kld"]["mean"]
    assert mean["results"]["bytes"]["tables"] > 0
    assert plain["results"]["bytes"]["tables"] == 0


def test_what_a_prediction_leaves_is_diagnosed(
    kv: Kv, smollm2: Path, texts: dict[str, Path], calibration: Path
) -> None:
    codec = "prerope+sinks(n=4)+pca(step=0.2, classes=1, predict={})"
    shared = (
        "--skip-layers",
        "0-27",
        "--calibration",
        calibration,
        "--text",
        texts["test"],
        "--windows",
        2,
        "--length",
        128,
    )
    found = {}
    for predict in ("none", "below"):
        code, body = kv("diagnose", smollm2, "--codec", codec.format(predict), *shared)
        assert code == 0
        found[predict] = body["results"]["layers"]
    for plain, predicted in zip(found["none"], found["below"], strict=True):
        # The step is one of what is left, which is less.
        assert 0 < predicted["relative_mse"] < 0.9 * plain["relative_mse"]


def test_evaluation_on_calibration_text_is_refused(
    kv: Kv, smollm2: Path, texts: dict[str, Path], calibration: Path
) -> None:
    code, body = kv(
        "eval",
        smollm2,
        "--codec",
        "mean+fp8",
        "--calibration",
        calibration,
        "--text",
        texts["train"],
        *SMALL,
    )
    assert code == 2
    assert body["findings"][0]["id"] == "kv.calibration_leak"


def test_a_calibration_of_another_model_is_refused(
    kv: Kv, tiny_llama: Path, calibration: Path
) -> None:
    code, body = kv("eval", tiny_llama, "--codec", "mean+fp8", "--calibration", calibration, *SMALL)
    assert code == 2
    assert body["findings"][0]["id"] == "kv.calibration_mismatch"


def test_sliding_layers_take_codecs_too(kv: Kv, gemma3: Path) -> None:
    _, body = kv(
        "eval", gemma3, "--codec", "prerope+hadamard(bits=4)", "--windows", 8, "--length", 32
    )
    assert body["results"]["engaged"]["ok"]
    assert body["results"]["kld"]["mean"] > 0


def test_parts_are_attributed_and_add_up_roughly(kv: Kv, smollm2: Path) -> None:
    code, body = kv(
        "attribute",
        smollm2,
        "--codec",
        "hadamard(bits=4)",
        "--each",
        "layer",
        "--skip-layers",
        "0-26",
        "--windows",
        4,
        "--length",
        32,
    )
    assert code == 0
    results = body["results"]
    assert [p["layer"] for p in results["parts"]] == [27, 28, 29]
    assert 0.3 < results["additivity_ratio"] < 3
    assert results["joint"]["kld"]["value"] > max(p["kld"]["value"] for p in results["parts"]) / 2


@pytest.mark.parametrize(
    ("options", "finding", "said"),
    [
        (("--skip-layers", "0-1"), "kv.usage", "leaves none of the 2 layers"),
        (("--skip-layers", "2"), "kv.usage", "layer 2 does not exist"),
        (("--codec", "boundary(first=1, last=1)+hadamard"), "fidelity.not_engaged", "took no part"),
        (("--codec", "recent(n=64)+hadamard"), "fidelity.not_engaged", "its hook never fired"),
    ],
)
def test_a_codec_that_codes_nothing_is_no_self_test(
    kv: Kv, tiny_llama: Path, options: tuple[str, ...], finding: str, said: str
) -> None:
    code, body = kv(
        "eval", tiny_llama, "--codec", "hadamard", *options, "--windows", 2, "--length", 32
    )
    assert (code, body["findings"][0]["id"]) == (2, finding)
    assert said in body["findings"][0]["title"]


def test_mistakes_end_with_words(kv: Kv, tiny_llama: Path, tmp_path: Path) -> None:
    for arguments, said in (
        (("eval", tiny_llama, "--codec", "hadamrd"), "hadamrd"),
        (("eval", tiny_llama, "--codec", "mean+fp8"), "calibrat"),
        (("eval", tmp_path / "nowhere", "--codec", "fp8"), "nowhere"),
        (("eval", tiny_llama, "--codec", "fp8", "--calibration", tmp_path / "no.st"), "no.st"),
        (("eval", tiny_llama, "--codec", "fp8", "--mode", "sideways"), "sideways"),
    ):
        code, body = kv(*arguments)
        assert code == 2
        assert said in body["findings"][0]["title"]
