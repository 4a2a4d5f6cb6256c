"""Does the model of the net multiplier predict what a real server does at another number of
speculative tokens?

    python benchmarks/spec/spec_multiplier.py

Reads results/spec_step_times.json. For each draft the cost of a draft token is measured at N = 3
against the server without speculation, as `assay spec --baseline` does; the multiplier at N = 1 and
5 is then predicted from the acceptance at N = 3 and held against the speed measured there. Ratios
are taken within a round; intervals are t over rounds of their logarithms. A line through the step
times of all depths shows whether 1 + c N is the right shape.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from assay.speculation.benefit import measured_cost
from assay.speculation.decay import expected_tokens, extrapolated
from assay.speculation.measured import Measured

HERE = Path(__file__).parent / "results"
DEPTHS = (1, 3, 5)
FITTED = 3
ONE_RUN_EACH = {
    "self": ("self1", "self", "self5"),
    "layers:12": ("layers12_1", "layers12", "layers12_5"),
    "layers:26": ("layers26_1", "layers26", "layers26_5"),
}


def over_rounds(values: list[float]) -> dict[str, float]:
    """Geometric mean and its 95 % interval."""
    logs = np.log(values)
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    return {
        "value": float(np.exp(logs.mean())), "lo": float(np.exp(logs.mean() - half)),
        "hi": float(np.exp(logs.mean() + half)), "rounds": len(values),
    }  # fmt: skip


def ratios(rounds: list[dict[str, dict[str, float]]], depth: int, unit: str) -> list[float]:
    """Seconds per `unit` at `depth` over seconds per `unit` without speculation, round by round."""
    return [
        (r[str(depth)]["seconds"] / r[str(depth)][unit]) / (r["0"]["seconds"] / r["0"][unit])
        for r in rounds
    ]


def describe(draft: dict[str, Any]) -> dict[str, Any]:
    rounds = draft["rounds"]
    steps = {d: over_rounds(ratios(rounds, d, "steps")) for d in DEPTHS}
    speed = {d: over_rounds([1 / x for x in ratios(rounds, d, "tokens")]) for d in DEPTHS}
    length = {
        d: sum(r[str(d)]["tokens"] for r in rounds) / sum(r[str(d)]["steps"] for r in rounds)
        for d in DEPTHS
    }
    slope, intercept = np.polyfit(DEPTHS, [steps[d]["value"] for d in DEPTHS], 1)
    cost = measured_cost(length[FITTED], FITTED, Measured(speed[FITTED]["value"]))
    rates = draft["rates"][str(FITTED)]
    rows = []
    for depth in DEPTHS:
        row: dict[str, Any] = {
            "depth": depth,
            "tokens_per_step": length[depth],
            "step_time": steps[depth],
        }
        row["measured"] = speed[depth]
        if cost is not None and rates and depth != FITTED:
            row["predicted"] = expected_tokens(extrapolated(rates, max(DEPTHS)), depth) / (
                1 + cost.ratio * depth
            )
            # The same in every round, so that the interval holds the noise of both speeds.
            costs = [(length[FITTED] * x - 1) / FITTED for x in ratios(rounds, FITTED, "tokens")]
            expected = expected_tokens(extrapolated(rates, max(DEPTHS)), depth)
            each = [
                expected / (1 + c * depth) * x
                for c, x in zip(costs, ratios(rounds, depth, "tokens"), strict=True)
            ]
            row["predicted_over_measured"] = over_rounds(each)
        rows.append(row)
    return {
        "cost_ratio": None if cost is None else cost.ratio,
        "line": {"intercept": intercept, "slope": slope},
        "rates": rates,
        "rows": rows,
    }


def one_run_each(runs: dict[str, Any], names: tuple[str, str, str]) -> dict[str, Any]:
    """The same from one server after the other (results/spec_head_states.json), for drafts without
    rounds.
    """
    off = [runs[name]["tokens_per_s"] for name in ("off", "off_again")]
    speed = {
        d: runs[n]["tokens_per_s"] / (sum(off) / len(off))
        for d, n in zip(DEPTHS, names, strict=True)
    }
    middle = runs[names[1]]
    rates = [p["value"] for p in middle["per_position"]]
    cost = measured_cost(middle["tokens_per_step"], FITTED, Measured(speed[FITTED]))
    if cost is None:
        raise SystemExit(f"the speeds of {names} contradict the model")
    rows = [
        {
            "depth": depth,
            "measured": {"value": speed[depth]},
            "predicted": (
                p := expected_tokens(extrapolated(rates, max(DEPTHS)), depth)
                / (1 + cost.ratio * depth)
            ),
            "predicted_over_measured": {"value": p / speed[depth]},
        }
        for depth in DEPTHS
        if depth != FITTED
    ]
    times = [runs[n]["tokens_per_step"] / speed[d] for d, n in zip(DEPTHS, names, strict=True)]
    slope, intercept = np.polyfit(DEPTHS, times, 1)
    return {
        "cost_ratio": cost.ratio,
        "line": {"intercept": intercept, "slope": slope},
        "step_times": times,
        "rates": rates,
        "rows": rows,
    }


def main() -> None:
    found = {
        name: describe(draft)
        for name, draft in json.loads((HERE / "spec_step_times.json").read_text()).items()
    }
    runs = json.loads((HERE / "spec_head_states.json").read_text())
    for draft, names in ONE_RUN_EACH.items():
        found[f"{draft}, one run each"] = one_run_each(runs, names)
    (HERE / "spec_multiplier.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, own in found.items():
        print(
            name,
            f"c = {own['cost_ratio']:.2f}, step time = {own['line']['intercept']:.2f} +"
            f" {own['line']['slope']:.2f} N",
        )
        for row in own["rows"]:
            print(
                "  ",
                {
                    k: (
                        v
                        if isinstance(v, int)
                        else round(v["value"] if isinstance(v, dict) else v, 3)
                    )
                    for k, v in row.items()
                },
            )


if __name__ == "__main__":
    main()
