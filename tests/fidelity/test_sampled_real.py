"""Text that a real model wrote: long enough, the same from the same seed, another from another."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.fidelity.text.own import generate_text

pytestmark = pytest.mark.engine


def test_text_of_smollm2(smollm2: Path) -> None:
    from assay.engines.hf.engine import HfEngine

    with HfEngine.load(f"hf:{smollm2}?dtype=float32") as engine:
        first, again, other = (
            generate_text(engine, start=(0,), tokens=40, per_text=20, seed=seed)
            for seed in (0, 0, 2)
        )
        # Ids that become text and ids again may merge, so a few can be missing.
        assert 30 <= len(engine.tokenize(first.text)) <= 60
    assert first == again
    assert first.sha256 != other.sha256
    assert first.text.count("\n\n") >= 1
