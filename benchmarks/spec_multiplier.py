"""Does the model of the net multiplier predict what a real server does at another number of speculative tokens?

    python benchmarks/spec_multiplier.py

Reads results/spec_head_states.json (measured speeds of one server per draft and depth). For each draft the cost of a
draft token is measured at depth 3 against the run without speculation, as `assay spec --baseline` does; the multiplier
at depths 1 and 5 is then predicted from the acceptance rates of depth 3, and compared with the speed measured there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from assay.speculation.benefit import expected_tokens, extrapolated, measured_cost

HERE = Path(__file__).parent / "results"
DRAFTS = {
    "self": ("self1", "self", "self5"),
    "layers12": ("layers12_1", "layers12", "layers12_5"),
    "layers26": ("layers26_1", "layers26", "layers26_5"),
}


def rates(run: dict[str, Any]) -> list[float]:
    return [p["value"] for p in run["per_position"]]


def main() -> None:
    runs = json.loads((HERE / "spec_head_states.json").read_text())
    off = [runs[name]["tokens_per_s"] for name in ("off", "off_again") if name in runs]
    without = sum(off) / len(off)
    table = []
    for draft, names in DRAFTS.items():
        middle = runs[names[1]]
        cost = measured_cost(middle["tokens_per_step"], 3, middle["tokens_per_s"], without)
        for depth, name in zip((1, 3, 5), names, strict=True):
            if name not in runs or cost is None:
                continue
            predicted = expected_tokens(extrapolated(rates(middle), 5), depth) / (1 + cost.ratio * depth)
            measured = runs[name]["tokens_per_s"] / without
            table.append(
                {
                    "draft": draft, "depth": depth, "cost_ratio": cost.ratio, "predicted": predicted,
                    "measured": measured, "fitted": depth == 3, "error": predicted / measured - 1,
                }
            )  # fmt: skip
    (HERE / "spec_multiplier.json").write_text(
        json.dumps({"off_tokens_per_s": off, "rows": table}, indent=1) + "\n"
    )
    for row in table:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
