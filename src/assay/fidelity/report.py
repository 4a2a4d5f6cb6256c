"""The tables and charts of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from assay.engines.scoring import GreedyStep
from assay.fidelity.breakdown.greedy import NEAR_TIE, Divergence, Greedy
from assay.fidelity.findings import beyond_text, interval_text, kl_text, top1_text, tv_text
from assay.fidelity.margin_tests import MarginTest
from assay.fidelity.observation import pooled
from assay.fidelity.pairs import Pair
from assay.fidelity.plan import Plan
from assay.fidelity.result import CandidateResult
from assay.stats import Interval, percent_change
from assay.stats.equivalence import Grade
from assay.verdict import Band, Block, Chart, Metric, Point, Quote, Series, Table

# Charts of several candidates of one run beside each other: forests of Δppl and KL, and size
# against KL.


def margin_bands(plan: Plan) -> list[Band]:
    """The margins of Δppl, in percent."""
    accept, marginal = 100 * plan.margin_ppl, 100 * plan.marginal_ppl
    return [
        Band(Grade.ACCEPT.value, -accept, accept),
        Band(Grade.MARGINAL.value, -marginal, marginal),
    ]


def short_names(labels: Sequence[str]) -> list[str]:
    """Labels without what all of them begin with, as far as a `?` or `&`: a chart has no room for
    the rest.
    """
    common = min(labels)
    while not all(label.startswith(common) for label in labels):
        common = common[:-1]
    cut = 1 + max(common.rfind(mark) for mark in "?&")
    return [label[cut:] or label for label in labels] if len(labels) > 1 else list(labels)


def forests(results: Sequence[CandidateResult], plan: Plan) -> list[Block]:
    """Δppl against the margins, and KL against the floor, one row a candidate."""
    names = short_names([r.label for r in results])
    dppl = [
        Point(name, d.value, d.lo, d.hi)
        for name, r in zip(names, results, strict=True)
        for d in [r.summary.judgement.dppl_pct]
    ]
    kl = [
        Point(name, r.summary.kl.value, r.summary.kl.interval.lo, r.summary.kl.interval.hi)
        for name, r in zip(names, results, strict=True)
        if r.summary.kl.value > 0
    ]
    charts: list[Block] = [
        Chart(
            "Change of perplexity",
            "forest",
            [Series("Δppl", dppl)],
            "",
            "Δppl (%)",
            margin_bands(plan),
        )
    ]
    if kl:
        bounded = "" if not any(r.summary.bounds for r in results) else ", of servers at least"
        charts.append(
            Chart(
                "KL to the reference",
                "forest",
                [Series("mean KL", kl)],
                y_label=f"mean KL (nats{bounded})",
                bands=_floor_band(results),
                log_y=True,
            )
        )
    return charts


def pareto(results: Sequence[CandidateResult]) -> list[Block]:
    """Size against KL; the front are the candidates that none is both smaller than and nearer."""
    rated = [
        (size, r)
        for r in results
        if isinstance(size := r.engine.get("weight_bytes"), int)
        if r.summary.kl.value > 0 and not r.self_test and not r.summary.bounds
    ]
    if len(rated) < 2:
        return []
    names = dict(
        zip((id(r) for _, r in rated), short_names([r.label for _, r in rated]), strict=True)
    )
    front = [(size, r) for size, r in rated if not any(_beats(other, (size, r)) for other in rated)]
    behind = [pair for pair in rated if pair not in front]
    series = [
        Series(
            title,
            [
                Point(
                    size / 2**20,
                    r.summary.kl.value,
                    r.summary.kl.interval.lo,
                    r.summary.kl.interval.hi,
                    label=names[id(r)],
                )
                for size, r in sorted(part, key=lambda pair: pair[0])
            ],
        )
        for title, part in (("on the front", front), ("behind it", behind))
        if part
    ]
    return [
        Chart(
            "Size against KL",
            "scatter",
            series,
            x_label="weights (MiB)",
            y_label="mean KL (nats)",
            bands=_floor_band(results),
            log_y=True,
        )
    ]


def _beats(a: tuple[int, CandidateResult], b: tuple[int, CandidateResult]) -> bool:
    """Whether `a` is no larger and no further from the reference than `b`, and better in one of the
    two.
    """
    (size_a, kl_a), (size_b, kl_b) = ((size, r.summary.kl.value) for size, r in (a, b))
    return size_a <= size_b and kl_a <= kl_b and (size_a, kl_a) != (size_b, kl_b)


def _floor_band(results: Sequence[CandidateResult]) -> list[Band]:
    floor = max(r.floor for r in results)
    return [Band("floor", 0.0, floor)] if floor else []


# The table of greedy continuations.


def greedy_blocks(greedy: Greedy, prefix: str) -> list[Table]:
    """One row a prefix, with both sides' two likeliest tokens where they part."""
    title = f"{prefix}Greedy continuations"
    if greedy.reason:
        return [Table(title, ("not available",), [[greedy.reason]])]
    median = "–" if greedy.median_first is None else f"{greedy.median_first:g}"
    return [
        Table(
            title,
            ("window", "parts at token", "reference", "gap", "candidate", "gap", "what it is"),
            [_row(d, greedy) for d in greedy.found],
            numeric=frozenset({0, 1, 3, 5}),
            note=(
                f"{len(greedy.diverged)} of {len(greedy.found)} part within {greedy.tokens} tokens,"
                f" median {median}. Gaps are those of the two likeliest tokens, in nats; below"
                f" {NEAR_TIE} on both sides rounding may decide. After the first difference the two"
                " read different texts."
            ),
        )
    ]


def _row(d: Divergence, greedy: Greedy) -> list[str]:
    if d.first is None or d.reference is None or d.candidate is None:
        return [str(d.window), "–", "", "", "", "", "the same throughout"]
    what = "near tie" if d.near_tie else "another choice"
    return [
        str(d.window),
        str(d.first),
        _shown(d.reference, greedy),
        f"{d.reference.gap:.3f}",
        _shown(d.candidate, greedy),
        f"{d.candidate.gap:.3f}",
        what,
    ]


def _shown(step: GreedyStep, greedy: Greedy) -> str:
    """The token that was taken and the next likeliest."""
    return f"{greedy.texts(step.token)!r} over {greedy.texts(step.runner_up)!r}"


def headline(results: Sequence[CandidateResult]) -> list[Metric]:
    """The few figures that are read first."""
    if len(results) == 1:
        s = results[0].summary
        valid = not s.nonfinite
        return [
            Metric("grade", s.judgement.grade.value, valid=valid),
            Metric("Δppl", interval_text(s.judgement.dppl_pct, "%"), valid=valid),
            Metric(s.kl_name, f"{kl_text(s.kl)} nats", valid=valid),
            Metric("top-1", top1_text(s) + beyond_text(s), valid=valid),
            Metric("total variation", tv_text(s), valid=valid),
            *([results[0].routing.metric()] if results[0].routing else []),
            Metric(
                "scored",
                f"{s.tokens:,} tokens in {s.windows} windows{threads_text(results[0].engine)}",
            ),
        ]
    return [Metric(r.label, r.summary.judgement.grade.value) for r in results]


def threads_text(engine: Mapping[str, Any]) -> str:
    """How many threads of a CPU scored; empty where another device did, or it is unknown."""
    threads = engine.get("threads")
    if not threads or engine.get("device", "cpu") != "cpu":
        return ""
    return f", {threads} thread{'s' * (threads > 1)}"


def blocks(
    results: Sequence[CandidateResult],
    plan: Plan,
    tests: Sequence[Sequence[MarginTest]] = (),
    pairs: Sequence[Pair] = (),
) -> list[Block]:
    """Everything under the headline."""
    found: list[Block] = [_candidates(results)]
    if len(results) > 1:
        found += forests(results, plan)
        found += pareto(results)
        found += _pairs(pairs)
    if any(tests):
        found.append(_margins(results, tests))
    for result in results:
        prefix = "" if len(results) == 1 else f"{result.label}: "
        found.append(_windows(result, plan, prefix))
        found += _depth(result, prefix)
        found.append(_histogram(result, prefix))
        found += [
            _bins(result, name, prefix)
            for name in ("confidence", "class")
            if result.breakdowns[name]
        ]
        if result.routing:
            found += result.routing.table(prefix)
        if result.greedy:
            found += greedy_blocks(result.greedy, prefix)
        found += _worst(result, prefix)
    return found


def _candidates(results: Sequence[CandidateResult]) -> Table:
    rows = []
    for r in results:
        s = r.summary
        rows.append(
            [
                r.label,
                (
                    f"{size / 2**20:.1f}"
                    if isinstance(size := r.engine.get("weight_bytes"), int)
                    else "–"
                ),
                s.judgement.grade.value,
                interval_text(s.judgement.dppl_pct, "%"),
                f"{'≥ ' if s.bounds else ''}{kl_text(s.kl)}",
                (
                    f"{s.quantiles['median'].value:.2g} / {s.quantiles['p99'].value:.2g} /"
                    f" {s.kl_max:.2g}"
                ),
                top1_text(s),
                f"{s.beyond_pct.value:.2f}" if s.top1_value is not None else "–",
                tv_text(s),
                f"{r.floor:.1g}" if r.floor else "–",
                f"{s.dnll.design_effect:.1f}" if math.isfinite(s.dnll.design_effect) else "–",
            ]
        )
    first = results[0].summary
    return Table(
        "Candidates against the reference",
        (
            "candidate",
            "MiB",
            "grade",
            "Δppl",
            "KL (nats)",
            "KL median / p99 / max",
            "top-1",
            "beyond rounding (%)",
            "TV",
            "floor",
            "design effect",
        ),
        rows,
        note=(
            f"{first.windows} windows, {first.tokens:,} scored tokens, reference perplexity"
            f" {first.ppl_reference:.3f}; intervals are two-sided 95 %, by window."
        ),
    )


def _margins(results: Sequence[CandidateResult], tests: Sequence[Sequence[MarginTest]]) -> Table:
    names = {
        "dppl_pct": "Δppl within ±{:g} %",
        "top1_pct": "top-1 but for rounding from {:g} %",
        "kld": "KL up to {:g} nats",
    }
    rows = [
        [
            r.label,
            test.grade,
            names[test.metric].format(test.bound),
            f"{test.p:.2g}",
            f"{test.p_holm:.2g}",
        ]
        for r, of_one in zip(results, tests, strict=True)
        for test in of_one
    ]
    return Table(
        "Margins one by one",
        ("candidate", "for", "margin", "p", "p (Holm)"),
        rows,
        numeric=frozenset({3, 4}),
        note=(
            "p-values of “the margin does not hold”. The grade asks for all margins at once and"
            " needs no correction; who reads single lines reads several tests, and Holm's"
            " correction counts all of this run."
        ),
    )


def _pairs(pairs: Sequence[Pair]) -> list[Block]:
    """Every two candidates on the same windows; a bound of KL is no party to a difference."""
    rows = [
        [
            f"{p.first} − {p.second}",
            _difference_text(p.kl.difference.interval) if p.kl else "–",
            f"{p.kl_p_holm:.2g}" if p.kl else "–",
            _difference_text(percent_change(p.dnll.difference.interval)),
            f"{p.dnll_p_holm:.2g}",
        ]
        for p in pairs
    ]
    if not rows:
        return []
    return [
        Table(
            "Candidates against each other",
            ("pair", "difference of mean KL", "p (Holm)", "of perplexity (%)", "p (Holm)"),
            rows,
            note="Paired by window: what the windows have in common cancels.",
        )
    ]


def _difference_text(interval: Interval) -> str:
    return f"{interval.value:+.3g} [{interval.lo:+.3g}, {interval.hi:+.3g}]"


def _windows(result: CandidateResult, plan: Plan, prefix: str) -> Chart:
    points = [
        Point(str(w.index), 100 * math.expm1(min(50.0, float(w.dnll[w.finite].mean()))))
        for w in result.seen
        if w.finite.any()
    ]
    pooled_point = result.summary.judgement.dppl_pct
    points.append(Point("all", pooled_point.value, pooled_point.lo, pooled_point.hi))
    return Chart(
        f"{prefix}Δppl of each window",
        "forest",
        [Series("Δppl", points)],
        y_label="Δppl (%)",
        bands=margin_bands(plan),
    )


def _depth(result: CandidateResult, prefix: str) -> list[Block]:
    bins = result.breakdowns["depth"]
    points = [Point(b.name, b.kl.value, b.kl.interval.lo, b.kl.interval.hi) for b in bins]
    bands = [Band("floor", 0.0, result.floor)] if result.floor else []
    return [
        Chart(
            f"{prefix}{result.summary.kl_name}, by depth in the context",
            "line",
            [Series("mean KL", points)],
            x_label="tokens before",
            y_label=f"{result.summary.kl_name} (nats)",
            bands=bands,
        )
    ]


def _histogram(result: CandidateResult, prefix: str) -> Chart:
    """Share of tokens by the order of magnitude of their KL."""
    kl = pooled(result.seen, "kl")
    # Rounding can leave a hair below zero; both are no difference that could be seen.
    logs = np.log10(np.maximum(kl, 1e-9))
    edges = np.arange(-9, 2.5, 0.5)
    counts, _ = np.histogram(np.clip(logs, -9, 1.99), edges)
    some = np.flatnonzero(counts)
    shown = slice(some[0], some[-1] + 1)
    points = [
        Point(f"{10**edge:.0e}" if edge % 1 == 0 else f"{10**edge:.1e}", 100 * int(c) / kl.size)
        for edge, c in zip(edges[:-1][shown], counts[shown], strict=True)
    ]
    return Chart(
        f"{prefix}{result.summary.kl_name}, of single tokens",
        "bar",
        [Series("share of tokens", points)],
        x_label="KL from (nats)",
        y_label="%",
    )


def _bins(result: CandidateResult, name: str, prefix: str) -> Table:
    titles = {"confidence": "By the reference's confidence", "class": "By kind of token"}
    rows = [
        [
            b.name,
            f"{b.tokens:,}",
            kl_text(b.kl),
            f"{100 * math.expm1(b.dnll.value):+.2f}",
            f"{100 * b.top1:.2f}",
        ]
        for b in result.breakdowns[name]
    ]
    return Table(
        f"{prefix}{titles[name]}",
        ("tokens", "n", f"{result.summary.kl_name} (nats)", "Δppl (%)", "top-1 (%)"),
        rows,
        numeric=frozenset({1, 3, 4}),
    )


def _worst(result: CandidateResult, prefix: str) -> list[Block]:
    return [
        Quote(
            f"{prefix}Among the worst tokens: token {row['position']} of window {row['window']}, KL"
            f" {row['kld']:.3g}",
            f"{row['before']}⟦{row['token']}⟧",
            note=f"p {row['p_reference']:.3g} → {row['p_candidate']:.3g}",
        )
        for row in result.worst[:3]
        if row["kld"] > 0
    ]
