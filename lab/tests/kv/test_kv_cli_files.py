"""`assay kv encode` and `decode` from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from assay.cli.main import invoke
from assay_lab.kv.kktv import read_kktv, write_kktv


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = invoke(["kv", *map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "k.kktv"
    write_kktv(path, np.random.default_rng(0).standard_normal((90, 32)).astype(np.float32))
    return path


def test_there_and_back(kv: Any, rows: Path, tmp_path: Path) -> None:
    code, body = kv(
        "encode", rows, "--codec", "hadamard(bits=6)", "--out", tmp_path / "s", "--heads", 3
    )
    assert code == 0
    assert body["results"]["shape"] == [3, 30, 32]
    assert body["results"]["bytes"]["stored"] == (tmp_path / "s").stat().st_size
    assert body["results"]["relative_squared_error"] < 0.005
    code, body = kv("decode", tmp_path / "s", "--out", tmp_path / "back.kktv")
    assert code == 0
    difference = read_kktv(tmp_path / "back.kktv") - read_kktv(rows)
    assert (difference**2).mean() < 0.005
    code, _ = kv("decode", tmp_path / "s", "--out", tmp_path / "back.safetensors")
    code, body = kv(
        "encode", tmp_path / "back.safetensors", "--codec", "identity", "--out", tmp_path / "t"
    )
    assert body["results"]["shape"] == [3, 30, 32]
    assert body["results"]["relative_squared_error"] == 0


def test_an_empty_tensor_is_refused(kv: Any, tmp_path: Path) -> None:
    write_kktv(tmp_path / "none.kktv", np.zeros((0, 64), np.float32))
    code, body = kv(
        "encode", tmp_path / "none.kktv", "--codec", "hadamard", "--out", tmp_path / "s"
    )
    assert code == 2 and "no values" in body["findings"][0]["title"]
    assert not (tmp_path / "s").exists()


def test_huge_values_are_coded_or_refused(kv: Any, tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32)
    values[7, 3] = 1e30
    write_kktv(tmp_path / "huge.kktv", values)
    for codec in ("hadamard(bits=4)", "int(bits=4, residual=0)", "lattice"):
        code, body = kv("encode", tmp_path / "huge.kktv", "--codec", codec, "--out", tmp_path / "s")
        assert code == 0 and body["results"]["relative_squared_error"] < 0.1
        kv("decode", tmp_path / "s", "--out", tmp_path / "back.kktv")
        assert np.isfinite(read_kktv(tmp_path / "back.kktv")).all()
    values[0] = 3e38
    write_kktv(tmp_path / "huge.kktv", values)
    for codec in ("hadamard(bits=4)", "kakeya"):
        code, body = kv(
            "encode", tmp_path / "huge.kktv", "--codec", codec, "--out", tmp_path / "none"
        )
        assert code == 2 and "overflows" in body["findings"][0]["title"]
    assert not (tmp_path / "none").exists()


def test_mistakes_end_with_words(kv: Any, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "junk").write_bytes(b"not a tensor at all, but some words")
    stream = tmp_path / "s"
    kv("encode", rows, "--codec", "fp8", "--out", stream)
    cut = tmp_path / "cut"
    cut.write_bytes(stream.read_bytes()[:-3])
    out = tmp_path / "o"
    for arguments, said in (
        (("encode", tmp_path / "none", "--codec", "fp8", "--out", out), "none"),
        (("encode", tmp_path / "junk", "--codec", "fp8", "--out", out), "KKTV"),
        (("encode", rows, "--codec", "fp8", "--out", out, "--heads", 7), "7 heads"),
        (("encode", rows, "--codec", "pca", "--out", out), "calibration"),
        (("encode", rows, "--codec", "fp8", "--out", out, "--stream", "q"), "stream"),
        (
            ("encode", rows, "--codec", "pca(predict=k)", "--out", out, "--stream", "v"),
            "one stream",
        ),
        (("decode", cut, "--out", out), "damaged"),
        (("decode", tmp_path / "junk", "--out", out), "no KV stream"),
        (("decode", tmp_path / "none", "--out", out), "none"),
    ):
        code, body = kv(*arguments)
        assert code == 2, arguments
        assert said in body["findings"][0]["title"]
    assert not out.exists()


def test_every_codec_and_wrapper_is_listed_with_its_parameters(kv: Any) -> None:
    code, body = kv("list")
    assert code == 0
    names = {e["name"]: e["parameters"] for e in body["results"]["codecs"]}
    assert set(names) == {
        "identity",
        "bf16",
        "fp8",
        "int",
        "hadamard",
        "lattice",
        "kakeya",
        "pca",
        "noise",
    }
    assert names["hadamard"]["bits"] == 4
    assert {"prerope", "sinks", "recent", "mean", "qprecond"} <= {
        e["name"] for e in body["results"]["wrappers"]
    }
