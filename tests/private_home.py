"""A home and a cache of the suite's own: a test that opens a file of the user's fails.

A plug-in of pytest. The processes that tests start see the suite's home too. Tests marked `engine`
work with the models of the real cache, which the fixtures build there once; each other test begins
with an empty cache.
"""

from __future__ import annotations

import os
import pwd
import site
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from platformdirs import user_cache_dir

HOME, CACHE = "ASSAY_TESTS_USERS_HOME", "ASSAY_TESTS_USERS_CACHE"
"""Where a worker of xdist finds the user's own folders, since it starts in the suite's."""
EVENTS = frozenset(
    {"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "os.rmdir"}
)


class Guard:
    """What tests open, told apart by whose it is."""

    def __init__(self) -> None:
        home = os.environ.setdefault(HOME, os.environ.get("HOME") or str(Path.home()))
        cache = os.environ.get("ASSAY_CACHE") or user_cache_dir("assay")
        self.cache = os.environ.setdefault(CACHE, str(Path(cache).absolute()))
        self._temporary = tempfile.TemporaryDirectory(prefix="assay-tests-")
        self.folder = Path(self._temporary.name)
        (self.folder / "home").mkdir()
        self._users = tuple(
            f"{path}/" for path in {home, pwd.getpwuid(os.getuid()).pw_dir} if path != "/"
        )
        # The programs, the checkout and temporary folders may be in the user's home.
        own = {*sys.path, sys.prefix, sys.base_prefix, *site.getsitepackages()}
        own |= {str(Path(__file__).parents[1]), tempfile.gettempdir(), os.environ.get("TMPDIR", "")}
        own.add(os.environ.get("PYENV_ROOT") or f"{home}/.pyenv")
        self._allowed = tuple(f"{Path(path).absolute()}/" for path in own if path)
        self._test: pytest.Item | None = None
        self._count = 0
        self.opened: list[str] = []

    def begin(self, item: pytest.Item) -> None:
        """Give a test its cache."""
        self._count += 1
        self._test, self.opened = item, []
        engine = item.get_closest_marker("engine")
        own = self.folder / f"cache-{self._count}"
        os.environ["ASSAY_CACHE"] = self.cache if engine else str(own)
        os.environ["HOME"] = str(self.folder / "home")

    def end(self) -> None:
        """Watch no more."""
        self._test = None

    def close(self) -> None:
        """Remove the suite's home."""
        self.end()
        self._temporary.cleanup()

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note what is the user's; called for every event of the interpreter."""
        if event not in EVENTS or self._test is None:
            return
        if not arguments or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        path = f"{os.path.abspath(os.fsdecode(arguments[0]))}/"  # noqa: PTH100 (it opens nothing)
        in_cache = path.startswith(f"{self.cache}/")
        users = in_cache or path.startswith(self._users)
        if in_cache and self._test.get_closest_marker("engine"):
            return
        if users and not path.startswith(self._allowed):
            self.opened.append(f"{event} {path[:-1]}")


_guard = Guard()


def pytest_configure() -> None:
    """Move the suite into its own home before anything asks for it."""
    for name in [n for n in os.environ if n.startswith("XDG_")]:
        del os.environ[name]
    os.environ["HOME"] = str(_guard.folder / "home")
    os.environ["ASSAY_CACHE"] = _guard.cache
    sys.addaudithook(_guard.audit)


def pytest_unconfigure() -> None:
    _guard.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _guard.begin(item)
    try:
        return (yield)
    finally:
        _guard.end()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    if opened := _guard.opened:
        pytest.fail(f"the test opened files of the user's: {', '.join(opened[:5])}", pytrace=False)
