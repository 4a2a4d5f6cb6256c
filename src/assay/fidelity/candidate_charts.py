"""Charts of several candidates of one run beside each other: forests of Δppl and KL, and size against KL."""

from __future__ import annotations

from collections.abc import Sequence

from assay.fidelity.candidate import CandidateResult
from assay.fidelity.plan import Plan
from assay.stats.equivalence import Grade
from assay.verdict import Band, Block, Chart, Point, Series


def margin_bands(plan: Plan) -> list[Band]:
    """The margins of Δppl, in percent."""
    accept, marginal = 100 * plan.margin_ppl, 100 * plan.marginal_ppl
    return [Band(Grade.ACCEPT.value, -accept, accept), Band(Grade.MARGINAL.value, -marginal, marginal)]


def short_names(labels: Sequence[str]) -> list[str]:
    """Labels without what all of them begin with, as far as a `?` or `&`: a chart has no room for the rest."""
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
        Chart("Change of perplexity", "forest", [Series("Δppl", dppl)], "", "Δppl (%)", margin_bands(plan))
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
    names = dict(zip((id(r) for _, r in rated), short_names([r.label for _, r in rated]), strict=True))
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
    """Whether `a` is no larger and no further from the reference than `b`, and better in one of the two."""
    (size_a, kl_a), (size_b, kl_b) = ((size, r.summary.kl.value) for size, r in (a, b))
    return size_a <= size_b and kl_a <= kl_b and (size_a, kl_a) != (size_b, kl_b)


def _floor_band(results: Sequence[CandidateResult]) -> list[Band]:
    floor = max(r.floor for r in results)
    return [Band("floor", 0.0, floor)] if floor else []
