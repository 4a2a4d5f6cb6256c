"""Processes of `kv_vllm_overhead.py`: engines that answer in lines of JSON, and coders that are
fitted beside them.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PREFIX = '{"kv_vllm": '
"""How lines begin that are meant for the caller."""


def reason(text: str) -> str:
    """What a failed process says: its last error, and what follows where that is only a heading."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [
        i for i, line in enumerate(lines) if "Error" in line and "During handling" not in line
    ]
    if not errors:
        return lines[-1][-400:] if lines else "it said nothing"
    last = errors[-1]
    heading = next((i for i in errors if "validation error" in lines[i]), None)
    found = lines[last] if heading is None else " ".join(lines[heading : heading + 2])
    return found[:400]


class Child:
    """One engine's process."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job = job
        self.errors = ""
        self.timed_out = False

    def lines(self, limit_s: float, quiet_s: float) -> Iterator[dict[str, Any]]:
        """What it says, as it comes; it is ended when the time is up, or when it said nothing for
        so long.
        """
        last = time.monotonic()
        deadline = last + limit_s
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "kv_vllm_measured.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
            )
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("the process has no pipes")
            process.stdin.write(json.dumps(self.job))
            process.stdin.close()
            said: queue.Queue[str | None] = queue.Queue()
            reader = threading.Thread(target=_read, args=(process.stdout, said), daemon=True)
            reader.start()
            try:
                while True:
                    line = said.get(
                        timeout=max(0.1, min(deadline, last + quiet_s) - time.monotonic())
                    )
                    if line is None:
                        break
                    if line.startswith(PREFIX):
                        yield json.loads(line)["kv_vllm"]
                        last = time.monotonic()
            except queue.Empty:
                self.timed_out = True
            finally:
                process.kill()
                process.wait()
                errors.seek(0)
                self.errors = errors.read()

    def reason(self) -> str:
        """Why it ended early."""
        return "it gave no row in time" if self.timed_out else reason(self.errors)


def _read(stream: Any, said: queue.Queue[str | None]) -> None:
    for line in stream:
        said.put(line)
    said.put(None)


class Fits:
    """Coders that are fitted beside the engines, one process for each codec; started at once."""

    def __init__(self, model: str, codecs: Mapping[str, str], calibration: Path) -> None:
        """`codecs` by the name of a configuration; nothing is fitted without the calibration."""
        from kv_vllm_fitted import file_of

        self._paths: dict[str, Path] = {}
        self._runs: dict[str, subprocess.Popen[str]] = {}
        if not calibration.exists():
            return
        # No GPU: engines are timed on it meanwhile.
        alone = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        for name, codec in codecs.items():
            self._paths[name] = file_of(model, codec, calibration)
            if not self._paths[name].exists():
                command = [
                    sys.executable,
                    str(HERE / "kv_vllm_fitted.py"),
                    model,
                    codec,
                    str(calibration),
                ]
                self._runs[name] = subprocess.Popen(
                    command, env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
                )

    def path(self, name: str) -> str:
        """Where a configuration's coders are; nothing as long as they are not there."""
        found = self._paths.get(name)
        return str(found) if found is not None and found.exists() else ""

    def wait(self, name: str, limit_s: float) -> bool:
        """Whether the coders are there before the time is up."""
        if name in self._runs:
            try:
                self._runs[name].wait(timeout=max(0.1, limit_s))
            except subprocess.TimeoutExpired:
                return False
        return bool(self.path(name))

    def failure(self, name: str) -> str:
        """What a process said that has ended without coders."""
        run = self._runs[name]
        return "" if run.poll() is None or run.stderr is None else reason(run.stderr.read())

    def stop(self) -> None:
        """End what still runs."""
        for run in self._runs.values():
            if run.poll() is None:
                run.kill()
            run.wait()
