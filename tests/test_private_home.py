"""No test reads the user's home or, but for engines, the user's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import private_home
from assay.runs import cache_path


def test_the_suite_has_a_home_and_a_cache_of_its_own() -> None:
    assert str(Path.home()) != os.environ[private_home.HOME]
    assert str(cache_path(".")) != os.environ[private_home.CACHE]
    assert not cache_path(".").exists()


BODIES = {
    "passed": (
        "Path.home().joinpath('a').write_text('x')",
        "subprocess.run('test ! -e ~/secret', shell=True, check=True)",
        "assert not Path(os.environ['ASSAY_CACHE']).exists()",
    ),
    "failed": (
        "open(os.environ['USERS'] + '/secret').read()",
        "list(Path(os.environ['USERS']).iterdir())",
        "Path(os.environ['USERS'] + '/cache/x').mkdir()",
    ),
}


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_test_that_opens_a_file_of_the_users_fails(tmp_path: Path, workers: str) -> None:
    home, suite = tmp_path / "home", tmp_path / "suite"
    (home / "cache").mkdir(parents=True)
    (home / "secret").write_text("x")
    suite.mkdir()
    (suite / "conftest.py").write_text("pytest_plugins = ['private_home']\n")
    tests = "import os, subprocess\nfrom pathlib import Path\n"
    for outcome, bodies in BODIES.items():
        for number, body in enumerate(bodies):
            tests += f"def test_{outcome}_{number}():\n    {body}\n"
    (suite / "test_it.py").write_text(tests)
    own = {name: value for name, value in os.environ.items() if not name.startswith("ASSAY_")}
    settings = {"HOME": str(home), "USERS": str(home), "ASSAY_CACHE": str(home / "cache")}
    settings |= {"TMPDIR": str(suite), "PYTHONPATH": str(Path(private_home.__file__).parent)}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-rA",
            "-n",
            workers,
            "-p",
            "no:cacheprovider",
            str(suite),
        ],
        cwd=suite,
        env={**own, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 1, done.stdout
    for number in range(3):
        assert f"ERROR test_it.py::test_failed_{number} - Failed: the test opened" in done.stdout
        assert f"ERROR test_it.py::test_passed_{number}" not in done.stdout
        assert f"PASSED test_it.py::test_passed_{number}" in done.stdout
