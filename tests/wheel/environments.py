"""Clean virtual environments with what the sdists build, for one Python and some extras each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from private_home import HOME

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
PINNED = "torch==2.13.0"
"""A looser pin may download a CUDA build of several GB."""


def interpreter(version: str) -> str:
    """A Python of that version on this machine, or the test is skipped."""
    users = Path(os.environ.get("PYENV_ROOT") or Path(os.environ[HOME]) / ".pyenv")
    own = [sys.executable] if sys.version_info[:2] == tuple(map(int, version.split("."))) else []
    found = sorted(users.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    for python in (*own, shutil.which(f"python{version}"), *map(str, found)):
        asked = [python, "-c", "import ensurepip, ssl, sys; print(sys.base_prefix)"]
        if python and subprocess.run(asked, capture_output=True, check=False).returncode == 0:
            return python
    pytest.skip(f"this machine has no Python {version}")


def built(folder: Path) -> Path:
    """A folder with the sdists of both distributions, and the wheels that they build."""
    wheels = folder / "dist"
    for part in (ROOT, ROOT / "lab"):
        _hatch(part, "sdist", wheels)
    for sdist in sorted(wheels.glob("*.tar.gz")):
        with tarfile.open(sdist) as tar:
            tar.extractall(folder, filter="data")
        _hatch(folder / sdist.name.removesuffix(".tar.gz"), "wheel", wheels)
    return wheels


def _hatch(folder: Path, target: str, out: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a folder and a cache in which its programs run."""

    folder: Path
    work: Path
    cache: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def run(self, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run a program; nothing of the checkout or of the suite's Python is in its way."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "ASSAY_TESTS"))}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            command,
            cwd=self.work,
            env={**kept, "PATH": path, "ASSAY_CACHE": str(self.cache), **settings},
            capture_output=True,
            text=True,
            check=False,
            timeout=580,
        )

    def assay(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.folder / "bin" / "assay"), *arguments)

    def report(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Exit code and JSON of a command."""
        done = self.assay(*arguments, "--json")
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def install(self, *packages: str) -> None:
        done = self.run(self.python, "-m", "pip", "install", "-qq", *packages)
        assert done.returncode == 0, done.stderr

    def megabytes(self) -> int:
        files = (self.folder / "lib").rglob("*")
        return round(sum(f.stat().st_size for f in files if f.is_file()) / 1e6)


def environment(
    folder: Path, version: str, dist: Path, *extras: str, cache: Path | None = None
) -> Environment:
    """A new environment with assay and extras, from the wheels in `dist`."""
    python = interpreter(version)
    work = folder / "work"
    work.mkdir(parents=True)
    found = Environment(folder / "venv", work, cache or folder / "cache")
    subprocess.run([python, "-m", "venv", str(found.folder)], check=True, capture_output=True)
    wheel = next(dist.glob("llm_assay-*.whl")).name.split("-")[1]
    name = f"llm-assay[{','.join(extras)}]" if extras else "llm-assay"
    torch = [PINNED] if {*extras} & {"hf", "gguf", "kv", "lab", "ray", "demo"} else []
    found.install(*torch, "--find-links", str(dist), f"{name}=={wheel}")
    return found
