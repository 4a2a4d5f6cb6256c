"""The tables and charts of a decomposition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.lab.gap.buckets import Amount, Bucket
from assay.lab.gap.outcome import Outcome, Place, dppl, place
from assay.lab.gap.plan import engine_name
from assay.stats.equivalence import windows_needed
from assay.verdict import Band, Block, Chart, Finding, Metric, Point, Series, Severity, Table, Verdict


def headline(outcome: Outcome) -> list[Metric]:
    """The few figures that are read first."""
    d = outcome.decomposition
    change = dppl(d.total.dnll)
    gap = outcome.codec_gap.gap
    figures = [
        Metric(
            "total",
            f"KL {_span(d.total.kl)} nats, Δppl {change['value']:+.2f} % [{change['lo']:+.2f}, {change['hi']:+.2f}]",
        ),
        Metric(
            "left over", f"KL {_span(d.closure.kl, plus=True)} nats, ΔNLL {_span(d.closure.dnll, plus=True)}"
        ),
        Metric(
            "codec, candidate − reference",
            f"ΔNLL {_span(gap.dnll, plus=True)}, KL {_span(gap.kl, plus=True)} nats",
        ),
        Metric("separated from zero", ", ".join(outcome.causes) or "nothing"),
        Metric("scored", f"{d.tokens:,} tokens in {d.windows} windows"),
    ]
    if outcome.bytes:
        figures.append(Metric("cache", f"{outcome.bytes['ratio']:.2f}× smaller than bf16"))
    return figures


def blocks(outcome: Outcome) -> list[Block]:
    """Everything under the headline."""
    found: list[Block] = [_buckets(outcome), _waterfall(outcome), _orders(outcome)]
    found += _floors(outcome)
    found += _layers(outcome)
    found += _noise(outcome)
    found += _residual(outcome)
    found += _harness(outcome)
    found += _tables(outcome)
    found += _recommendations(outcome)
    return found


def _span(amount: Amount, *, plus: bool = False) -> str:
    sign = "+" if plus else ""
    return f"{amount.value:{sign}.3g} [{amount.lo:{sign}.3g}, {amount.hi:{sign}.3g}]"


def _share(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"


def _buckets(outcome: Outcome) -> Table:
    d = outcome.decomposition
    rows = [_row(b, outcome.causes, indent) for top in d.buckets for b, indent in _nested(top)]
    for name, found in (("sum of the buckets", d.by_path), ("left over", d.closure), ("total", d.total)):
        rows.append([name, _span(found.kl, plus=True), "", _span(found.dnll, plus=True), "", ""])
    return Table(
        "Where the difference comes from",
        ("bucket", "KL (nats)", "share", "ΔNLL (nats)", "share", "separated from zero"),
        rows,
        numeric=frozenset({2, 4}),
        note="KL from the one reference is the primary column; parts sum to their bucket. Intervals are two-sided 95 %, "
        "by window; the last column is Holm-adjusted over the buckets of its level. The total comes from a run of its own.",
    )


def _nested(bucket: Bucket) -> list[tuple[Bucket, str]]:
    return [(bucket, ""), *((part, "  ") for part in bucket.parts)]


def _row(bucket: Bucket, causes: Sequence[str], indent: str) -> list[str]:
    return [
        indent + bucket.name,
        _span(bucket.effect.kl, plus=True),
        _share(bucket.share_kl),
        _span(bucket.effect.dnll, plus=True),
        _share(bucket.share),
        bucket.note or _separated(bucket, causes),
    ]


def _separated(bucket: Bucket, causes: Sequence[str]) -> str:
    if bucket.name in causes:
        return "yes"
    return "below twice the floor" if bucket.separated else "no"


def _waterfall(outcome: Outcome) -> Chart:
    d = outcome.decomposition
    changes = [(b.name, b.effect.kl) for b in d.buckets] + [("left over", d.closure.kl)]
    return Chart(
        "From the reference to the candidate",
        "waterfall",
        [
            Series("change", [Point(name, a.value, a.lo, a.hi) for name, a in changes]),
            Series("total", [Point("total", d.total.kl.value, d.total.kl.lo, d.total.kl.hi)]),
        ],
        y_label="KL (nats)",
        bands=[Band("floor", 0.0, outcome.floors.repeat_kl)] if outcome.floors.repeat_kl > 0 else [],
    )


def _orders(outcome: Outcome) -> Table:
    names = {
        "engine_first": "engine, then codec",
        "codec_first": "codec, then engine",
        "shapley": "mean of both (Shapley)",
    }
    rows = [
        [
            title,
            _span(found["engine"].kl, plus=True),
            _span(found["codec"].kl, plus=True),
            _span(found["engine"].dnll, plus=True),
            _span(found["codec"].dnll, plus=True),
        ]
        for order, title in names.items()
        for found in [outcome.decomposition.orders[order]]
    ]
    return Table(
        "Both orders",
        ("order", "engine, KL", "codec, KL", "engine, ΔNLL", "codec, ΔNLL"),
        rows,
        note="What the order in which two things are changed makes of their shares; the interaction is the difference.",
    )


def _floors(outcome: Outcome) -> list[Block]:
    floors = outcome.floors
    named = {"reference, another batch": floors.reference, "candidate, another batch": floors.candidate}
    if floors.rounding:
        named["bf16 rounding after every layer"] = floors.rounding
    rows = [[name, _span(e.kl), _span(e.dnll, plus=True)] for name, e in named.items()]
    rows += [[f"switched alone: {s['name']}", _entry(s["kl"]), _entry(s)] for s in outcome.switches]
    return [
        Table(
            "What would be there anyway",
            ("against itself", "KL (nats)", "ΔNLL (nats)"),
            rows,
            note="Each engine scored again, under noise, or with one option switched; none of it is part of the sum.",
        )
    ]


def _layers(outcome: Outcome) -> list[Block]:
    if not outcome.layers:
        return []
    series = [
        Series(
            side,
            [
                Point(p.name.removeprefix("codec."), p.effect.kl.value, p.effect.kl.lo, p.effect.kl.hi)
                for p in found.parts
            ],
        )
        for side, found in outcome.layers.items()
    ]
    rows = [
        [
            side,
            _span(found.joint.kl),
            f"{sum(p.effect.kl.value for p in found.parts):.3g}",
            "–"
            if found.additivity is None
            else f"{found.additivity.value:.2f} [{found.additivity.lo:.2f}, {found.additivity.hi:.2f}]",
        ]
        for side, found in outcome.layers.items()
    ]
    return [
        Chart("KL of layers coded alone", "forest", series, y_label="KL (nats)"),
        Table(
            "Do layers add up?",
            ("engine", "all together, KL (nats)", "sum of the single ones", "joint / sum"),
            rows,
            numeric=frozenset({2}),
        ),
    ]


def _noise(outcome: Outcome) -> list[Block]:
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
    if not series:
        return []
    note = "; ".join(
        f"{side}: "
        + (
            "no linear range"
            if found.linear is None
            else f"linear from σ {found.linear[0]:g} to {found.linear[1]:g}"
        )
        for side, found in outcome.noise.items()
    )
    chart = Chart(
        "Noise in place of the codec's error",
        "line",
        series,
        x_label="σ over the root mean square",
        y_label="KL (nats)",
        log_x=True,
        log_y=True,
        note=note,
    )
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
        chart,
        Table(
            "The codec's error against noise of its size",
            ("engine", "relative error", "codec, KL (nats)", "noise, KL (nats)"),
            rows,
            numeric=frozenset({1, 2, 3}),
        ),
    ]


def _residual(outcome: Outcome) -> list[Block]:
    found = [r for r in outcome.residuals if r.error_ratio is not None]
    if not found:
        return []
    worst = sorted(found, key=lambda r: -abs(r.error_ratio.value - 1) if r.error_ratio else 0.0)[:12]
    rows = [
        [
            f"{r.layer}.{r.stream}",
            f"{r.relative_reference:.4f}",
            f"{r.relative_candidate:.4f}",
            _bounds(r.power_ratio),
            _bounds(r.error_ratio),
            f"{r.equal_streams} of {r.windows}",
        ]
        for r in worst
    ]
    return [
        Table(
            "What the codec is given and leaves out, where engines differ most",
            (
                "layer",
                "relative error, reference",
                "candidate",
                "power, cand./ref.",
                "error, cand./ref.",
                "equal streams",
            ),
            rows,
            numeric=frozenset({1, 2}),
            note=f"{len(found)} streams in all; ratios with intervals by window.",
        )
    ]


def _bounds(interval: Any) -> str:
    return "–" if interval is None else f"{interval.value:.4f} [{interval.lo:.4f}, {interval.hi:.4f}]"


def _harness(outcome: Outcome) -> list[Block]:
    return _effects(
        "The codec by every way of measuring",
        "how",
        [(side, name, e) for side, found in outcome.harness.items() for name, e in found.items()],
        "Each against the same engine without codec, by the same path, on the second half of each window.",
    )


_TABLES = {
    "reference": "the reference's",
    "candidate": "the candidate's",
    "candidate_minus_reference": "difference of both",
}


def _tables(outcome: Outcome) -> list[Block]:
    return _effects(
        "The codec with the tables of either engine",
        "tables",
        [(side, _TABLES[n], found[n]) for side, found in outcome.calibration.items() for n in _TABLES],
        "Each against the same engine without codec; the difference is paired by window.",
    )


def _effects(
    title: str, what: str, entries: Sequence[tuple[str, str, Mapping[str, Any]]], note: str
) -> list[Block]:
    """A table of effects by engine and by `what`; none where nothing was measured."""
    rows = [[side, name, _entry(entry["kl"]), _entry(entry)] for side, name, entry in entries]
    return [Table(title, ("engine", what, "KL (nats)", "ΔNLL (nats)"), rows, note=note)] if rows else []


def _entry(found: Mapping[str, float]) -> str:
    return f"{found['value']:.3g} [{found['lo']:.3g}, {found['hi']:.3g}]"


def _recommendations(outcome: Outcome) -> list[Block]:
    rows = [
        [
            r["action"],
            f"{r['bytes_ratio']:.2f}× (now {r['bytes_ratio_before']:.2f}×)",
            f"{r['kld']:.3g} [{r['kld_lo']:.3g}, {r['kld_hi']:.3g}]",
            _entry(r["saving_kld"]),
            "yes" if r["helps"] else "not shown",
        ]
        for r in outcome.recommendations
    ]
    if not rows:
        return []
    return [
        Table(
            "What would help, on fresh windows",
            ("instead", "smaller than bf16", "KL (nats)", "saving (nats)", "helps"),
            rows,
            note=f"{outcome.recommendations[0]['windows']} windows that took no part above, on the candidate.",
        )
    ]


# -----------------------------------------------------------------------------
# The verdict of a decomposition, and what there is to say of it.

BEYOND = 2.0
"""A KL within so many times a floor is not told from it."""


def verdict_of(outcome: Outcome) -> Verdict:
    """fail: a difference of set-up above the floor, or a total outside the margin; inconclusive: not closed or undecided."""
    severities = {f.id: f.severity for f in findings_of(outcome)}
    if Severity.ERROR in severities.values():
        return Verdict.FAIL
    open_ = {"gap.not_closed", "gap.undecided"} & set(severities)
    return Verdict.INCONCLUSIVE if open_ else Verdict.PASS


def findings_of(outcome: Outcome) -> list[Finding]:
    """Gravest first."""
    found = [*_setup(outcome), *_margin(outcome), *_closure(outcome), *_kernels(outcome)]
    if outcome.same:
        found.append(
            Finding(
                "gap.self_test",
                Severity.INFO,
                "reference and candidate are one engine and the codec changes nothing: this tests the instrument",
            )
        )
    available, wanted = outcome.text["windows_available"], outcome.plan.windows + outcome.plan.fresh
    if available < wanted:
        found.append(
            Finding(
                "gap.fewer_windows",
                Severity.WARNING,
                f"the text has {available} windows of {outcome.plan.length:,} tokens, {wanted} were asked for",
                remedies=("give more text with --text, or a smaller --length",),
            )
        )
    order = [Severity.ERROR, Severity.WARNING, Severity.INFO]
    return sorted(found, key=lambda f: order.index(f.severity))


def _setup(outcome: Outcome) -> list[Finding]:
    if not outcome.setup:
        return []
    engine = outcome.decomposition.bucket("engine").effect.kl
    above = engine.lo > BEYOND * outcome.floors.largest_kl
    names = ", ".join(outcome.setup)
    return [
        Finding(
            "gap.setup_difference",
            Severity.ERROR if above else Severity.WARNING,
            f"the engines do not run the same model: they differ in {names}"
            + ("" if above else " (no difference above the noise floor came of it)"),
            "Both report these settings of the checkpoint, and not the same.",
            evidence={
                "differences": {k: list(v) for k, v in outcome.setup.items()},
                "engine_kl": engine.to_json(),
                "floor": outcome.floors.largest_kl,
            },
            causes=("an override on one side", "a checkpoint whose config.json was changed"),
            remedies=("give both engines the same configuration, then measure again",),
        )
    ]


def _margin(outcome: Outcome) -> list[Finding]:
    total, plan = outcome.decomposition.total.dnll, outcome.plan
    found = dppl(total)
    text = f"{found['value']:+.2f} % [{found['lo']:+.2f}, {found['hi']:+.2f}]"
    where = place(total, plan.margin, outcome.decomposition.windows, same=outcome.same)
    evidence = {"dppl_pct": found, "margin_pct": 100 * plan.margin, "windows": outcome.decomposition.windows}
    if where == Place.OUTSIDE:
        return [
            Finding(
                "gap.outside_margin",
                Severity.ERROR,
                f"the candidate with {plan.codec} is not the reference within ±{100 * plan.margin:g} %: Δppl {text}",
                evidence=evidence,
                causes=tuple(outcome.causes),
                remedies=tuple(
                    f"{r['action']}: KL {r['kld']:.3g} instead of what it is, {r['bytes_ratio']:.2f}× smaller than bf16"
                    for r in outcome.recommendations
                    if r["helps"]
                )[:3]
                or ("use a finer codec",),
            )
        ]
    if where == Place.UNDECIDED:
        return [
            Finding(
                "gap.undecided",
                Severity.WARNING,
                f"{outcome.decomposition.windows} windows do not place the total against ±{100 * plan.margin:g} %: Δppl {text}",
                evidence=evidence,
                remedies=(_more(total, plan.margin, outcome.decomposition.windows),),
            )
        ]
    return []


def _more(total: Amount, margin: float, windows: int) -> str:
    needed = windows_needed(total.value, total.hi - total.value, windows, -margin, margin)
    return (
        f"run again with --windows {needed}" if needed and needed > windows else "run again with more windows"
    )


def _closure(outcome: Outcome) -> list[Finding]:
    if outcome.closed_kl.ok and outcome.closed_nll.ok:
        return []
    closure = outcome.decomposition.closure
    open_ = [
        f"{name} {amount.value:+.3g} [{amount.lo:+.3g}, {amount.hi:+.3g}] nats, allowed ±{state.bound:.3g}"
        for name, amount, state in (
            ("KL", closure.kl, outcome.closed_kl),
            ("ΔNLL", closure.dnll, outcome.closed_nll),
        )
        if not state.ok
    ]
    return [
        Finding(
            "gap.not_closed",
            Severity.WARNING,
            f"the buckets do not add up to the total that was measured on its own: {'; '.join(open_)}",
            "What is left over is more than a tenth of the total and the noise floor, or is not known as well as the total.",
            evidence={"closure": closure.to_json()},
            causes=("too few windows", "an engine whose numbers depend on batch or order"),
            remedies=("run again with more windows",),
        )
    ]


def _kernels(outcome: Outcome) -> list[Finding]:
    """Two engines with equal set-ups that still differ by more than rounding explains."""
    kinds = {engine_name(spec).kind for spec in (outcome.plan.reference, outcome.plan.candidate)}
    if len(kinds) == 1 or outcome.setup:
        return []
    engine = outcome.decomposition.bucket("engine")
    parts = {p.name: p.effect.kl for p in engine.parts}
    # Where both engines use one number format there is a single step, and it is the bucket.
    kernels = parts.get("engine.kernels", engine.effect.kl)
    rounding = parts["engine.rounding"].value if "engine.rounding" in parts else 0.0
    floor = max(outcome.floors.largest_kl, rounding)
    if kernels.lo <= BEYOND * floor:
        return []
    return [
        Finding(
            "gap.engine_above_floor",
            Severity.WARNING,
            f"the engines differ by KL {kernels.value:.3g}, more than rounding explains ({floor:.2g})",
            "Neither reports a setting that the other has not.",
            evidence={"kl": kernels.to_json(), "floor": floor},
            causes=("a setting that engines do not report", "a kernel of lower precision"),
            remedies=("switch attention backend and number format one by one, and compare",),
        )
    ]
