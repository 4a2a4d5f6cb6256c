"""`assay gap` from the command line on real weights: float32 arithmetic against bf16, with a
codec.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import invoke
from assay.demo import vllm_python
from assay.engines.vllm.scorer import PYTHON
from assay_lab.gap import run_cache

pytestmark = pytest.mark.engine

SMALL = ("--windows", 4, "--length", 24, "--fresh", 0, "--batch", 4, "--groups", 2)
Gap = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def gap(capsys: pytest.CaptureFixture[str]) -> Gap:
    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = invoke(["gap", *map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
def test_a_gap_sums_is_kept_and_goes_on_from_there(
    gap: Gap, smollm2: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(cache))
    opened: list[str] = []
    real = run_cache.open_scorer
    monkeypatch.setattr(run_cache, "open_scorer", lambda spec: opened.append(spec) or real(spec))
    command = (
        f"hf:{smollm2}?dtype=float32",
        f"hf:{smollm2}",
        "--codec",
        "hadamard(bits=4)",
        *SMALL,
    )
    code, body = gap(*command, "--phases", "2,4", "--keep")
    assert code == 3  # four windows decide nothing
    assert body["verdict"] == "inconclusive"
    results = body["results"]
    buckets = {b["name"]: b for b in results["buckets"]}
    assert list(buckets) == ["engine", "codec", "interaction", "harness"]
    assert sum(b["dnll"] for b in buckets.values()) + results["repeatability"][
        "value"
    ] == pytest.approx(results["total"]["value"], abs=1e-12)
    assert sum(b["kl"]["value"] for b in buckets.values()) + results["repeatability"]["kl"][
        "value"
    ] == pytest.approx(results["total"]["kl"]["value"], abs=1e-12)
    assert 0 < buckets["engine"]["kl"]["value"] < buckets["codec"]["kl"]["value"]
    assert [p["name"] for p in buckets["codec"]["parts"]] == [
        "codec.layers.00-14", "codec.layers.15-29", "codec.together",
    ]  # fmt: skip
    assert (
        results["floors"]["reference"]["kl"]["value"]
        < 1e-6
        < results["floors"]["rounding_bf16"]["kl"]["value"]
    )
    assert results["setup_differences"] == {}
    assert results["codec_gap"]["value"] == pytest.approx(buckets["interaction"]["dnll"])
    assert len(results["residual"]["streams"]) == 60
    assert all(
        0.03 < s["relative_error"]["reference"] < 0.3 for s in results["residual"]["streams"]
    )
    assert "recommendations" in results["skipped"]
    assert str(smollm2) not in json.dumps(results)
    # Again: everything is there, but for the reference's tokenizer no engine is opened.
    assert len(opened) == 4  # reference, candidate, and both ends once more
    opened.clear()
    code, again = gap(*command, "--phases", "2,4")
    assert code == 3
    assert again["results"] == results
    assert opened == [f"hf:{smollm2}?dtype=float32"]


def test_an_engine_against_itself_with_an_identity_is_a_self_test(
    gap: Gap, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    spec = f"hf:{tiny_llama}?dtype=float32"
    few = (
        "--windows",
        2,
        "--length",
        24,
        "--fresh",
        0,
        "--batch",
        2,
        "--phases",
        "1",
        "--mode",
        "inforward",
    )
    code, body = gap(spec, spec, "--codec", "identity", *few)
    assert (code, body["verdict"]) == (0, "pass")
    results = body["results"]
    assert results["self_test"] is True
    assert all(b["dnll"] == 0 and b["kl"]["value"] == 0 for b in results["buckets"])
    assert abs(results["repeatability"]["value"]) < 1e-5  # another batch
    assert "gap.self_test" in [f["id"] for f in body["findings"]]


def test_mistakes_end_with_words(gap: Gap, smollm2: Path) -> None:
    for arguments, said in (
        ((smollm2, "gguf:model.gguf", "--codec", "fp8"), "gguf:model.gguf"),
        ((smollm2, smollm2, "--codec", "hadamrd"), "hadamrd"),
        ((smollm2, smollm2, "--codec", "fp8", "--phases", "x"), "'x' is no number"),
        ((smollm2, smollm2, "--codec", "fp8", "--mode", "sideways"), "sideways"),
        ((smollm2, "http://localhost:1"), "in process"),
    ):
        code, body = gap(*arguments)
        assert code == 2
        assert said in body["findings"][0]["title"]
        assert body["findings"][0]["id"].partition(".")[0] in ("gap", "kv")


def test_two_engines_are_told_apart_without_a_codec(
    gap: Gap, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    code, body = gap(
        f"hf:{tiny_llama}?dtype=float32", f"hf:{tiny_llama}?kv_cache_dtype=fp8",
        "--windows", 3, "--length", 24, "--fresh", 2, "--batch", 3,
    )  # fmt: skip
    assert code == 3
    results = body["results"]
    (engine,) = results["buckets"]
    parts = {p["name"]: p["kl"]["value"] for p in engine["parts"]}
    assert list(parts) == ["engine.rounding", "engine.cache"]
    assert sum(parts.values()) == pytest.approx(results["total_by_path"]["kl"]["value"], abs=1e-12)
    assert parts["engine.cache"] > parts["engine.rounding"] > 0
    assert (results["codec"], results["codec_gap"], results["base_mode"]) == ("", None, "decode")
    checks = {c["name"]: c for c in results["checks"]}
    assert set(checks) == {"engine.cache", "sum on fresh windows"}
    assert (
        checks["engine.cache"]["holds"]
        and abs(checks["engine.cache"]["difference"]["value"]) < 1e-6
    )
    assert "codec" not in body["subject"]


@pytest.mark.slow
def test_another_rope_is_a_difference_of_set_up(
    gap: Gap, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    other = tmp_path / "other"
    other.mkdir()
    for file in smollm2.iterdir():
        (other / file.name).symlink_to(file)
    config = json.loads((smollm2 / "config.json").read_text())
    (other / "config.json").unlink()
    changed = config | {
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    }
    (other / "config.json").write_text(json.dumps(changed))
    code, body = gap(
        f"hf:{smollm2}?dtype=float32", f"hf:{other}?dtype=float32", "--codec", "fp8",
        "--windows", 8, "--length", 48, "--fresh", 0, "--phases", 2, "--mode", "inforward",
    )  # fmt: skip
    assert code == 1
    (finding,) = [f for f in body["findings"] if f["id"] == "gap.setup_difference"]
    assert finding["severity"] == "error"
    assert list(finding["evidence"]["differences"]) == ["rope"]
    engine = body["results"]["buckets"][0]
    assert engine["separated_from_zero"] and engine["kl"]["share"] > 0.5


@pytest.mark.slow
def test_every_phase_between_transformers_and_vllm(
    gap: Gap, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, str(vllm_python()))
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path))
    code, body = gap(
        f"hf:{smollm2}?dtype=float32", f"vllm:{smollm2}?max_model_len=256&kv_cache_gib=0.3",
        "--codec", "hadamard(bits=4)", "--windows", 8, "--length", 48, "--fresh", 4, "--groups", 3,
    )  # fmt: skip
    assert code in (0, 1, 3)
    results = body["results"]
    engine, codec = results["buckets"][:2]
    assert [p["name"] for p in engine["parts"]] == ["engine.rounding", "engine.kernels"]
    whole = (
        sum(b["kl"]["value"] for b in results["buckets"]) + results["repeatability"]["kl"]["value"]
    )
    assert whole == pytest.approx(results["total"]["kl"]["value"], abs=1e-12)
    assert 0 < engine["kl"]["value"] < codec["kl"]["value"]
    assert results["setup_differences"] == {}
    for side in ("reference", "candidate"):
        assert len(results["layers"][side]["parts"]) == 3
        assert results["layers"][side]["additivity"]["value"] == pytest.approx(1, abs=0.5)
        assert results["noise"][side]["slope"]["value"] == pytest.approx(2, abs=0.6)
        assert abs(results["harness"][side]["identity"]["kl"]["value"]) < 1e-9
        assert {"inforward", "snapshot", "decode", "k_only", "v_only", "prefix_only"} <= set(
            results["harness"][side]
        )
    # The engines round differently, but give the codec the same keys and values to a few percent.
    assert all(abs(s["power_ratio"]["value"] - 1) < 0.1 for s in results["residual"]["streams"])
    actions = {r["action"]: r for r in results["recommendations"]}
    assert actions["one bit more everywhere"]["saving_kld"]["value"] > 0
    assert actions["one bit more everywhere"]["bytes_more"] > 0
