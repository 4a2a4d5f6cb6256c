from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import invoke
from checkpoint.asking import Ask
from checkpoint.loopback_hub import LoopbackHub
from checkpoint_samples import llama


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole checkpoint of two shards."""
    llama(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """`assay verify … --json` in this process: (exit code, report)."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "assay-cache"))

    def ask(*words: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = invoke(["verify", *map(str, words), "--json"])
        out = capsys.readouterr().out
        report: dict[str, Any] = json.loads(out)
        assert report["exit_code"] == code
        return code, report

    return ask


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """A Hub on loopback that HF_ENDPOINT points to, with short limits."""
    constants = pytest.importorskip("huggingface_hub.constants")
    from assay.checkpoint import hub_requests as limits

    with LoopbackHub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name in (
            "http_proxy",
            "https_proxy",
            "all_proxy",
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "ALL_PROXY",
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(limits, "REQUEST_S", 5.0)
        monkeypatch.setattr(limits, "PAUSE_S", 0.01)
        yield running
