"""The tables and charts of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from assay.fidelity.candidate import CandidateResult, interval_text, kl_text, top1_text
from assay.fidelity.greedy_blocks import greedy_blocks
from assay.fidelity.observations import pooled
from assay.fidelity.plan import Plan
from assay.stats.equivalence import Grade
from assay.stats.holm import holm
from assay.stats.paired import paired_difference
from assay.verdict import Band, Block, Chart, Metric, Point, Quote, Series, Table


def headline(results: Sequence[CandidateResult]) -> list[Metric]:
    """The few figures that are read first."""
    if len(results) == 1:
        s = results[0].summary
        valid = not s.nonfinite
        return [
            Metric("grade", s.judgement.grade.value, valid=valid),
            Metric("Δppl", interval_text(s.judgement.dppl_pct, "%"), valid=valid),
            Metric(s.kl_name, f"{kl_text(s.kl)} nats", valid=valid),
            Metric("top-1", top1_text(s), valid=valid),
            Metric("scored", f"{s.tokens:,} tokens in {s.windows} windows"),
        ]
    return [Metric(r.label, r.summary.judgement.grade.value) for r in results]


def blocks(results: Sequence[CandidateResult], plan: Plan) -> list[Block]:
    """Everything under the headline."""
    found: list[Block] = [_candidates(results)]
    if len(results) > 1:
        found.append(_forest_of_candidates(results, plan))
        found += _pareto(results)
        found += _pairs(results)
    for result in results:
        prefix = "" if len(results) == 1 else f"{result.label}: "
        found.append(_windows(result, plan, prefix))
        found += _depth(result, prefix)
        found.append(_histogram(result, prefix))
        found += [_bins(result, name, prefix) for name in ("confidence", "class") if result.breakdowns[name]]
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
                s.judgement.grade.value,
                interval_text(s.judgement.dppl_pct, "%"),
                f"{'≥ ' if s.bounds else ''}{kl_text(s.kl)}",
                f"{s.quantiles['median'].value:.2g} / {s.quantiles['p99'].value:.2g} / {s.kl_max:.2g}",
                top1_text(s),
                f"{r.floor:.1g}" if r.floor else "–",
                f"{s.dnll.design_effect:.1f}" if math.isfinite(s.dnll.design_effect) else "–",
            ]
        )
    first = results[0].summary
    return Table(
        "Candidates against the reference",
        (
            "candidate",
            "grade",
            "Δppl",
            "KL (nats)",
            "KL median / p99 / max",
            "top-1",
            "floor",
            "design effect",
        ),
        rows,
        note=f"{first.windows} windows, {first.tokens:,} scored tokens, reference perplexity {first.ppl_reference:.3f}; "
        "intervals are two-sided 95 %, by window.",
    )


def _margin_bands(plan: Plan) -> list[Band]:
    accept, marginal = 100 * plan.margin_ppl, 100 * plan.marginal_ppl
    return [Band(Grade.ACCEPT.value, -accept, accept), Band(Grade.MARGINAL.value, -marginal, marginal)]


def _forest_of_candidates(results: Sequence[CandidateResult], plan: Plan) -> Chart:
    points = [Point(r.label, d.value, d.lo, d.hi) for r in results for d in [r.summary.judgement.dppl_pct]]
    return Chart(
        "Change of perplexity",
        "forest",
        [Series("Δppl", points)],
        y_label="Δppl (%)",
        bands=_margin_bands(plan),
    )


def _pareto(results: Sequence[CandidateResult]) -> list[Block]:
    points = [
        Point(size / 2**20, r.summary.kl.value, r.summary.kl.interval.lo, r.summary.kl.interval.hi)
        for r in results
        if isinstance(size := r.engine.get("weight_bytes"), int)
        if r.summary.kl.value > 0 and not r.self_test and not r.summary.bounds
    ]
    if len(points) < 2:
        return []
    return [
        Chart(
            "Size against KL",
            "scatter",
            [Series("candidates", points)],
            x_label="weights (MiB)",
            y_label="mean KL (nats)",
            log_y=True,
        )
    ]


def _pairs(results: Sequence[CandidateResult]) -> list[Block]:
    """Every two candidates on the same windows, with Holm's correction over all pairs; a bound is no party to this."""
    measured = [r for r in results if not r.summary.bounds]
    pairs = [(a, b) for i, a in enumerate(measured) for b in measured[i + 1 :]]
    if not pairs:
        return []
    differences = [
        paired_difference(_kl_sums(a), _kl_sums(b), [w.finite.sum() for w in a.seen]) for a, b in pairs
    ]
    # One window gives no p-value; it is no evidence of a difference.
    adjusted = holm([1.0 if math.isnan(d.p_value) else d.p_value for d in differences])
    rows = [
        [
            f"{a.label} − {b.label}",
            f"{d.difference.value:+.3g} [{d.difference.interval.lo:+.3g}, {d.difference.interval.hi:+.3g}]",
            f"{p:.2g}",
        ]
        for (a, b), d, p in zip(pairs, differences, adjusted, strict=True)
    ]
    return [
        Table(
            "Candidates against each other",
            ("pair", "difference of mean KL", "p (Holm)"),
            rows,
            note="Paired by window: what the windows have in common cancels.",
        )
    ]


def _kl_sums(result: CandidateResult) -> list[float]:
    return [float(w.kl[w.finite].sum()) for w in result.seen]


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
        bands=_margin_bands(plan),
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
    import numpy as np

    kl = pooled(result.seen, "kl")
    # Rounding can leave a hair below zero; both are no difference that could be seen.
    logs = np.log10(np.maximum(kl, 1e-9))
    edges = np.arange(-9, 2.5, 0.5)
    counts, _ = np.histogram(np.clip(logs, -9, 1.99), edges)
    points = [
        Point(f"1e{edge:+.1f}", 100 * int(c) / kl.size) for edge, c in zip(edges[:-1], counts, strict=True)
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
            f"{prefix}KL {row['kld']:.3g} at token {row['position']} of window {row['window']}",
            f"{row['before']}⟦{row['token']}⟧",
            note=f"p {row['p_reference']:.3g} → {row['p_candidate']:.3g}",
        )
        for row in result.worst[:3]
        if row["kld"] > 0
    ]
