"""The page of the speed agreement: medians, spread, and whether the goals hold. Used by
speed_agreement.py.

python benchmarks/check/speed_agreement_table.py    # writes the page anew from the results
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median
from typing import Any

RESULTS = Path(__file__).parent / "results" / "speed_agreement.json"
TPOT_GOAL = 0.02
TTFT_GOAL = 0.02
TTFT_GOAL_S = 0.005
BENCH = "bench serve"
SAME = "/metrics, the same requests"


def spread(values: list[float]) -> dict[str, float]:
    """Median and range of one figure over the runs."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def compared(own: list[float], other: list[float], figure: str) -> dict[str, Any]:
    """The medians of `own` and `other`, their difference, and whether it is within the goal for
    `figure`.
    """
    mine, theirs = median(own), median(other)
    allowed = TPOT_GOAL * theirs if figure == "tpot_s" else max(TTFT_GOAL * theirs, TTFT_GOAL_S)
    return {
        "figure": figure,
        "difference_s": mine - theirs,
        "relative": mine / theirs - 1,
        "relative_by_run": spread([a / b - 1 for a, b in zip(own, other, strict=True)]),
        "allowed_s": allowed,
        "holds": abs(mine - theirs) <= allowed,
    }


def by_run(
    runs: list[dict[str, Any]], client: str, figure: str, *, server: bool = False
) -> list[float]:
    """The mean of a figure over the requests of each run: the client's own, or the server's about
    the same requests.
    """
    return [
        fmean((row["metrics"] if server else row)[figure] for row in run[client]) for run in runs
    ]


def summarised(result: dict[str, Any]) -> dict[str, Any]:
    """Medians with their ranges, and every comparison with its goal, over the runs that
    there are.
    """
    figures: dict[str, Any] = {}
    comparisons = []
    for case, clients in (("plain", ("assay", "bench")), ("ngram", ("assay",))):
        runs = result[case]
        if not runs:
            continue
        columns: dict[str, Any] = {}
        for client in clients:
            for server in (False, True):
                name = f"/metrics, requests of {client}" if server else client
                columns[name] = {
                    f: spread(by_run(runs, client, f, server=server)) for f in ("ttft_s", "tpot_s")
                }
        figures[case] = columns
        others = [(BENCH, "bench", False)] if "bench" in clients else []
        for name, client, server in (*others, (SAME, "assay", True)):
            comparisons += [
                {"case": case, "against": name}
                | compared(by_run(runs, "assay", f), by_run(runs, client, f, server=server), f)
                for f in ("tpot_s", "ttft_s")
            ]
    plain, ngram = result["plain"], result["ngram"]
    rows = [
        row for run in plain + ngram for client in ("assay", "bench") for row in run.get(client, ())
    ]
    drafted = [row for run in ngram for row in run["assay"]]
    found = {
        "figures": figures,
        "comparisons": comparisons,
        "all_hold": all(row["holds"] for row in comparisons),
        "server_moved": _moved(plain),
        "clocks": {figure: _clocks(plain, figure) for figure in ("tpot_s", "ttft_s")},
        "same_texts": sum(sum(run["same_texts"]) for run in plain),
        "texts": sum(len(run["same_texts"]) for run in plain),
        "load": spread([row["loadavg_before"] for row in rows]),
    }
    if drafted:
        found |= {
            "ngram_tokens_per_chunk": (
                sum(r["tokens"] for r in drafted) / sum(r["chunks"] for r in drafted)
            ),
            "ngram_tokens_agree": all(row["tokens"] == row["metrics"]["tokens"] for row in drafted),
            "ngram_chunk_counting": spread(
                [row["chunk_s"] / row["metrics"]["tpot_s"] - 1 for row in drafted]
            ),
        }
    return found


def _moved(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The server's own TPOT while assay asked against while bench asked, request by request."""
    return spread(
        [
            mine["metrics"]["tpot_s"] / theirs["metrics"]["tpot_s"] - 1
            for run in runs
            for mine, theirs in zip(run["assay"], run["bench"], strict=True)
        ]
    )


def _clocks(runs: list[dict[str, Any]], figure: str) -> dict[str, dict[str, float]]:
    """By how many seconds each client differs from the server's histogram of the same request.

    Both are held against one yardstick, so that a machine that is slower in one's turn is no
    difference between them.
    """
    return {
        client: spread(
            [row[figure] - row["metrics"][figure] for run in runs for row in run[client]]
        )
        for client in ("assay", "bench")
    }


def markdown(result: dict[str, Any]) -> str:
    """The page, every sentence of it from the numbers."""
    found, settings, machine = result["summary"], result["settings"], result["machine"]
    load = found["load"]
    lines = [
        "# Agreement of assay's timing with vLLM's own",
        "",
        (
            f"{settings['model']} on the vLLM {machine['vllm']} CPU server; {machine['cpu']},"
            f" {machine['cpu_count']} CPUs, {machine['platform']}, Python {machine['python']}. One"
            f" stream; {len(result['plain'])} runs, in each of them {settings['requests']} prompts"
            f" of {settings['tokens']} tokens that both clients asked in turns (temperature"
            f" {settings['temperature']}, top_p {settings['top_p']}, seed {settings['seed']}, end"
            " of text ignored, prefix cache off). A run's figure is the mean over its requests;"
            " below are median [min, max] over the runs."
        ),
        "",
        (
            f"Load average of the machine before the requests: {load['median']:.1f}"
            f" [{load['min']:.1f}, {load['max']:.1f}], the server's own work included, which keeps"
            f" it near {machine['cpu_count']}."
        ),
        "",
        "| case | source | TTFT, ms | TPOT, ms |",
        "|---|---|---:|---:|",
    ]
    for case, columns in found["figures"].items():
        for name, values in columns.items():
            lines.append(
                f"| {case} | {name} | {_ms(values['ttft_s'], 1)} | {_ms(values['tpot_s'], 2)} |"
            )
    lines += [
        "",
        "| case | assay against | figure | difference of medians | range by run | allowed | goal |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for row in found["comparisons"]:
        each = row["relative_by_run"]
        lines.append(
            f"| {row['case']} | {row['against']} | {row['figure'][:4].upper()} |"
            f" {1000 * row['difference_s']:+.2f} ms ({row['relative']:+.2%}) | {each['min']:+.2%}"
            f" to {each['max']:+.2%} | {1000 * row['allowed_s']:.2f} ms |"
            f" {'holds' if row['holds'] else '**does not hold**'} |"
        )
    total, missed = len(found["comparisons"]), sum(not row["holds"] for row in found["comparisons"])
    verdict = (
        f"do not hold in {missed} of {total} comparisons" if missed else "hold in every comparison"
    )
    moved = found["server_moved"]
    tpot, ttft = (
        {c: v["median"] for c, v in found["clocks"][f].items()} for f in ("tpot_s", "ttft_s")
    )
    lines += [
        "",
        f"The goals (TPOT within 2 %, TTFT within the larger of 2 % and 5 ms) {verdict}.",
        "",
        (
            f"By its own histograms the server's TPOT was {moved['median']:+.2%}"
            f" [{moved['min']:+.2%}, {moved['max']:+.2%}] in assay's requests against the same"
            " requests of `bench serve`: that much of a difference is the machine and the load"
            " that a client is to it, not its clock. Against the histogram of the very same"
            f" request the medians are {1000 * tpot['assay']:+.3f} ms for assay and"
            f" {1000 * tpot['bench']:+.3f} ms for `bench serve` in TPOT,"
            f" {1000 * ttft['assay']:+.2f} ms and {1000 * ttft['bench']:+.2f} ms in TTFT (which the"
            " server counts without HTTP)."
        ),
        "",
        (
            f"{found['same_texts']} of {found['texts']} texts were the same for both clients, word"
            " for word."
        ),
    ]
    if "ngram_chunk_counting" in found:
        chunks = found["ngram_chunk_counting"]
        lines += [
            "",
            (
                f"With n-gram drafts a chunk held {found['ngram_tokens_per_chunk']:.2f} tokens on"
                " average; assay's counts"
                f" {'agree' if found['ngram_tokens_agree'] else 'DO NOT AGREE'} with the server's"
                f" counter. Counting chunks as tokens would have put TPOT {chunks['median']:+.0%}"
                f" off [{chunks['min']:+.0%}, {chunks['max']:+.0%}]."
            ),
        ]
    return "\n".join(lines) + "\n"


def _ms(values: dict[str, float], digits: int) -> str:
    return " ".join(
        (
            f"{1000 * values['median']:.{digits}f}",
            f"[{1000 * values['min']:.{digits}f}, {1000 * values['max']:.{digits}f}]",
        )
    )


def write(result: dict[str, Any], out: Path) -> None:
    """The results with their summary, and the page beside them."""
    result["summary"] = summarised(result)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(result), encoding="utf-8")


if __name__ == "__main__":
    write(json.loads(RESULTS.read_text(encoding="utf-8")), RESULTS)
