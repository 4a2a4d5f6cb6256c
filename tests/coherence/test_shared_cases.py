"""The labelled cases that lie beside the repository, where they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.coherence.grade_files import grade_file

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "outputs"
SIDECARS = sorted(CASES.glob("*.json"))
MISSED = {"deg_mixed_register_salad": "good sentences alternate with noise shorter than a window"}


@pytest.mark.skipif(not SIDECARS, reason="the shared cases are not here")
@pytest.mark.parametrize("sidecar", SIDECARS, ids=lambda p: p.stem)
def test_case(sidecar: Path, request: pytest.FixtureRequest) -> None:
    if sidecar.stem in MISSED:
        request.applymarker(pytest.mark.xfail(reason=MISSED[sidecar.stem], strict=True))
    expected = json.loads(sidecar.read_text(encoding="utf-8"))
    result = grade_file(str(sidecar.with_suffix(".txt"))).grade
    assert result.label == expected["label"], result
