"""One head beside changed targets: rows that must differ do, rows that must not do not, and the
target comes back unchanged.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.errors import UsageError
from assay_lab.heads.experiment import run_try
from assay_lab.heads.head_states import HEADS
from assay_lab.heads.targets import CACHES, CALIBRATED, WEIGHTS, changed
from assay_lab.options import HeadTryPlan

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(target).eval()


@pytest.mark.parametrize("name", [*WEIGHTS, *CALIBRATED, *(f"bf16+kv-{c}" for c in CACHES)])
def test_a_variant_changes_the_target_for_its_time_only(model: Any, name: str) -> None:
    ids = torch.arange(40)[None]
    with torch.no_grad():
        before = model(ids).logits
        with changed(model, name, lambda: [list(range(i, i + 40)) for i in range(8)]):
            during = model(ids).logits
        after = model(ids).logits
    assert torch.equal(before, after)
    assert 0 < (during - before).abs().max() < before.abs().max()


def test_an_unknown_variant_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="int5"), changed(model, "int5"):
        pass


def test_the_experiment_tells_working_heads_from_dead_ones(
    target: Path, trained: Any, tmp_path: Path
) -> None:
    folder, _ = trained
    given = {
        "model": str(target),
        "head": folder,
        "out": tmp_path / "rows.json",
        "targets": ["bf16", "int8"],
        "prompts": 200,
        "texts": 13,
        "tokens": 40,
        "depth": 3,
        "temperatures": "0",
        "batch_tokens": 1024,
    }
    report = run_try(HeadTryPlan.of(given))
    rows = report.results["rows"]
    first = {state: rows[f"bf16|{state}|0"]["positions"][0]["value"] for state in HEADS}
    assert first["bf16"] > 0.4 and abs(first["int8"] - first["bf16"]) < 0.1
    assert (
        max(first[s] for s in ("missing", "zeros", "embedding-swapped")) < first["bf16"] - 0.15
    ), first
    assert rows["bf16|bf16|0"]["tv"][0] == 0 < rows["int8|bf16|0"]["tv"][0] < 0.2
    assert "int8|zeros|0" not in rows  # dead states are measured beside two targets only
    kept = json.loads((tmp_path / "rows.json").read_text())
    again = run_try(HeadTryPlan.of(given))
    assert again.results["rows"] == rows and len(kept["rows"]) == len(rows)
