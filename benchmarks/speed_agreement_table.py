"""The page of the speed agreement: medians, spread, and whether the goals hold. Used by speed_agreement.py."""

from __future__ import annotations

from statistics import median
from typing import Any

TPOT_GOAL = 0.02
TTFT_GOAL = 0.02
TTFT_GOAL_S = 0.005


def spread(values: list[float]) -> dict[str, float]:
    """Median and range of one figure over the runs."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def compared(own: list[float], other: list[float], figure: str) -> dict[str, Any]:
    """The medians of `own` and `other`, their difference, and whether it is within the goal for `figure`."""
    mine, theirs = median(own), median(other)
    allowed = TPOT_GOAL * theirs if figure == "tpot_s" else max(TTFT_GOAL * theirs, TTFT_GOAL_S)
    pairs = [a / b - 1 for a, b in zip(own, other, strict=True)]
    return {
        "figure": figure,
        "difference_s": mine - theirs,
        "relative": mine / theirs - 1,
        "relative_by_run": spread(pairs),
        "allowed_s": allowed,
        "holds": abs(mine - theirs) <= allowed,
    }


def summarised(result: dict[str, Any]) -> dict[str, Any]:
    """Medians with their ranges, and every comparison with its goal."""
    plain, ngram = result["plain"], result["ngram"]
    series = {
        "plain": {
            "assay": [pair["assay"] for pair in plain],
            "bench": [pair["bench"] for pair in plain],
            "metrics, assay's requests": [pair["assay"]["metrics"] for pair in plain],
            "metrics, bench's requests": [pair["bench"]["metrics"] for pair in plain],
        },
        "ngram": {"assay": ngram, "metrics, assay's requests": [run["metrics"] for run in ngram]},
    }
    figures = {
        case: {
            name: {f: spread([run[f] for run in runs]) for f in ("ttft_s", "tpot_s")}
            for name, runs in columns.items()
        }
        for case, columns in series.items()
    }
    wanted = (
        ("plain", "bench"), ("plain", "metrics, assay's requests"), ("ngram", "metrics, assay's requests"),
    )  # fmt: skip
    comparisons = [
        {"case": case, "against": other}
        | compared([r[f] for r in series[case]["assay"]], [r[f] for r in series[case][other]], f)
        for case, other in wanted
        for f in ("tpot_s", "ttft_s")
    ]
    loads = [run["loadavg_before"][0] for run in series["plain"]["assay"] + series["plain"]["bench"] + ngram]
    requests = [row for run in ngram for row in run["requests"]]
    return {
        "figures": figures,
        "comparisons": comparisons,
        "all_hold": all(row["holds"] for row in comparisons),
        "server_moved": compared(
            [r["tpot_s"] for r in series["plain"]["metrics, assay's requests"]],
            [r["tpot_s"] for r in series["plain"]["metrics, bench's requests"]],
            "tpot_s",
        )["relative"],
        "same_texts": sum(pair["same_texts"] for pair in plain),
        "texts": sum(len(pair["assay"]["requests"]) for pair in plain),
        "ngram_tokens_per_chunk": sum(r["tokens"] for r in requests) / sum(r["chunks"] for r in requests),
        "ngram_tokens_agree": all(
            sum(r["tokens"] for r in run["requests"]) == run["metrics"]["tokens"] for run in ngram
        ),
        "ngram_chunk_counting": spread([run["chunk_s"] / run["metrics"]["tpot_s"] - 1 for run in ngram]),
        "load": spread(loads),
        "disturbed_runs": sum(load > result["machine"]["cpu_count"] + 1 for load in loads),
        "measured_runs": len(loads),
    }


def markdown(result: dict[str, Any]) -> str:
    """The page, every sentence of it from the numbers."""
    found, settings, machine = result["summary"], result["settings"], result["machine"]
    load = found["load"]
    lines = [
        "# Agreement of assay's timing with vLLM's own",
        "",
        f"{settings['model']} on the vLLM {machine['vllm']} CPU server; {machine['cpu']}, {machine['cpu_count']} "
        f"CPUs, {machine['platform']}, Python {machine['python']}. One stream; {settings['runs']} runs of each client, "
        f"alternating, {settings['requests']} prompts of {settings['tokens']} tokens in each run "
        f"(temperature {settings['temperature']}, top_p {settings['top_p']}, seed {settings['seed']}, end of text ignored, "
        "prefix cache off). A run's figure is the mean over its requests; below are median [min, max] over the runs.",
        "",
        f"Load average of the machine before the runs: {load['median']:.1f} [{load['min']:.1f}, {load['max']:.1f}], "
        f"the server's own work included, which keeps it near {machine['cpu_count']}. Before {found['disturbed_runs']} of "
        f"{found['measured_runs']} runs it was above {machine['cpu_count'] + 1}: others were at work on the machine there.",
        "",
        "| case | source | TTFT, ms | TPOT, ms |",
        "|---|---|---:|---:|",
    ]
    for case, columns in found["figures"].items():
        for name, values in columns.items():
            lines.append(f"| {case} | {name} | {_ms(values['ttft_s'], 1)} | {_ms(values['tpot_s'], 2)} |")
    lines += [
        "",
        "The histograms around `bench serve` also hold its warm-up request.",
        "",
        "| case | assay against | figure | difference of medians | range by run | allowed | goal |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for row in found["comparisons"]:
        each = row["relative_by_run"]
        lines.append(
            f"| {row['case']} | {row['against']} | {row['figure'][:4].upper()} | {1000 * row['difference_s']:+.2f} ms "
            f"({row['relative']:+.2%}) | {each['min']:+.2%} to {each['max']:+.2%} | {1000 * row['allowed_s']:.2f} ms "
            f"| {'holds' if row['holds'] else '**does not hold**'} |"
        )
    chunks = found["ngram_chunk_counting"]
    total, missed = len(found["comparisons"]), sum(not row["holds"] for row in found["comparisons"])
    verdict = f"do not hold in {missed} of {total} comparisons" if missed else "hold in every comparison"
    lines += [
        "",
        f"The goals (TPOT within 2 %, TTFT within the larger of 2 % and 5 ms) {verdict}.",
        "",
        f"By its own histograms the server's TPOT was {found['server_moved']:+.2%} in assay's runs against those of "
        "`bench serve`: that much of their difference is the server and the machine, not the clients' clocks.",
        "",
        f"{found['same_texts']} of {found['texts']} texts were the same for both clients, word for word.",
        "",
        f"With n-gram drafts a chunk held {found['ngram_tokens_per_chunk']:.2f} tokens on average; assay's counts "
        f"{'agree' if found['ngram_tokens_agree'] else 'DO NOT AGREE'} with the server's counter. Counting chunks as tokens would "
        f"have put TPOT {chunks['median']:+.0%} off [{chunks['min']:+.0%}, {chunks['max']:+.0%}].",
    ]
    return "\n".join(lines) + "\n"


def _ms(values: dict[str, float], digits: int) -> str:
    return " ".join(
        (
            f"{1000 * values['median']:.{digits}f}",
            f"[{1000 * values['min']:.{digits}f}, {1000 * values['max']:.{digits}f}]",
        )
    )
