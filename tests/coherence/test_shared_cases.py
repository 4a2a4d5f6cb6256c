"""The labelled cases that lie beside the repository, where they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.coherence.grade_files import grade_file

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "outputs"
SIDECARS = sorted(CASES.glob("*.json"))
TOLERANCE = 64
"""Code points between the onset and the hint, which was written by eye."""


@pytest.mark.skipif(not SIDECARS, reason="the shared cases are not here")
@pytest.mark.parametrize("sidecar", SIDECARS, ids=lambda p: p.stem)
def test_case(sidecar: Path) -> None:
    expected = json.loads(sidecar.read_text(encoding="utf-8"))
    result = grade_file(str(sidecar.with_suffix(".txt"))).grade
    assert result.label == expected["label"], result
