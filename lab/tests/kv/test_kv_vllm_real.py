"""Codecs inside vLLM itself, with a real model, beside transformers with the same."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("constriction")

from assay.demo import vllm_python
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import Window
from assay.engines.vllm.path import packages_alone
from assay_lab.kv.cache_shape import cache_shape
from assay_lab.kv.calibration import Calibration, write_calibration
from assay_lab.kv.capture import capture
from kv.kv_vllm_inside import FROM, HADAMARD, LENGTH, PREDICT, job, kl, predicted, streams_of

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys with an outlier channel and a large first token, samples of the like, and a metric."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-1, 1, 64)

    def keys(count: int) -> Any:
        x = torch.randn(3, count, 64, generator=generator) * scale + 5 * torch.eye(64)[9]
        x[:, 0] *= 8
        return x.bfloat16()

    root = torch.randn(3, 64, 64, generator=generator) / 8
    x, samples = keys(301), keys(600)
    path = tmp_path_factory.mktemp("tensors") / "keys.safetensors"
    save_file(
        {
            "x": x,
            "samples": samples,
            "side": (x.flip(0) + keys(301)).contiguous(),
            "side_samples": (samples.flip(0) + keys(600)).contiguous(),
            "positions": torch.arange(600) % 200,
            "metric": root @ root.mT,
        },
        path,
    )
    return path


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `kv_vllm_inside.py` leaves what it captured."""
    return tmp_path_factory.mktemp("captured") / "samples.safetensors"


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[HfScorer]:
    opened = HfScorer.load(f"hf:{smollm2}")
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def calibration(engine: HfScorer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of other text than is scored, with tokens enough to predict from three streams."""
    ids = engine.tokenizer.encode(
        "\n".join(topics[name] for name in ("lists", "with", "try", "strings"))
    )
    text = [Window(i, tuple(ids[i * 256 : (i + 1) * 256])) for i in range(5)]
    shape = cache_shape(engine.engine.model)
    path = tmp_path_factory.mktemp("calibration") / "own.safetensors"
    write_calibration(
        path,
        Calibration(capture(engine, text, shape, tokens=1275, batch=5), {"cache": shape.to_json()}),
    )
    return path


@pytest.fixture(scope="module")
def inside(
    smollm2: Path,
    tensors: Path,
    captured: Path,
    calibration: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """What `kv_vllm_inside.py` measured."""
    alone = packages_alone(tmp_path_factory.mktemp("path"))
    done = subprocess.run(
        [
            vllm_python(),
            Path(__file__).parent / "kv_vllm_inside.py",
            smollm2,
            tensors,
            captured,
            calibration,
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(alone),
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_both_engines_processes_make_the_same_streams(
    inside: dict[str, Any], tensors: Path
) -> None:
    """Up to what another build of torch rounds differently."""
    here = streams_of(tensors)
    assert inside["streams"].keys() == here.keys()
    for spec, (size, mean, square) in here.items():
        assert inside["streams"][spec][0] == pytest.approx(size, rel=0.02), spec
        assert inside["streams"][spec][1] == pytest.approx(mean, abs=0.02), spec
        assert inside["streams"][spec][2] == pytest.approx(square, rel=0.02), spec


@pytest.mark.parametrize(
    ("case", "fires"),
    [
        # K and V of 2 batches; in decode of one, each time that a token is no longer recent.
        ("inforward identity", 4),
        ("inforward prerope+identity", 4),
        ("snapshot identity", 4),
        ("decode prerope+recent(n=3)+identity", 2 * (LENGTH - FROM)),
    ],
)
def test_an_identity_differs_by_exactly_nothing_and_fires_in_all_layers(
    inside: dict[str, Any], case: str, fires: int
) -> None:
    found = inside[case]
    assert found["max"] == 0.0
    assert found["layers"] == 30
    assert found["fires"] == [fires]


def test_decode_reads_a_cache_that_holds_reconstructions(inside: dict[str, Any]) -> None:
    for codec in (HADAMARD, f"prerope+{HADAMARD}"):
        assert inside[f"cache {codec}"] == {"coded": True, "exact": False}


def windows(inside: dict[str, Any]) -> list[Window]:
    return [Window(i, tuple(tokens)) for i, tokens in enumerate(inside["windows"])]


def test_a_codec_costs_what_it_costs_in_transformers(
    inside: dict[str, Any], engine: HfScorer
) -> None:
    plain = list(engine.score_windows(windows(inside), job("hf", "inforward", None)))
    coded = kl(plain, list(engine.score_windows(windows(inside), job("hf", "inforward", HADAMARD))))
    assert inside[f"inforward {HADAMARD}"]["mean"] == pytest.approx(coded["mean"], rel=0.3)


@pytest.mark.parametrize("mode", ["decode", "inforward", "snapshot"])
def test_a_codec_that_predicts_does_what_it_does_in_transformers(
    inside: dict[str, Any], engine: HfScorer, calibration: Path, mode: str
) -> None:
    exact = list(engine.score_windows(windows(inside), job("hf", mode, None)))
    rows = list(engine.score_windows(windows(inside), job("hf", mode, PREDICT, str(calibration))))
    here, there = kl(exact, rows), inside[f"{mode} predicted"]
    assert there["mean"] == pytest.approx(here["mean"], rel=0.3)
    for name, ratio in predicted(engine.engagement()).items():
        assert there[name] == pytest.approx(ratio, rel=0.02), name


def test_a_calibration_captures_what_one_of_transformers_does(
    inside: dict[str, Any], captured: Path, engine: HfScorer
) -> None:
    from safetensors.torch import load_file

    shape = cache_shape(engine.engine.model)
    assert inside["cache"] == json.loads(json.dumps(shape.to_json()))
    found = load_file(captured)
    wanted = capture(engine, windows(inside), shape, tokens=6 * 20, batch=6)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        if name == "positions" or name.endswith("gram"):
            assert torch.equal(found[name], tensor), name
        else:  # bf16 through up to 30 layers
            error = (found[name].float() - tensor.float()).norm() / tensor.float().norm()
            assert error < (0.01 if name.startswith("layer_0_") else 0.05), (name, float(error))


def test_modes_and_bytes_are_in_order(inside: dict[str, Any]) -> None:
    # Nothing builds up in snapshot.
    assert 0 < inside[f"snapshot {HADAMARD}"]["mean"] < inside[f"inforward {HADAMARD}"]["mean"]
    assert inside[f"inforward {HADAMARD}"]["ratio"] == inside[f"decode {HADAMARD}"]["ratio"]
    assert 3.5 < inside[f"inforward {HADAMARD}"]["ratio"] < 4
    assert 0 < inside["inforward int(bits=4)"]["mean"] < 0.2
