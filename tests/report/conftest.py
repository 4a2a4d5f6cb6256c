"""Fixtures of the report tests: the environment of a terminal must not leak into them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def neutral_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
