"""The examples in the docstrings of the grading modules are true."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize("name", ["grading", "grade_files"])
def test_examples(name: str) -> None:
    result = doctest.testmod(import_module(f"assay.coherence.{name}"))
    assert result.attempted > 0 and result.failed == 0
