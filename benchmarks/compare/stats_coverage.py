"""How often the intervals hold what they promise, and how often a candidate on the margin is
accepted by mistake.

    python benchmarks/compare/stats_coverage.py [--experiments 2000] [--sources
    model|measured|real|contiguous]

Sources of data, all in windows of 511 tokens:

`measured` the model with the tails of KL that `assay compare` saw on SmolLM2 candidates (spread of
log KL 1.2 within windows, at most
         0.3 between them).
`real`   whole windows drawn with replacement from those of token_differences.npz (SmolLM2 in bf16
and in 4 bits against
         float32 on Python's topics); the truth is the mean over all of them.
`model`  heavy tails and clusters by construction: every window has its own level and its own scale,
tokens have
         Student's t with 3 degrees of freedom (d) or a log-normal with σ = 2 (KL), windows differ
         in how often top-1 flips.
         Its truth is known in closed form.

`contiguous` runs of neighbouring windows of WikiText-2, and windows spread over it as `assay
compare` takes them, from the
         sums by window that `token_differences.py --sums` kept; the truth is the mean over the
         whole text. Errors by window
         and by block of up to four neighbours (`assay.fidelity.windows.blocks_of`).

Written to results/stats_coverage.{json,md}; rows of the sources that are not run again are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from assay.fidelity.windows import Cut, blocks_of, places_of
from assay.stats import (
    Interval,
    Resampling,
    bootstrap_quantiles,
    cluster_proportion,
    cluster_ratio,
    resampled_counts,
)
from assay.stats.equivalence import Grade, judge

RESULTS = Path(__file__).parent / "results"
WINDOWS = (8, 16, 64, 128)
TOKENS = 511
SEED = 20261128


@dataclass(frozen=True)
class Source:
    """Where windows come from: `draw(rng, G)` gives [G, TOKENS] values; `truth` is their mean,
    `median` and `p99` quantiles.
    """

    name: str
    draw: Callable[[np.random.Generator, int], np.ndarray]
    truth: float
    median: float = math.nan
    p99: float = math.nan


def real_sources() -> Iterator[tuple[str, Source]]:
    with np.load(RESULTS / "token_differences.npz") as data:
        arrays = {key: data[key].astype(np.float64) for key in data.files}
    for key, values in arrays.items():
        candidate, metric = key.split("/")
        median, p99 = np.quantile(values, [0.5, 0.99], method="inverted_cdf")
        yield (
            metric,
            Source(
                f"real, {candidate}",
                lambda rng, g, values=values: values[rng.integers(0, len(values), g)],
                float(values.mean()),
                float(median),
                float(p99),
            ),
        )


def model_d(mean: float) -> Source:
    """Differences of NLL: window level N(mean, 0.01²), window scale log-normal, tokens t₃ of scale
    0.1.
    """

    def draw(rng: np.random.Generator, g: int) -> np.ndarray:
        level = mean + 0.01 * rng.standard_normal((g, 1))
        scale = 0.1 * np.exp(0.4 * rng.standard_normal((g, 1)))
        return level + scale * rng.standard_t(3, (g, TOKENS))

    return Source("model", draw, mean)


def model_kl(name: str, level_sd: float, token_sd: float) -> Source:
    """KL: log-normal tokens around a window level that is log-normal itself."""
    location = -6.0
    truth = math.exp(location + (level_sd**2 + token_sd**2) / 2)
    spread = math.hypot(level_sd, token_sd)

    def draw(rng: np.random.Generator, g: int) -> np.ndarray:
        level = location + level_sd * rng.standard_normal((g, 1))
        return np.exp(level + token_sd * rng.standard_normal((g, TOKENS)))

    return Source(
        name, draw, truth, math.exp(location), math.exp(location + 2.3263478740408408 * spread)
    )


def model_top1(rate: float, concentration: float = 300.0) -> Source:
    """Agreement: every window has its own rate, a Beta with the given mean."""

    def draw(rng: np.random.Generator, g: int) -> np.ndarray:
        rates = rng.beta(rate * concentration, (1 - rate) * concentration, (g, 1))
        return (rng.random((g, TOKENS)) < rates).astype(np.float64)

    return Source(f"model, {100 * rate:g} %", draw, rate)


def percentile_ratio(sums: np.ndarray, weights: np.ndarray, resampling: Resampling) -> Interval:
    """Percentile interval of Σ sums / Σ weights, which assay does not use, for comparison."""
    drawn = [(c @ sums) / (c @ weights) for c in resampled_counts(len(sums), resampling)]
    lo, hi = np.quantile(np.concatenate(drawn), [0.025, 0.975], method="inverted_cdf")
    return Interval(float(sums.sum() / weights.sum()), float(lo), float(hi))


def studentised_ratio(
    sums: np.ndarray, weights: np.ndarray, resampling: Resampling, confidence: float = 0.95
) -> Interval:
    """Bootstrap-t (Efron and Tibshirani 1993, ch. 12): [R − t*_hi · SE, R − t*_lo · SE], t* = (R* −
    R) / SE*, SE by CR1.

    Draws without spread have no t* and are left out; where none has, the interval is infinite.
    """
    estimate, clusters = cluster_ratio(sums, weights, confidence), len(sums)
    parts = []
    for c in resampled_counts(clusters, resampling):
        total = c @ weights
        ratio = (c @ sums) / total
        # Σ c (y − R* w)², multiplied out so that no [b, G] residuals are needed beside the counts.
        squares = c @ sums**2 - 2 * ratio * (c @ (sums * weights)) + ratio**2 * (c @ weights**2)
        se = np.sqrt(clusters / (clusters - 1) * np.maximum(squares, 0.0)) / total
        some = se > 1e-9 * abs(estimate.se)
        parts.append((ratio[some] - estimate.value) / se[some])
    t, tail = np.concatenate(parts), (1 - confidence) / 2
    if t.size == 0:
        return Interval(estimate.value, -math.inf, math.inf)
    lo, hi = np.quantile(t, [tail, 1 - tail], method="inverted_cdf")
    return Interval(
        estimate.value, estimate.value - hi * estimate.se, estimate.value - lo * estimate.se
    )


def interval_methods() -> dict[str, Callable[[np.ndarray], Interval]]:
    weights = {g: np.full(g, float(TOKENS)) for g in WINDOWS}
    resampling = Resampling(500, 1)
    return {
        "CR1, t(G−1)": lambda sums: cluster_ratio(sums, weights[len(sums)]).interval,
        "bootstrap, percentile": lambda sums: percentile_ratio(
            sums, weights[len(sums)], resampling
        ),
        "bootstrap-t": lambda sums: studentised_ratio(sums, weights[len(sums)], resampling),
    }


def coverage_of_means(
    metric: str, source: Source, g: int, experiments: int
) -> Iterator[dict[str, object]]:
    methods = interval_methods()
    if metric == "top1":
        methods = {
            "CR1, t(G−1)": lambda sums, g=g: (
                cluster_proportion(sums, np.full(g, float(TOKENS))).interval
            )
        }
    hits = dict.fromkeys(methods, 0)
    misses_above = dict.fromkeys(methods, 0)
    rng = np.random.default_rng([SEED, g])
    for _ in range(experiments):
        sums = source.draw(rng, g).sum(axis=1)
        for name, method in methods.items():
            interval = method(sums)
            hits[name] += source.truth in interval
            misses_above[name] += source.truth > interval.hi
    for name in methods:
        yield {
            "metric": f"mean of {metric}",
            "source": source.name,
            "windows": g,
            "method": name,
            "experiments": experiments,
            "coverage": hits[name] / experiments,
            "truth_above": misses_above[name] / experiments,
        }


def coverage_of_quantiles(source: Source, g: int, experiments: int) -> Iterator[dict[str, object]]:
    rng = np.random.default_rng([SEED, g, 1])
    hits = np.zeros(2)
    for _ in range(experiments):
        found = bootstrap_quantiles(
            list(source.draw(rng, g)), [0.5, 0.99], resampling=Resampling(500, 1)
        )
        hits += [source.median in found[0], source.p99 in found[1]]
    for name, hit in zip(("median", "p99"), hits, strict=True):
        yield {
            "metric": f"{name} of kl",
            "source": source.name,
            "windows": g,
            "method": "bootstrap, percentile",
            "experiments": experiments,
            "coverage": float(hit) / experiments,
        }


def coverage_of_runs(
    key: str, values: np.ndarray, g: int, experiments: int
) -> Iterator[dict[str, object]]:
    """How often intervals from g of all windows of a text hold the mean over all of it.

    A spread set is turned round the text by a random offset, so that every experiment has other
    windows.
    """
    candidate, metric = key.split("/")
    n = len(values)
    spread = np.array(places_of(n * 512, Cut(length=512), None, g))
    truth = float(values.mean() / TOKENS)
    rng = np.random.default_rng([SEED, g, 3])
    for kind, places in (("contiguous", np.arange(g)), ("spread", spread)):
        hits = Counter[str]()
        for offset in rng.integers(0, n, experiments):
            taken = np.sort((places + offset) % n)
            for how, blocks in (
                ("window", np.arange(g)),
                ("block", np.array(blocks_of(list(map(int, taken))))),
            ):
                names, index = np.unique(blocks, return_inverse=True)
                sums = np.bincount(index, values[taken], len(names))
                weights = np.bincount(index, minlength=len(names)) * float(TOKENS)
                estimate = (
                    cluster_proportion(sums, weights)
                    if metric == "top1"
                    else cluster_ratio(sums, weights)
                )
                hits[how] += truth in estimate.interval
        for how in ("window", "block"):
            yield {
                "metric": f"mean of {metric}",
                "source": f"contiguous, {candidate}, {kind} windows",
                "windows": g,
                "method": f"CR1 by {how}",
                "experiments": experiments,
                "coverage": hits[how] / experiments,
            }


def false_accepts(case: str, g: int, experiments: int) -> Iterator[dict[str, object]]:
    """Candidates that sit exactly on the margin: +1 %, −1 % of perplexity, 95 % of top-1, or on
    both.
    """
    on_top1, good_top1 = model_top1(0.95), model_top1(0.99)
    d, top1 = {
        "perplexity +1 %": (model_d(math.log(1.01)), good_top1),
        "perplexity −1 %": (model_d(math.log(0.99)), good_top1),
        "top-1 95 %": (model_d(0.0), on_top1),
        "both": (model_d(math.log(1.01)), on_top1),
    }[case]
    rng = np.random.default_rng([SEED, g, 2])
    weights = np.full(g, float(TOKENS))
    grades = Counter(
        judge(
            cluster_ratio(d.draw(rng, g).sum(axis=1), weights),
            cluster_proportion(top1.draw(rng, g).sum(axis=1), weights),
        ).grade
        for _ in range(experiments)
    )
    yield {
        "case": case,
        "windows": g,
        "experiments": experiments,
        "accepted": grades[Grade.ACCEPT] / experiments,
        "inconclusive": grades[Grade.INCONCLUSIVE] / experiments,
    }


CASES = ("perplexity +1 %", "perplexity −1 %", "top-1 95 %", "both")
_tasks: list[Callable[[], list[dict[str, object]]]] = []
"""Filled before the pool forks: sources are closures, which do not travel."""


def _run(index: int) -> list[dict[str, object]]:
    return _tasks[index]()


def table(rows: list[dict[str, object]], columns: list[str]) -> str:
    def cell(value: object) -> str:
        return f"{100 * value:.1f} %" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument(
        "--sources",
        choices=["model", "measured", "real", "contiguous"],
        nargs="+",
        default=["model"],
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    count = arguments.experiments
    sources: list[tuple[str, Source]] = []
    if "model" in arguments.sources:
        heavy = model_kl("model", 0.4, 2.0)
        sources += [("d", model_d(0.002)), ("kl", heavy), ("top1", model_top1(0.97))]
    if "measured" in arguments.sources:
        sources.append(("kl", model_kl("measured", 0.3, 1.2)))
    if "real" in arguments.sources:
        sources += real_sources()
    if "contiguous" in arguments.sources:
        with np.load(RESULTS / "window_sums.npz") as data:
            for key in data.files:
                for g in (16, 64, 128):
                    _tasks.append(lambda a=(key, data[key], g, count): list(coverage_of_runs(*a)))
    path = RESULTS / "stats_coverage.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = [
        r
        for r in before.get("coverage", [])
        if not r["source"].startswith(tuple(arguments.sources))
    ]
    for metric, source in sources:
        for g in WINDOWS:
            _tasks.append(lambda a=(metric, source, g, count): list(coverage_of_means(*a)))
            if metric == "kl" and g <= 64:
                _tasks.append(lambda a=(source, g, count // 5): list(coverage_of_quantiles(*a)))
    if "model" in arguments.sources:
        for case in CASES:
            _tasks.extend(lambda a=(case, g, count): list(false_accepts(*a)) for g in WINDOWS)
    with get_context("fork").Pool(arguments.jobs) as pool:
        found = [row for rows in pool.map(_run, range(len(_tasks)), chunksize=1) for row in rows]
    accepts = [row for row in found if "case" in row] or before["false_accepts"]
    rows = kept + [row for row in found if "metric" in row]
    rows.sort(key=lambda r: (str(r["metric"]), str(r["source"]), int(str(r["windows"]))))
    result = {"seed": SEED, "tokens": TOKENS, "coverage": rows, "false_accepts": accepts}
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = (
        "# Coverage of nominal 95 % intervals, and false accepts\n\n`python"
        f" benchmarks/compare/stats_coverage.py --experiments {count}`, seed {SEED}, windows of {TOKENS}"  # noqa: E501
        f" tokens. The error of a share near 95 % over {count} experiments is ±"
        f" {196 * math.sqrt(0.95 * 0.05 / count):.1f} points.\n\n"
        + table(rows, ["metric", "source", "windows", "method", "coverage", "truth_above"])
        + "\n\nCandidates on the margin (true grade not better than the border of ACCEPT):\n\n"
        + table(accepts, ["case", "windows", "accepted", "inconclusive"])
        + "\n"
    )
    (RESULTS / "stats_coverage.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
