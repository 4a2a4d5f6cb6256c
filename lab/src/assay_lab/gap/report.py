"""A decomposition as it is shown: headline, tables and charts; its findings and its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.fidelity.compare_report import implausible
from assay.stats import Interval
from assay.stats.resolution import windows_needed
from assay.verdict import (
    Band,
    Block,
    Chart,
    Finding,
    Metric,
    Point,
    Series,
    Severity,
    Table,
    Verdict,
)
from assay_lab.gap.buckets import Amount, Bucket, Effect
from assay_lab.gap.outcome import CAUSE_SHARE, Check, Outcome, Place, dppl, place
from assay_lab.gap.plan import engine_name


def headline(outcome: Outcome) -> list[Metric]:
    """The few figures that are read first."""
    d = outcome.decomposition
    figures = [
        Metric("total", f"KL {_span(d.total.kl)} nats, Δppl {_dppl(d.total.dnll)}"),
        Metric("causes", ", ".join(outcome.causes) or "none is certain"),
    ]
    if d.repeatability:
        again = f"KL {_span(d.repeatability.kl, plus=True)} nats"
        figures.append(Metric("repeatability", f"{again} when both ends are measured once more"))
    if outcome.codec_gap:
        gap = outcome.codec_gap.gap
        text = f"ΔNLL {_span(gap.dnll, plus=True)}, KL {_span(gap.kl, plus=True)} nats"
        figures.append(Metric("codec, candidate − reference", text))
    figures.append(Metric("scored", f"{d.tokens:,} tokens in {d.windows} windows"))
    if outcome.bytes:
        figures.append(Metric("cache", f"{outcome.bytes['ratio']:.2f}× smaller than bf16"))
    return figures


def blocks(outcome: Outcome) -> list[Block]:
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
    rows = [[name, _span(e.kl), _span(e.dnll, plus=True)] for name, e in measured.items()]
    return Table("What was measured", ("configuration", "KL (nats)", "ΔNLL (nats)"), rows)


def _span(
    found: Amount | Interval | Mapping[str, float] | None,
    *,
    plus: bool = False,
    digits: str = ".3g",
) -> str:
    if found is None:
        return "–"
    value, lo, hi = (
        (found["value"], found["lo"], found["hi"])
        if isinstance(found, Mapping)
        else (found.value, found.lo, found.hi)
    )
    form = ("+" if plus else "") + digits
    return f"{value:{form}} [{lo:{form}}, {hi:{form}}]"


def _dppl(amount: Amount) -> str:
    return _span(dppl(amount), plus=True, digits=".2f").replace(" [", " % [")


def _share(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:+.1f} %"


def _buckets(outcome: Outcome) -> list[Block]:
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
                [name, _span(found.kl, plus=True), "", _span(found.dnll, plus=True), "", ""]
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
        _span(bucket.effect.kl, plus=True),
        _share(bucket.share_kl),
        _span(bucket.effect.dnll, plus=True),
        _share(bucket.share),
        bucket.note
        or ("yes" if bucket.name in causes else "too small" if bucket.separated else "no"),
    ]


def _checks(outcome: Outcome) -> list[Block]:
    names = {"kl": "KL", "dnll": "ΔNLL"}
    rows = [
        [
            c.name,
            names[c.quantity],
            _span(c.predicted, plus=True),
            _span(c.measured, plus=True),
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
        else f"no: off by {_span(check.difference, plus=True)}, allowed {check.bound:.2g}"
    )


def _waterfall(outcome: Outcome) -> list[Block]:
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


def _orders(outcome: Outcome) -> list[Block]:
    names = {
        "engine_first": "engine, then codec",
        "codec_first": "codec, then engine",
        "shapley": "mean of both (Shapley)",
    }
    rows = [
        [
            title,
            *(_span(found[f].kl, plus=True) for f in factors),
            *(_span(found[f].dnll, plus=True) for f in factors),
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


def _floors(outcome: Outcome) -> list[Block]:
    floors = outcome.floors
    named = {
        "reference, another batch": floors.reference,
        "candidate, another batch": floors.candidate,
        "bf16 rounding after every layer": floors.rounding,
    }
    rows = [[name, _span(e.kl), _span(e.dnll, plus=True)] for name, e in named.items() if e]
    rows += [[f"switched alone: {s['name']}", _span(s["kl"]), _span(s)] for s in outcome.switches]
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


def _layers(outcome: Outcome) -> list[Block]:
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
            _span(found.joint.kl),
            f"{sum(p.effect.kl.value for p in found.parts):.3g}",
            _span(found.additivity, digits=".2f"),
        ]
        for side, found in outcome.layers.items()
    ]
    columns = ("engine", "all together, KL (nats)", "sum of the single ones", "joint / sum")
    return [
        Chart("KL of layers coded alone", "forest", series, y_label="KL (nats)"),
        Table("Do layers add up?", columns, rows, numeric=frozenset({2})),
    ]


def _noise(outcome: Outcome) -> list[Block]:
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


def _residual(outcome: Outcome) -> list[Block]:
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
            _span(r.power_ratio, digits=".4f"),
            _span(r.error_ratio, digits=".4f"),
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


def _harness(outcome: Outcome) -> list[Block]:
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


def _tables(outcome: Outcome) -> list[Block]:
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
    rows = [[side, name, _span(entry["kl"]), _span(entry)] for side, name, entry in entries]
    return (
        [Table(title, ("engine", what, "KL (nats)", "ΔNLL (nats)"), rows, note=note)]
        if rows
        else []
    )


def _recommendations(outcome: Outcome) -> list[Block]:
    rows = [
        [
            r["action"],
            f"{r['bytes_ratio']:.2f}× (now {r['bytes_ratio_before']:.2f}×)",
            f"{r['kld']:.3g} [{r['kld_lo']:.3g}, {r['kld_hi']:.3g}]",
            _span(r["saving_kld"]),
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


# The verdict of a decomposition, and what there is to say of it.

BEYOND = 2.0
"""A KL within so many times a floor is not told from it."""
_OPEN = {"gap.not_repeated", "gap.not_foretold", "gap.undecided"}


def verdict_of(outcome: Outcome) -> Verdict:
    """fail: a difference of set-up above the floor, or a total outside the margin; inconclusive:
    the buckets were not confirmed, or the total is undecided."""
    found = findings_of(outcome)
    if any(f.severity is Severity.ERROR for f in found):
        return Verdict.FAIL
    return Verdict.INCONCLUSIVE if _OPEN & {f.id for f in found} else Verdict.PASS


def findings_of(outcome: Outcome) -> list[Finding]:
    """Gravest first."""
    found = [
        *_setup(outcome),
        *_margin(outcome),
        *_repeatability(outcome),
        *_foretold(outcome),
        *_kernels(outcome),
    ]
    if outcome.same:
        title = (
            "reference and candidate are one engine and no codec changes anything: this tests the"
            " instrument"
        )
        found.append(Finding("gap.self_test", Severity.INFO, title))
    available, wanted = outcome.text["windows_available"], outcome.plan.windows + outcome.plan.fresh
    if available < wanted:
        found.append(
            Finding(
                "gap.fewer_windows",
                Severity.WARNING,
                f"the text has {available} windows of {outcome.plan.length:,} tokens, {wanted} were"
                " asked for",
                remedies=("give more text with --text, or a smaller --length",),
            )
        )
    if (perplexity := outcome.text.get("ppl_reference")) is not None:
        found += [
            replace(f, id="gap.implausible_reference")
            for f in implausible(outcome.text, perplexity)
        ]
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
    total, plan, windows = (
        outcome.decomposition.total.dnll,
        outcome.plan,
        outcome.decomposition.windows,
    )
    within, text = f"±{100 * plan.margin:g} %", _dppl(total)
    where = place(total, plan.margin, windows, same=outcome.same)
    evidence = {"dppl_pct": dppl(total), "margin_pct": 100 * plan.margin, "windows": windows}
    if where is Place.UNDECIDED:
        title = f"{windows} windows do not place the total against {within}: Δppl {text}"
        more = _more(total, plan.margin, windows)
        return [
            Finding("gap.undecided", Severity.WARNING, title, evidence=evidence, remedies=(more,))
        ]
    if where is Place.INSIDE:
        return []
    candidate = f"the candidate with {plan.codec}" if plan.codec else "the candidate"
    helpful = [
        f"{r['action']}: KL {r['kld']:.3g}, {r['bytes_ratio']:.2f}× smaller than bf16"
        for r in outcome.recommendations
        if r["helps"]
    ]
    otherwise = (
        "use a finer codec"
        if plan.codec
        else "switch the settings that are named as causes, one by one"
    )
    return [
        Finding(
            "gap.outside_margin",
            Severity.ERROR,
            f"{candidate} is not the reference within {within}: Δppl {text}",
            evidence=evidence,
            causes=tuple(outcome.causes[:5]),
            remedies=tuple(helpful[:3]) or (otherwise,),
        )
    ]


def _more(total: Amount, margin: float, windows: int) -> str:
    needed = windows_needed(total.value, total.hi - total.value, windows, -margin, margin)
    return (
        f"run again with --windows {needed}"
        if needed and needed > windows
        else "run again with more windows"
    )


def _repeatability(outcome: Outcome) -> list[Finding]:
    left = outcome.decomposition.repeatability
    if left is None or outcome.repeats:
        return []
    open_ = [
        f"{name} {_span(amount, plus=True)} nats, allowed ±{state.bound:.3g}"
        for name, amount, state in (
            ("KL", left.kl, outcome.repeats_kl),
            ("ΔNLL", left.dnll, outcome.repeats_nll),
        )
        if state and not state.ok
    ]
    return [
        Finding(
            "gap.not_repeated",
            Severity.WARNING,
            f"measured once more, the total is not the sum of the buckets: {'; '.join(open_)}",
            "The difference is more than a tenth of the total and the noise floor, or is not known"
            " as well as the total.",
            evidence={"repeatability": left.to_json()},
            causes=("too few windows", "an engine whose numbers depend on batch or order"),
            remedies=("run again with more windows",),
        )
    ]


def _foretold(outcome: Outcome) -> list[Finding]:
    failed = [check for check in outcome.checks if not check.holds]
    if not failed:
        return []
    named = "; ".join(f"{c.name}: off by {_span(c.difference, plus=True)} nats" for c in failed)
    return [
        Finding(
            "gap.not_foretold",
            Severity.WARNING,
            f"the buckets do not foretell what was measured apart from them: {named}",
            "Buckets sum whatever they are; this test can fail.",
            evidence={"checks": [c.name for c in failed]},
            causes=(
                "codec and engine act on each other (the bucket interaction)",
                "too few windows, or text of several kinds",
                "an engine whose numbers depend on batch or order",
            ),
            remedies=("run again with more windows (--windows, --fresh)",),
        )
    ]


def _kernels(outcome: Outcome) -> list[Finding]:
    """Two engines with equal set-ups that still differ by more than rounding explains."""
    kinds = {
        engine_name(spec, codec=False).kind
        for spec in (outcome.plan.reference, outcome.plan.candidate)
    }
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
            f"the engines differ by KL {kernels.value:.3g}, more than rounding explains"
            f" ({floor:.2g})",
            "Neither reports a setting that the other has not.",
            evidence={"kl": kernels.to_json(), "floor": floor},
            causes=("a setting that engines do not report", "a kernel of lower precision"),
            remedies=("switch attention backend and number format one by one, and compare",),
        )
    ]
