"""A cache that cannot be written, and one that an older version or another program left."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from assay import demo
from assay.demo import once, vllm_environment
from assay.errors import AssayError
from assay.runs import cache_dir


def make(folder: Path) -> None:
    (folder / "file").write_text("made")


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_dir("locks")

    def refuse(*given: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(once.tempfile, "mkdtemp", refuse)
    with pytest.raises(AssayError, match=r"cannot be written: Permission denied") as caught:
        demo.build_once("models/x", make)
    assert "ASSAY_CACHE" in caught.value.remedy
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(AssayError, match=r"locks cannot be written"):
        demo.build_once("models/x", make)


def test_no_space_left_is_told_in_any_library_s_error() -> None:
    def full(folder: Path) -> None:
        make(folder)
        raise RuntimeError(f"I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")

    with pytest.raises(AssayError, match="no space left") as caught:
        demo.build_once("models/x", full)
    assert "make room" in caught.value.remedy
    assert list(cache_dir("models").iterdir()) == []


def test_a_folder_that_another_program_left_empty_is_filled() -> None:
    cache_dir("models/x")
    assert (demo.build_once("models/x", make) / "file").read_text() == "made"


def test_an_environment_whose_python_is_gone_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_dir(f"vllm-{demo.VERSION}")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(folder / "removed")
    for stamp in (".ready", ".codecs"):
        (folder / stamp).touch()
    asked: list[str] = []
    monkeypatch.setattr(
        vllm_environment, "run_pip", lambda words, **options: asked.append(words[0])
    )
    python = demo.vllm_python()
    assert asked == ["install", "uninstall", "install"]
    assert python.exists()
    assert demo.vllm_python() == python and len(asked) == 3
