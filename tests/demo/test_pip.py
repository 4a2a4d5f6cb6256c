"""What pip says becomes a few lines with sizes, and a failure says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.demo.pip import _Told, run_pip, telling
from assay.errors import AssayError
from assay.progress import NO_PROGRESS

SAID = """\
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp311-cp311-manylinux.whl (190.4 MB)
     ━━━━━━━━━━━━━━━━━━━━ 190.4/190.4 MB 40.1 MB/s eta 0:00:00
  Downloading torch-2.13.0-cp311-cp311-manylinux.whl.metadata (30 kB)
  Using cached scipy-1.17.1-cp311-cp311-manylinux.whl (35.9 MB)
Installing collected packages: sympy, scipy, torch
"""


def test_large_downloads_and_the_installation_are_told() -> None:
    lines: list[str] = []
    told = _Told(lines.append)
    for line in SAID.splitlines():
        told.line(line)
    assert [line.strip() for line in lines] == [
        "downloaded: torch-2.13.0 (190 MB)",
        "downloaded: scipy-1.17.1 (36 MB)",
        "installing 3 packages from 226 MB of downloads",
    ]


def test_a_file_that_is_on_the_disk_has_its_size(tmp_path: Path) -> None:
    wheel, lines = tmp_path / "big-1.0-py3-none-any.whl", list[str]()
    with wheel.open("wb") as file:
        file.truncate(30_000_000)
    _Told(lines.append).line(f"Processing {wheel}")
    _Told(lines.append).line(f"Processing {tmp_path}/gone-1.0.whl")
    assert [line.strip() for line in lines] == ["read: big-1.0 (30 MB)"]


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "make room"),
        ("WARNING: Retrying … NewConnectionError('…')\\nERROR: No matching distribution", "index"),
        ("ERROR: Could not find a version", "PIP_EXTRA_INDEX_URL"),
    ],
)
def test_a_failure_says_what_to_do(tmp_path: Path, said: str, remedy: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%b" "{said}\\n"\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(AssayError, match="pip install failed: ") as caught:
        run_pip(["install", "x"], log_name="x.log", python=python, tell=telling(NO_PROGRESS))
    assert remedy in caught.value.remedy
    assert said.rpartition("ERROR: ")[2] in caught.value.message
