"""A folder of kept results is one run's at a time, within a process and between processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.runs import Claims

HOLD = "import sys; from pathlib import Path; from assay.runs import Claims; Claims().folder(Path(sys.argv[1])); print(1, flush=True); input()"


@contextmanager
def another_process(folder: Path) -> Iterator[None]:
    """A process that holds `folder`."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        try:
            yield
        finally:
            process.kill()


def test_a_free_folder_is_given_as_it_is_and_stays(tmp_path: Path) -> None:
    wanted = tmp_path / "deep" / "run"
    with Claims() as claims:
        assert claims.folder(wanted) == wanted
        assert claims.folder(wanted) == wanted  # of the same run again
        (wanted / "kept").touch()
    assert (wanted / "kept").exists()


def test_a_folder_that_another_process_has_is_left_alone(tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    with another_process(wanted), Claims() as claims:
        own = claims.folder(wanted)
        assert own != wanted and own.parent == wanted.parent and own.is_dir()
        assert claims.folder(wanted) == own
        claims.release()
        assert not own.exists() and wanted.exists()
    with Claims() as claims:  # that process was killed
        assert claims.folder(wanted) == wanted


def test_a_folder_may_be_deleted_by_its_owner_and_claimed_by_the_next(tmp_path: Path) -> None:
    wanted = tmp_path / "run"
    first, second, third = Claims(), Claims(), Claims()
    assert first.folder(wanted) == wanted
    shutil.rmtree(wanted)
    assert second.folder(wanted) == wanted  # a new one of that name, which the first has no part in
    first.release()
    assert third.folder(wanted) != wanted
    second.release()
    third.release()
    assert wanted.is_dir() and list(tmp_path.iterdir()) == [wanted]
