"""What the tests of `assay kv` share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from assay.cli.main import invoke

Kv = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def kv(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kv:
    """`assay kv …` with a cache of its own: exit code and the JSON report."""
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = invoke(["kv", *map(str, arguments), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run
