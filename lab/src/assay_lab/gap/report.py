"""The figures, tables and charts of a decomposition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.stats import Interval
from assay.verdict import Band, Block, Chart, Metric, Point, Series, Table
from assay_lab.gap.buckets import Amount, Bucket, Effect
from assay_lab.gap.checks import Check
from assay_lab.gap.result import CAUSE_SHARE, GapResult, dppl


def headline(outcome: GapResult) -> list[Metric]:
    """The few figures that are read first."""
    d = outcome.decomposition
    figures = [
        Metric("total", f"KL {span_text(d.total.kl)} nats, Δppl {dppl_text(d.total.dnll)}"),
        Metric("causes", ", ".join(outcome.causes) or "none is certain"),
    ]
    if d.repeatability:
        again = f"KL {span_text(d.repeatability.kl, plus=True)} nats"
        figures.append(Metric("repeatability", f"{again} when both ends are measured once more"))
    if outcome.codec_gap:
        gap = outcome.codec_gap.gap
        text = f"ΔNLL {span_text(gap.dnll, plus=True)}, KL {span_text(gap.kl, plus=True)} nats"
        figures.append(Metric("codec, candidate − reference", text))
    figures.append(Metric("scored", f"{d.tokens:,} tokens in {d.windows} windows"))
    if outcome.bytes:
        figures.append(Metric("cache", f"{outcome.bytes['ratio']:.2f}× smaller than bf16"))
    return figures


def blocks(outcome: GapResult) -> list[Block]:
    """Everything under the headline."""
    parts = (
        _buckets,
        _recommendations,
        _checks,
        _floors,
        _waterfall,
        _orders,
        _layers,
        _noise,
        _residual,
        _harness,
        _tables,
    )
    return [block for part in parts for block in part(outcome)]


def measured_table(measured: Mapping[str, Effect]) -> Table:
    """What an interrupted run has measured before its buckets were known."""
    rows = [[name, span_text(e.kl), span_text(e.dnll, plus=True)] for name, e in measured.items()]
    return Table("What was measured", ("configuration", "KL (nats)", "ΔNLL (nats)"), rows)


def span_text(
    found: Amount | Interval | Mapping[str, float] | None,
    *,
    plus: bool = False,
    digits: str = ".3g",
) -> str:
    """A value with its interval; a dash where there is none."""
    if found is None:
        return "–"
    value, lo, hi = (
        (found["value"], found["lo"], found["hi"])
        if isinstance(found, Mapping)
        else (found.value, found.lo, found.hi)
    )
    form = ("+" if plus else "") + digits
    return f"{value:{form}} [{lo:{form}}, {hi:{form}}]"


def dppl_text(amount: Amount) -> str:
    """Δppl in per cent with its interval."""
    return span_text(dppl(amount), plus=True, digits=".2f").replace(" [", " % [")


def _share(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"


def _buckets(outcome: GapResult) -> list[Block]:
    d = outcome.decomposition
    rows = [
        _row(b, outcome.causes, indent)
        for top in d.buckets
        for b, indent in ((top, ""), *((part, "  ") for part in top.parts))
    ]
    ends = {"sum of the buckets": d.by_path, "repeatability": d.repeatability, "total": d.total}
    for name, found in ends.items():
        if found:
            rows.append(
                [name, span_text(found.kl, plus=True), "", span_text(found.dnll, plus=True), "", ""]
            )
    return [
        Table(
            "Where the difference comes from",
            ("bucket", "KL (nats)", "share", "ΔNLL (nats)", "share", "cause"),
            rows,
            numeric=frozenset({2, 4}),
            note=(
                f"A cause has {100 * CAUSE_SHARE:g} % of the KL or more, separated from zero (Holm)"
                " and above twice the floor. Intervals are 95 %, by window. Repeatability: the"
                " total of a run of its own minus the sum."
            ),
        )
    ]


def _row(bucket: Bucket, causes: Sequence[str], indent: str) -> list[str]:
    return [
        indent + bucket.name,
        span_text(bucket.effect.kl, plus=True),
        _share(bucket.share_kl),
        span_text(bucket.effect.dnll, plus=True),
        _share(bucket.share),
        bucket.note
        or ("yes" if bucket.name in causes else "too small" if bucket.separated else "no"),
    ]


def _checks(outcome: GapResult) -> list[Block]:
    names = {"kl": "KL", "dnll": "ΔNLL"}
    rows = [
        [
            c.name,
            names[c.quantity],
            span_text(c.predicted, plus=True),
            span_text(c.measured, plus=True),
            _held(c),
        ]
        for c in outcome.checks
    ]
    if not rows:
        return []
    note = "The buckets sum whatever they are; these measurements took no part in them."
    return [
        Table(
            "Do the buckets foretell other measurements?",
            ("of", "", "by the buckets", "measured", "holds"),
            rows,
            note=note,
        )
    ]


def _held(check: Check) -> str:
    return (
        "yes"
        if check.holds
        else f"no: off by {span_text(check.difference, plus=True)}, allowed {check.bound:.2g}"
    )


def _waterfall(outcome: GapResult) -> list[Block]:
    d = outcome.decomposition
    # A single bucket says nothing: its parts do.
    shown = d.buckets[0].parts if len(d.buckets) == 1 and d.buckets[0].parts else d.buckets
    changes = [(b.name, b.effect.kl) for b in shown]
    if d.repeatability:
        changes.append(("repeatability", d.repeatability.kl))
    floor = outcome.floors.repeat_kl
    return [
        Chart(
            "From the reference to the candidate",
            "waterfall",
            [
                Series("change", [Point(name, a.value, a.lo, a.hi) for name, a in changes]),
                Series("total", [Point("total", d.total.kl.value, d.total.kl.lo, d.total.kl.hi)]),
            ],
            y_label="KL (nats)",
            bands=[Band("floor", 0.0, floor)] if floor > 0 else [],
        )
    ]


def _orders(outcome: GapResult) -> list[Block]:
    names = {
        "engine_first": "engine, then codec",
        "codec_first": "codec, then engine",
        "shapley": "mean of both (Shapley)",
    }
    rows = [
        [
            title,
            *(span_text(found[f].kl, plus=True) for f in factors),
            *(span_text(found[f].dnll, plus=True) for f in factors),
        ]
        for order, title in names.items()
        if (found := outcome.decomposition.orders.get(order)) and (factors := ("engine", "codec"))
    ]
    if not rows:
        return []
    columns = ("order", "engine, KL", "codec, KL", "engine, ΔNLL", "codec, ΔNLL")
    note = (
        "What the order in which two things are changed makes of their shares; the interaction is"
        " the difference."
    )
    return [Table("Both orders", columns, rows, note=note)]


def _floors(outcome: GapResult) -> list[Block]:
    floors = outcome.floors
    named = {
        "reference, another batch": floors.reference,
        "candidate, another batch": floors.candidate,
        "bf16 rounding after every layer": floors.rounding,
    }
    rows = [[name, span_text(e.kl), span_text(e.dnll, plus=True)] for name, e in named.items() if e]
    rows += [
        [f"switched alone: {s['name']}", span_text(s["kl"]), span_text(s)] for s in outcome.switches
    ]
    if not rows:
        return []
    note = (
        "Each engine scored again, under noise, or with one option switched; none of it is part of"
        " the sum."
    )
    return [
        Table(
            "What would be there anyway",
            ("against itself", "KL (nats)", "ΔNLL (nats)"),
            rows,
            note=note,
        )
    ]


def _layers(outcome: GapResult) -> list[Block]:
    if not outcome.layers:
        return []
    series = [
        Series(
            side,
            [
                Point(
                    p.name.removeprefix("codec."), p.effect.kl.value, p.effect.kl.lo, p.effect.kl.hi
                )
                for p in found.parts
            ],
        )
        for side, found in outcome.layers.items()
    ]
    rows = [
        [
            side,
            span_text(found.joint.kl),
            f"{sum(p.effect.kl.value for p in found.parts):.3g}",
            span_text(found.additivity, digits=".2f"),
        ]
        for side, found in outcome.layers.items()
    ]
    columns = ("engine", "all together, KL (nats)", "sum of the single ones", "joint / sum")
    return [
        Chart("KL of layers coded alone", "forest", series, y_label="KL (nats)"),
        Table("Do layers add up?", columns, rows, numeric=frozenset({2})),
    ]


def _noise(outcome: GapResult) -> list[Block]:
    if not outcome.noise:
        return []
    series = [
        Series(
            side,
            [
                Point(s, e.kl.value, e.kl.lo, e.kl.hi)
                for s, e in zip(found.sigmas, found.effects, strict=True)
            ],
        )
        for side, found in outcome.noise.items()
    ]
    ranges = {
        side: (
            f"linear from σ {found.linear[0]:g} to {found.linear[1]:g}"
            if found.linear
            else "no linear range"
        )
        for side, found in outcome.noise.items()
    }
    rows = [
        [
            side,
            f"{m['sigma']:.3g}",
            f"{m['codec_kl']:.3g}",
            "–" if m["noise_kl"] is None else f"{m['noise_kl']:.3g}",
        ]
        for side, m in outcome.matched.items()
    ]
    return [
        Chart(
            "Noise in place of the codec's error",
            "line",
            series,
            x_label="σ over the root mean square",
            y_label="KL (nats)",
            log_x=True,
            log_y=True,
            note="; ".join(f"{side}: {text}" for side, text in ranges.items()),
        ),
        Table(
            "The codec's error against noise of its size",
            ("engine", "relative error", "codec, KL (nats)", "noise, KL (nats)"),
            rows,
            numeric=frozenset({1, 2, 3}),
        ),
    ]


def _residual(outcome: GapResult) -> list[Block]:
    found = [r for r in outcome.residuals if r.error_ratio is not None]
    if not found:
        return []
    worst = sorted(found, key=lambda r: -abs(r.error_ratio.value - 1) if r.error_ratio else 0.0)[
        :12
    ]
    rows = [
        [
            f"{r.layer}.{r.stream}",
            f"{r.relative_reference:.4f}",
            f"{r.relative_candidate:.4f}",
            span_text(r.power_ratio, digits=".4f"),
            span_text(r.error_ratio, digits=".4f"),
            f"{r.equal_streams} of {r.windows}",
        ]
        for r in worst
    ]
    columns = (
        "layer",
        "relative error, reference",
        "candidate",
        "power, cand./ref.",
        "error, cand./ref.",
        "equal streams",
    )
    return [
        Table(
            "What the codec is given and leaves out, where engines differ most",
            columns,
            rows,
            numeric=frozenset({1, 2}),
            note=f"{len(found)} streams in all; ratios with intervals by window.",
        )
    ]


def _harness(outcome: GapResult) -> list[Block]:
    return _effects(
        "The codec by every way of measuring",
        "how",
        [(side, name, e) for side, found in outcome.harness.items() for name, e in found.items()],
        "Each against the same engine without codec, by the same path, on the second half of each"
        " window.",
    )


_TABLES = {
    "reference": "the reference's",
    "candidate": "the candidate's",
    "candidate_minus_reference": "difference of both",
}


def _tables(outcome: GapResult) -> list[Block]:
    return _effects(
        "The codec with the tables of either engine",
        "tables",
        [
            (side, _TABLES[n], found[n])
            for side, found in outcome.calibration.items()
            for n in _TABLES
            if n in found
        ],
        "Each against the same engine without codec; the difference is paired by window.",
    )


def _effects(
    title: str, what: str, entries: Sequence[tuple[str, str, Mapping[str, Any]]], note: str
) -> list[Block]:
    """A table of effects by engine and by `what`; none where nothing was measured."""
    rows = [[side, name, span_text(entry["kl"]), span_text(entry)] for side, name, entry in entries]
    return (
        [Table(title, ("engine", what, "KL (nats)", "ΔNLL (nats)"), rows, note=note)]
        if rows
        else []
    )


def _recommendations(outcome: GapResult) -> list[Block]:
    rows = [
        [
            r["action"],
            f"{r['bytes_ratio']:.2f}× (now {r['bytes_ratio_before']:.2f}×)",
            f"{r['kld']:.3g} [{r['kld_lo']:.3g}, {r['kld_hi']:.3g}]",
            span_text(r["saving_kld"]),
            "yes" if r["helps"] else "not shown",
        ]
        for r in outcome.recommendations
    ]
    if not rows:
        return []
    columns = ("instead", "smaller than bf16", "KL (nats)", "saving (nats)", "helps")
    note = (
        f"{outcome.recommendations[0]['windows']} windows that took no part above, on the"
        " candidate."
    )
    return [Table("What would help, on fresh windows", columns, rows, note=note)]
