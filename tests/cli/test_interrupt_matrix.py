"""A signal in each stage of the verbs that score: its exit code, one report, no process left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WINDOWS = ("--windows", "400", "--length", "512", "--batch", "4")
# A verb's words before and after the model, and what standard error says at the stage.
STAGES = {
    "compare, opening": (("compare",), ("INT8", *WINDOWS), r"."),
    "compare, reference": (("compare",), ("INT8", *WINDOWS), r"scoring"),
    "reference": (("reference",), ("--out", "OUT", *WINDOWS), r"."),
    "kv eval, exact cache": (("kv", "eval"), ("--codec", "fp8", *WINDOWS), "scoring the exact"),
    "kv sweep": (("kv", "sweep"), ("--codec", "fp8", "--windows", "90", *WINDOWS[2:]), "scoring"),
    "kv diagnose": (("kv", "diagnose"), ("--codec", "fp8", "--windows", "64"), r"."),
    "gap": (("gap",), ("INT8", "--codec", "fp8", "--phases", "2", *WINDOWS[:4]), r"."),
}
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def in_session(leader: int) -> list[int]:
    """Processes of a session that still run."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("number", range(len(STAGES)), ids=list(STAGES))
def test_every_stage_ends_with_one_report(number: int, tiny_llama: Path, tmp_path: Path) -> None:
    before, after, shown = list(STAGES.values())[number]
    sign = SIGNALS[number % len(SIGNALS)]
    places = {"INT8": f"hf:{tiny_llama}?weights=int(bits=8)", "OUT": str(tmp_path / "out")}
    words = [*before, str(tiny_llama), *(places.get(word, word) for word in after)]
    error = tmp_path / "error"
    with (tmp_path / "report").open("w+") as out, error.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "assay", *words, "--json"],
            env={**os.environ, "ASSAY_CACHE": str(tmp_path / "cache")},
            stdout=out,
            stderr=said,
            start_new_session=True,
        )
        try:
            until = time.monotonic() + 240
            while not re.search(shown, error.read_text()):
                assert process.poll() is None and time.monotonic() < until, error.read_text()
                time.sleep(0.02)
            time.sleep(2.0)
            # As `timeout` does it: the process, and then its group.
            process.send_signal(sign)
            os.killpg(process.pid, sign)
            code = process.wait(120)
        finally:
            process.kill()
        out.seek(0)
        report: dict[str, Any] = json.loads(out.read())
    assert code == report["exit_code"] == 128 + sign, error.read_text()
    assert report["verdict"] == "inconclusive"
    assert any(f["id"].endswith(".interrupted") for f in report["findings"])
    assert "Traceback" not in error.read_text()
    time.sleep(0.5)
    assert in_session(process.pid) == []
