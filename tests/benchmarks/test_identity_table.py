"""docs/check.md shows the table that the kept results give."""

from __future__ import annotations

import json
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "check"


def test_the_page_holds_the_table_of_the_kept_results(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    identity = __import__("identity")
    results = json.loads((BENCHMARKS / "results" / "identity.json").read_text())
    shown = identity.table(results)
    assert f"<!-- identity -->\n{shown}\n<!-- end of identity -->" in identity.DOCS.read_text()
    assert shown.count("\n") > 10
    # The decisions are those of the bounds that stand beside them.
    for pair in results["pairs"]:
        tests = pair["tests"].values()
        far = any(t["lo"] > t["allowed"] for t in tests) or pair["tokenizer"].startswith("other")
        assert (pair["decision"] == "different") == far, pair
    sys.modules.pop("identity", None)
