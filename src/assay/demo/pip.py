"""pip for the demo: its output goes to a log, its large downloads are told, a failure is
one line.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from assay.errors import AssayError
from assay.progress import Progress
from assay.runs import cache_dir

_FETCHED = re.compile(r"(?:Downloading|Using cached) (\S+) \(([\d.]+) ([kMG]?)B\)")
_ON_DISK = re.compile(r"Processing (/\S+)")
_UNIT = {"": 1e-6, "k": 1e-3, "M": 1.0, "G": 1e3}
_TOLD_MB = 20.0
"""A smaller file is not worth a line."""


def telling(progress: Progress) -> Callable[[str], None]:
    """A function that prints one line beside the progress."""

    def tell(line: str) -> None:
        with progress(line, 0):
            pass

    return tell


def run_pip(
    arguments: Sequence[str],
    *,
    log_name: str,
    python: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """Run `python -m pip ARGUMENTS`; the user's own pip settings (PIP_EXTRA_INDEX_URL and others)
    apply.

    Args:
        arguments: What pip is asked for.
        log_name: File in the cache's folder `logs` that takes pip's output.
        python: The interpreter whose environment is meant; by default the running one.
        tell: Gets a line for each large download, and one before packages are installed.

    Raises:
        AssayError: pip failed, or its log cannot be written.
    """
    command = [str(python or sys.executable), "-m", "pip", *arguments]
    log = cache_dir("logs") / log_name
    told = _Told(tell)
    try:
        with log.open("w", encoding="utf-8") as file:

            def line(text: str) -> None:
                file.write(text)
                told.line(text)

            code = _run(command, line)
    except OSError as error:
        raise AssayError(
            f"cannot run pip with its log in {log}: {error.strerror}",
            finding_id="server.cache",
            remedy="make room, or name a folder that can be written to by ASSAY_CACHE",
        ) from error
    if code != 0:
        reason, remedy = _reason(log)
        raise AssayError(
            f"pip {arguments[0]} failed: {reason}",
            finding_id="server.install_failed",
            remedy=remedy,
        )


def _run(command: Sequence[str], line: Callable[[str], object]) -> int:
    """Exit code of a program whose lines are handed over; an interrupt ends it."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                line(text)
        except BaseException:
            process.kill()
            raise
    return process.returncode


class _Told:
    """What pip's lines say of the work, in megabytes."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._megabytes = 0.0

    def line(self, text: str) -> None:
        """Tell what one line of pip's says, if it is worth a line."""
        if found := _FETCHED.search(text):
            self._file(found[1], float(found[2]) * _UNIT[found[3]], "downloaded")
        elif found := _ON_DISK.search(text):
            path = Path(found[1])
            self._file(path.name, path.stat().st_size / 1e6 if path.is_file() else 0.0, "read")
        elif text.startswith("Installing collected packages:"):
            count = text.count(",") + 1
            packages = "a package" if count == 1 else f"{count} packages"
            self._tell(f"  installing {packages} from {self._megabytes:,.0f} MB of downloads")

    def _file(self, name: str, megabytes: float, done: str) -> None:
        self._megabytes += megabytes
        if megabytes >= _TOLD_MB:
            self._tell(f"  {done}: {'-'.join(name.split('-')[:2])} ({megabytes:,.0f} MB)")


def _reason(log: Path) -> tuple[str, str]:
    """The last line in which pip says what went wrong, and what to do about it."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    reason = errors[-1].removeprefix("ERROR:").strip() if errors else "it said nothing"
    if "No space left on device" in text:
        return reason, "make room, or name a folder with room by ASSAY_CACHE (TMPDIR is pip's own)"
    if "NewConnectionError" in text or "Name or service not known" in text:
        return reason, (
            "the package index is out of reach: connect once, or copy the cache folder of a machine"
            " that has it and name it by ASSAY_CACHE"
        )
    return reason, f"read {log}; a package index of your own is given by PIP_EXTRA_INDEX_URL"
