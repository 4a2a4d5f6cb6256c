"""Run pip for the demo: its output goes to a log, a failure becomes one clear line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from assay.cache import cache_dir
from assay.errors import AssayError


def run_pip(arguments: Sequence[str], *, log_name: str, python: Path | None = None) -> None:
    """Run `python -m pip ARGUMENTS`; the user's own pip settings (PIP_EXTRA_INDEX_URL and others) apply.

    `python` is the interpreter whose environment is meant, by default the running one.
    """
    command = [str(python or sys.executable), "-m", "pip", *arguments]
    log = cache_dir("logs") / log_name
    with log.open("w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise AssayError(
            f"pip {arguments[0]} failed: {_reason(log)}",
            finding_id="server.install_failed",
            remedy=f"read {log}; a package index of your own is given by PIP_EXTRA_INDEX_URL",
        )


def _reason(log: Path) -> str:
    """The last line in which pip says what went wrong."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line]
    return errors[-1].removeprefix("ERROR:").strip() if errors else "it said nothing"
