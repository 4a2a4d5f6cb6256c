"""The doctor asked about the small server of `small_server.py`, and what processes it leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import assay
from assay.verdict import Report

SERVER = (
    f"{sys.executable} {Path(__file__).with_name('small_server.py')} --port {{port}} {{settings}}"
)


def ask(*words: str, **options: Any) -> Report:
    """A short examination that looks for faults of every start."""
    short = {"seconds": 10.0, "budget": 4.0, "fault_rate": 1.0, "ladder": False, "tools": False}
    return assay.doctor(list(words), **{"command_template": SERVER, **short, **options})


def marked(mark: str) -> list[int]:
    """Processes whose command line holds the mark."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found
