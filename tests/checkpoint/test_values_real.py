"""The value scan on real models: nothing to say about healthy ones, and the norm convention both
ways.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.values.duplicates import check_duplicates
from assay.checkpoint.values.judgement import judge_values
from assay.checkpoint.values.norms import NEGATIVE, POSITIVE, check_norms
from assay.checkpoint.values.scan import scan
from assay.checkpoint.values.statistics import Statistics

pytestmark = pytest.mark.engine


def statistics(folder: Path, only: str = "") -> list[Statistics]:
    opened = open_checkpoint(str(folder))
    assert opened.layout is not None
    files = opened.layout.files
    found, problems = scan(
        (t, files[t.file].real) for n, t in opened.checkpoint.tensors.items() if only in n
    )
    assert problems == []
    return found


def shifted(norms: list[Statistics], by: float) -> list[Statistics]:
    return [replace(s, sample=s.sample + by, all_zero=False, constant=False) for s in norms]


def test_healthy_models_raise_nothing(smollm2: Path, gemma3: Path) -> None:
    for folder, kind in ((smollm2, "llama"), (gemma3, "gemma3_text")):
        seen = statistics(folder)
        assert list(judge_values(seen)) == []
        assert list(check_norms(seen, kind)) == []
        assert list(check_duplicates(seen, lambda one, two: True)) == []


def test_the_norm_convention_shows_both_ways(smollm2: Path, gemma3: Path) -> None:
    plain, centred = statistics(smollm2, "norm"), statistics(gemma3, "norm")
    for norms, kind, by in ((plain, "llama", -1.0), (centred, "gemma3_text", 1.0)):
        (finding,) = check_norms(shifted(norms, by), kind)
        assert (finding.id, finding.severity.value) == ("checkpoint.norm_convention", "error")
        assert list(check_norms(norms, kind)) == []


def test_the_shares_that_the_rule_rests_on(smollm2: Path, gemma3: Path) -> None:
    def share(norms: list[Statistics], low: bool) -> float:
        hits = [s.negative_share < POSITIVE if low else s.negative_share > NEGATIVE for s in norms]
        return sum(hits) / len(hits)

    plain, centred = statistics(smollm2, "norm"), statistics(gemma3, "norm")
    assert share(plain, low=False) < 0.05
    assert share(shifted(plain, -1), low=False) > 0.95
    assert share(centred, low=True) < 0.5
    assert share(shifted(centred, 1), low=True) > 0.95
    print(
        share(plain, False),
        share(shifted(plain, -1), False),
        share(centred, True),
        share(shifted(centred, 1), True),
    )
