"""The figures of `reproduction.py`: what each published point becomes, with intervals by window.

    python reproduction_tables.py [ROWS …] [--out results/reproduction.json]

Means a token with CR1 intervals (Student's t, G − 1), differences paired by window. *Tail* is the
last 64 tokens of each window, the published sample of a passage; samples of the published size are
4 windows of it, Δppl as there: the arithmetic mean of the passages' exp(mean ΔNLL) − 1. Whatever
was not measured is left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from assay.stats import Interval, Resampling, cluster_ratio, percent_change
from assay_lab.kv.noise_growth import noise_growth
from reproduction_rows import Rows, Sums

RESULTS = Path(__file__).parent / "results"
RATIOS = (1.0, 0.95)
SIZES = (
    ("cache replaced, share 1.0", 7.8, "decode vr=1.0"),
    ("in-forward, share 0.95", 35.3, "joint vr=0.95"),
    ("keys alone", 22.6, "k only vr=0.95"),
    ("values alone", 11.1, "v only vr=0.95"),
    ("snapshot", 29.1, "snapshot vr=0.95"),
)
"""Published Δppl %, and the row that asks for it."""
CHANGES = (
    (
        "share 0.95 and in-forward for share 1.0 and a replaced cache",
        27.5,
        "joint vr=0.95",
        "decode vr=1.0",
    ),
    ("snapshot for in-forward", -6.2, "snapshot vr=0.95", "joint vr=0.95"),
    (
        "without Q-preconditioning, norm lost",
        117.5,
        "joint vr=0.95 q=off norm=lost",
        "joint vr=0.95",
    ),
    ("without Q-preconditioning, norm kept", None, "joint vr=0.95 q=off", "joint vr=0.95"),
    ("moments of queries after RoPE for before", 19.0, "joint vr=0.95", "plain vr=0.95"),
    ("tables of the other engine", 3.4, "tables of the other vr=0.95", "joint vr=0.95"),
    ("only the prefix coded", 0.1, "prefix only vr=0.95", "joint vr=0.95"),
    ("keys with 4 bits", 2.0, "K4 vr=0.95", "joint vr=0.95"),
    ("keys and values with 4 bits", -8.0, "K4V4 vr=0.95", "joint vr=0.95"),
    ("outliers of values apart, values alone", -4.1, "v only outliers vr=0.95", "v only vr=0.95"),
    ("the exact layers with 4 bits", None, "exact at 4 bits vr=0.95", "joint vr=0.95"),
    ("10 layers exact, at the ends", None, "exact 10 vr=0.95", "joint vr=0.95"),
    ("10 layers exact, the hottest", None, "exact 10 hottest vr=0.95", "joint vr=0.95"),
)
"""Published change in points of Δppl (None: none was), the row with it and the row without."""
KERNELS = (
    ("eager attention", "hf-eager", "hf", None),
    ("another attention backend", "vllm-triton", "vllm", 2.5),
)
PASSAGES = 4


def mean(sums: Sums, tokens: Sums) -> Interval:
    """A mean a token."""
    return cluster_ratio(sums, tokens).interval


def effect(rows: Rows, name: str, part: str = "all") -> dict[str, Any]:
    """KL, Δppl %, top-1 % and the ratio of one row."""
    tokens = rows.sums(name, "tokens", part)
    return {
        "kl": shown(mean(rows.sums(name, "kl", part), tokens)),
        "dppl_pct": shown(percent_change(mean(rows.sums(name, "dnll", part), tokens))),
        "top1_pct": shown(mean(100 * rows.sums(name, "top1", part), tokens)),
        **({"ratio": rows.rows[name]["ratio"]} if "ratio" in rows.rows[name] else {}),
        **({"passages": passages(changes(rows, [name]))} if part == "tail" else {}),
        "windows": rows.sums(name, "tokens", part, each=True).size,
        "tokens": int(tokens.sum()),
    }


def difference(rows: Rows, a: Sequence[str], b: Sequence[str], part: str = "all") -> dict[str, Any]:
    """The sum of rows `a` minus that of `b`, paired by window: nats a token of KL and of NLL."""
    sums = partial(rows.sums, part=part, among=(*a, *b))
    tokens = sums(a[0], "tokens")
    found = {}
    for what in ("kl", "dnll"):
        total = sum(sums(n, what) for n in a) - sum(sums(n, what) for n in b)
        found[what] = shown(mean(np.asarray(total), tokens))
    return found


def ratio(rows: Rows, above: Sequence[str], below: Sequence[str]) -> dict[str, float]:
    """Σ KL of `above` over Σ KL of `below`."""
    over, under = (
        np.asarray(sum(rows.sums(n, "kl", among=(*above, *below)) for n in ns))
        for ns in (above, below)
    )
    return shown(cluster_ratio(over, under).interval)


def shown(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "lo": interval.lo, "hi": interval.hi}


def changes(rows: Rows, names: Sequence[str]) -> Sums:
    """Δppl % of the tail of each window, added up over rows."""
    sums = partial(rows.sums, part="tail", each=True, among=names)
    return np.asarray(sum(100 * np.expm1(sums(n, "dnll") / sums(n, "tokens")) for n in names))


def passages(each: Sums) -> dict[str, Any]:
    """What every disjoint sample of the published size would have said; each mean over passages, as
    published.
    """
    groups = groups_of(each)
    found: dict[str, Any] = {
        "mean over passages": shown(cluster_ratio(each, np.ones_like(each)).interval)
    }
    if groups.size:
        low, middle, high = (float(np.quantile(groups, q)) for q in (0, 0.5, 1))
        found |= {
            "lowest": low,
            "median": middle,
            "highest": high,
            "negative": int((groups < 0).sum()),
        }
        found["deviation"] = float(groups.std(ddof=1)) if groups.size > 1 else math.nan
    return found | {"samples": int(groups.size)}


def points(rows: Rows, a: str, b: str) -> dict[str, float]:
    """Δppl of a row minus that of another, as published: points, the mean over the tails of
    windows, paired.
    """
    sums = partial(rows.sums, part="tail", each=True, among=(a, b))
    each = [100 * np.expm1(sums(n, "dnll") / sums(n, "tokens")) for n in (a, b)]
    return shown(cluster_ratio(each[0] - each[1], np.ones(each[0].size)).interval)


def claims(rows: Rows, kinds: Sequence[str] = ("hf", "vllm")) -> list[dict[str, Any]]:
    """Published sizes and changes beside what each engine shows.

    A size survives where it lies among samples of four passages. A change survives where the
    interval lies on its side of zero; it does not where it lies on the other, or holds zero and not
    the change; else it is undecided.
    """
    found: list[dict[str, Any]] = []
    for name, published, row in SIZES:
        for kind in (k for k in kinds if rows.has(f"{k} {row}")):
            seen = passages(changes(rows, [f"{kind} {row}"]))
            inside = seen.get("lowest", math.inf) <= published <= seen.get("highest", -math.inf)
            told = "survives" if inside else "does not" if seen["samples"] else "undecided"
            found.append(
                {"claim": name, "published": published, "engine": kind, **seen, "verdict": told}
            )
    pairs = [(name, said, k, f"{k} {a}", f"{k} {b}") for name, said, a, b in CHANGES for k in kinds]
    for name, kind, base, said in KERNELS:
        same = ("joint vr=0.95", "joint vr=1.0", "decode vr=1.0")
        pairs += [(f"{name}: {n}", said, kind, f"{kind} {n}", f"{base} {n}") for n in same]
    for name, said, kind, a, b in pairs:
        if rows.has(a, b):
            found.append(
                {"claim": name, "published": said, "engine": kind, "points": points(rows, a, b)}
            )
            found[-1]["verdict"] = judged(found[-1]["points"], said)
            if "all" in rows.rows[a] and "all" in rows.rows[b]:
                found[-1]["KL"] = difference(rows, [a], [b])["kl"]
    return found


def judged(change: dict[str, float], published: float | None) -> str:
    """The rule of `claims` for a change."""
    lo, hi = change["lo"], change["hi"]
    if published is None:
        return "–"
    if lo > 0 or hi < 0:
        return "survives" if (lo > 0) == (published > 0) else "does not"
    return "undecided" if lo <= published <= hi else "does not"


def groups_of(each: Sums) -> Sums:
    """Means of the disjoint samples of the published size."""
    return np.asarray(each[: each.size // PASSAGES * PASSAGES].reshape(-1, PASSAGES).mean(axis=1))


def parts_of(rows: Rows, kind: str) -> dict[str, Any]:
    """Streams, layers, noise, boundary and harness of one engine."""
    found: dict[str, Any] = {
        "rows": {n: effect(rows, n) for n in rows.named(f"{kind} ") if "all" in rows.rows[n]}
    }
    found["tail"] = {
        n: effect(rows, n, "tail") for n in rows.named(f"{kind} ") if " layer " not in n
    }
    for vr in RATIOS:
        joint, k, v = (f"{kind} {what} vr={vr}" for what in ("joint", "k only", "v only"))
        if rows.has(joint, k, v):
            found[f"streams vr={vr}"] = {
                "joint minus sum": difference(rows, [joint], [k, v]),
                "joint over sum": ratio(rows, [joint], [k, v]),
            }
        if rows.has(joint, snapshot := f"{kind} snapshot vr={vr}"):
            found[f"inforward minus snapshot vr={vr}"] = difference(rows, [joint], [snapshot])
        found |= norms(rows, kind, vr)
        modes = [f"{kind} {mode} vr={vr}" for mode in ("snapshot", "decode", "joint")]
        if rows.has(*modes):
            found[f"harness, tail, vr={vr}"] = {
                "decode minus snapshot": difference(rows, [modes[1]], [modes[0]], "tail"),
                "inforward minus decode": difference(rows, [modes[2]], [modes[1]], "tail"),
            }
        alone = rows.named(f"{kind} layer ", f" vr={vr}")
        if alone and rows.has(joint):
            found[f"layers vr={vr}"] = layers(rows, joint, alone)
        for name in rows.named(f"{kind} exact ", f" vr={vr}"):
            if rows.has(joint):
                found.setdefault(f"boundary vr={vr}", {})[name] = {
                    "saves": difference(rows, [joint], [name]),
                    "ratio": rows.rows[name].get("ratio"),
                }
    found |= noise(rows, kind)
    for vr in RATIOS:
        found |= coherence(rows, kind, vr)
        found |= cells(rows, kind, vr)
    return found


def cells(rows: Rows, kind: str, vr: float) -> dict[str, Any]:
    """What each cell that differs from the recipe in one thing changes, paired; what the exact
    layers cost alone.
    """
    joint = f"{kind} joint vr={vr}"
    starts = ("plain", "prefix only", "K4", "V outliers", "exact at", "tables of")
    names = [n for start in starts for n in rows.named(f"{kind} {start}", f" vr={vr}")]
    found = (
        {n.removeprefix(f"{kind} "): difference(rows, [n], [joint]) for n in names}
        if rows.has(joint)
        else {}
    )
    for name in (
        "K4",
        "V outliers",
        "exact at 4 bits",
        "K4V4",
        "plain",
        "prefix only",
        "tables of the other",
    ):
        if rows.has(joint, f"{kind} {name} vr={vr}"):
            found[f"{name} vr={vr}, tail"] = difference(
                rows, [f"{kind} {name} vr={vr}"], [joint], "tail"
            )
    values, apart = f"{kind} v only vr={vr}", f"{kind} v only outliers vr={vr}"
    if rows.has(values, apart):
        found[f"v only outliers minus v only vr={vr}"] = difference(rows, [apart], [values])
        found[f"v only outliers minus v only vr={vr}, tail"] = difference(
            rows, [apart], [values], "tail"
        )
    replaced, plain = f"{kind} decode vr={vr}", f"{kind} decode plain vr={vr}"
    if rows.has(replaced, plain):
        found[f"decode plain vr={vr}, tail"] = difference(rows, [plain], [replaced], "tail")
    return {f"cells minus joint vr={vr}": found} if found else {}


def coherence(rows: Rows, kind: str, vr: float) -> dict[str, Any]:
    """How KL grows with the number of coded layers: as its power 1 where errors are independent, 2
    where they add up.

    As layers differ, also over the sum of the same layers alone: 1 where errors are independent,
    their number where they add up.
    """
    names = sorted(rows.named(f"{kind} nested ", f" vr={vr}"))
    if len(names) < 2:
        return {}
    counts = [int(n.split()[2]) for n in names]
    alone = {
        n: [f"{kind} layer {layer:02d} vr={vr}" for layer in rows.rows[n].get("layers") or ()]
        for n in names
    }
    every, joint = rows.named(f"{kind} layer ", f" vr={vr}"), f"{kind} joint vr={vr}"
    if rows.has(joint) and len(every) > counts[-1]:
        names, counts, alone = [*names, joint], [*counts, len(every)], alone | {joint: every}
    sums = [list(rows.sums(n, "kl", among=names)) for n in names]
    tokens = [int(t) for t in rows.sums(names[0], "tokens", among=names)]
    growth = noise_growth(counts, sums, tokens, Resampling(2000, 0))
    total = [sum(s) for s in sums]
    pairs = zip(
        zip(counts, total, strict=True), zip(counts[1:], total[1:], strict=True), strict=False
    )
    return {
        f"coded layers vr={vr}": {
            "KL": {
                str(n): shown(mean(np.asarray(s), np.asarray(tokens)))
                for n, s in zip(counts, sums, strict=True)
            },
            "power": growth.slope and shown(growth.slope),
            "power between neighbours": {
                f"{a} to {b}": math.log(y / x) / math.log(b / a) for (a, x), (b, y) in pairs
            },
            "over the sum of the same layers alone": {
                str(count): ratio(rows, [n], alone[n])
                for count, n in zip(counts, names, strict=True)
                if alone[n] and rows.has(*alone[n])
            },
        }
    }


def norms(rows: Rows, kind: str, vr: float) -> dict[str, Any]:
    """What the lost norm and Q-preconditioning do, apart; published was only the third against the
    fourth.

    Published, preconditioned keys kept their norm and others lost it.
    """
    joint = f"{kind} joint vr={vr}"
    steps = {
        "norm lost, with Q": (f"{joint} norm=lost", joint),
        "norm lost, without Q": (f"{joint} q=off norm=lost", f"{joint} q=off"),
        "as published: without Q and norm, minus with both": (f"{joint} q=off norm=lost", joint),
        "Q on minus off, norm kept": (joint, f"{joint} q=off"),
        "Q on minus off, norm lost": (f"{joint} norm=lost", f"{joint} q=off norm=lost"),
    }
    found = {n: difference(rows, [a], [b]) for n, (a, b) in steps.items() if rows.has(a, b)}
    return {f"norm and Q vr={vr}": found} if found else {}


def layers(rows: Rows, joint: str, alone: Sequence[str]) -> dict[str, Any]:
    """Single layers, their sum, and all together."""
    among = (joint, *alone)
    sums = partial(rows.sums, among=among)
    tokens = sums(joint, "tokens")
    nll = [mean(sums(n, "dnll"), tokens) for n in alone]
    kl = [mean(sums(n, "kl"), tokens) for n in alone]
    tail = np.asarray(sum(sums(n, "dnll", "tail") for n in alone))
    single = np.concatenate([groups_of(changes(rows, [n])) for n in alone])
    return {
        "layers": len(alone),
        "sum": {
            w: shown(mean(np.asarray(sum(sums(n, w) for n in alone)), tokens))
            for w in ("kl", "dnll")
        },
        "joint": {w: shown(mean(sums(joint, w), tokens)) for w in ("kl", "dnll")},
        "each": {n: shown(i) for n, i in zip(alone, kl, strict=True)},
        "joint over sum of KL": ratio(rows, [joint], alone),
        "joint minus sum": difference(rows, [joint], alone),
        "dnll intervals with 0": sum(0.0 in i for i in nll),
        "kl": [min(i.value for i in kl), max(i.value for i in kl)],
        "kl above 0": sum(i.lo > 0 for i in kl),
        "published size: single layers": {
            "negative": int((single < 0).sum()),
            "samples": int(single.size),
        },
        "published size: sum": passages(changes(rows, alone)),
        "published size: joint": passages(changes(rows, [joint])),
        "tail sum dnll": shown(mean(tail, sums(joint, "tokens", "tail"))),
    }


def noise(rows: Rows, kind: str) -> dict[str, Any]:
    """How KL grows with the size of noise; sizes whose KL is under twice the smallest say nothing
    of that.
    """
    names = sorted(rows.named(f"{kind} noise "), key=lambda n: float(n.split()[2]))
    if len(names) < 2:
        return {}
    sums = partial(rows.sums, among=names)
    floor = float(sums(names[0], "kl").sum())
    above = [n for n in names if float(sums(n, "kl").sum()) > 2 * floor]
    tokens = [int(t) for t in sums(names[0], "tokens")]
    growth = noise_growth(
        [float(n.split()[2]) for n in above],
        [list(sums(n, "kl")) for n in above],
        tokens,
        Resampling(2000, 0),
    )
    level = {float(n.split()[2]): float(sums(n, "kl").sum()) for n in above}
    steps = zip(level, list(level)[1:], strict=False)
    return {
        "noise slope": growth.slope and shown(growth.slope),
        "noise slope between neighbours": {
            f"{a:g} to {b:g}": {
                "as measured": math.log(level[b] / level[a]) / math.log(b / a),
                "less the smallest": (
                    math.log((level[b] - floor) / (level[a] - floor)) / math.log(b / a)
                ),
            }
            for a, b in steps
        },
        "quadratic range": [growth.lo, growth.hi],
    }


def ladder(rows: Rows) -> dict[str, Any]:
    """From the published way of transformers to that of vLLM, one change at a time, on the tail of
    each window.
    """
    path = [
        ("share of variance 1.0 → 0.95", "hf decode vr=1.0", "hf decode vr=0.95"),
        ("harness: cache replaced → in-forward", "hf decode vr=0.95", "hf joint vr=0.95"),
        ("engine: transformers → vLLM", "hf joint vr=0.95", "vllm joint vr=0.95"),
        ("share and harness, on transformers alone", "hf decode vr=1.0", "hf joint vr=0.95"),
        ("all", "hf decode vr=1.0", "vllm joint vr=0.95"),
        ("engine alone, share 1.0", "hf joint vr=1.0", "vllm joint vr=1.0"),
        ("engine alone, cache replaced", "hf decode vr=0.95", "vllm decode vr=0.95"),
    ]
    found = {n: difference(rows, [b], [a], "tail") for n, a, b in path if rows.has(a, b)}
    wide = [("engine, all tokens, share 1.0", 1.0), ("engine, all tokens, share 0.95", 0.95)]
    for name, vr in wide:
        if rows.has(f"hf joint vr={vr}", f"vllm joint vr={vr}"):
            found[name] = difference(rows, [f"vllm joint vr={vr}"], [f"hf joint vr={vr}"])
    shared = [n.removeprefix("vllm ") for n in rows.named("vllm ")]
    found["engine, row by row"] = {
        n: difference(rows, [f"vllm {n}"], [f"hf {n}"], "tail" if n.startswith("decode") else "all")
        for n in shared
        if rows.has(f"hf {n}")
    }
    for other, kind in (("hf-eager", "hf"), ("vllm-triton", "vllm")):
        same = [
            n.removeprefix(f"{other} ")
            for n in rows.named(f"{other} ")
            if rows.has(n.replace(other, kind, 1))
        ]
        if same:
            found[f"{other} minus {kind}"] = {
                n: difference(
                    rows,
                    [f"{other} {n}"],
                    [f"{kind} {n}"],
                    "tail" if n.startswith("decode") else "all",
                )
                for n in same
            }
    for name in ("hf decode vr=1.0", "vllm joint vr=0.95"):
        if rows.has(name):
            found[f"published size: {name}"] = passages(changes(rows, [name]))
    return found


def preconditioning(rows: Rows) -> dict[str, Any]:
    """On minus off, everything else equal."""
    found = {}
    for on in rows.named("hf precond "):
        for kind in ("q=on", "q=plain"):
            off = on.replace(kind, "q=off")
            if kind in on and rows.has(off):
                found[on.removeprefix("hf precond ")] = {
                    "off": effect(rows, off)["kl"],
                    "on": effect(rows, on)["kl"],
                    "on minus off": difference(rows, [on], [off])["kl"],
                    "on over off": ratio(rows, [on], [off]),
                }
    for on in rows.named("hf keys ", "q=on"):
        off = on.replace("q=on", "q=off")
        if rows.has(off):
            found[on.removeprefix("hf ").removesuffix(" q=on")] = {
                "off": effect(rows, off)["kl"],
                "on": effect(rows, on)["kl"],
                "on minus off": difference(rows, [on], [off])["kl"],
                "on over off": ratio(rows, [on], [off]),
            }
    return found


def said(figure: dict[str, float], form: str = ".3g") -> str:
    return f"{figure['value']:{form}} [{figure['lo']:{form}}, {figure['hi']:{form}}]"


def markdown(figures: dict[str, Any]) -> str:
    """Tables of everything, to choose from."""
    lines = ["# A published decomposition, point by point", ""]
    for kind in (k for k in figures if "rows" in figures[k]):
        lines += [
            f"## {kind}",
            "",
            (
                "| row | KL, nats | Δppl % | top-1 % | smaller | tail: KL | tail: Δppl % | mean"
                " over passages |"
            ),
        ]
        lines += ["|---|---|---|---|---:|---|---|---|"]
        wide, tail = figures[kind]["rows"], figures[kind]["tail"]
        for name in wide | tail:
            cells = ["–"] * 7
            if name in wide:
                row = wide[name]
                cells[:3] = [
                    said(row["kl"]),
                    said(row["dppl_pct"], "+.2f"),
                    said(row["top1_pct"], ".2f"),
                ]
                cells[3] = f"{row['ratio']:.2f}×" if "ratio" in row else "–"
            if name in tail:
                cells[4:] = [said(tail[name]["kl"]), said(tail[name]["dppl_pct"], "+.2f")]
                cells.append(said(tail[name]["passages"]["mean over passages"], "+.2f"))
            some = (wide | tail)[name]["windows"]
            fewer = (
                f" ({some} windows)"
                if some < max(row["windows"] for row in (wide | tail).values())
                else ""
            )
            lines.append(f"| {name.removeprefix(kind + ' ')}{fewer} | {' | '.join(cells)} |")
        rest = {k: v for k, v in figures[kind].items() if k not in ("rows", "tail")}
        lines += ["", *flat(rest), ""]
    lines += [
        "## claims",
        "",
        "| claim | published | engine | tail, mean over passages | KL, all tokens | verdict |",
    ]
    lines += ["|---|---:|---|---|---|---|"]
    for one in figures["claims"]:
        shown_ = one.get("points") or one["mean over passages"]
        told = "–" if one["published"] is None else f"{one['published']:+.1f}"
        kl = said(one["KL"], "+.3f") if "KL" in one else "–"
        lines.append(
            f"| {one['claim']} | {told} | {one['engine']} | {said(shown_, '+.1f')} | {kl} |"
            f" {one['verdict']} |"
        )
    lines.append("")
    for part in ("ladder", "preconditioning"):
        lines += [f"## {part}", "", *flat(figures[part]), ""]
    return "\n".join(lines) + "\n"


def flat(tree: dict[str, Any], before: str = "") -> list[str]:
    """Nested figures as list items, intervals in one."""
    lines = []
    for name, value in tree.items():
        label = f"{before}{name}"
        if isinstance(value, dict) and set(value) == {"value", "lo", "hi"}:
            lines.append(f"- {label}: {said(value, '.4g')}")
        elif isinstance(value, dict):
            lines += flat(value, f"{label}: ")
        else:
            lines.append(f"- {label}: {rounded(value)}")
    return lines


def rounded(value: Any) -> Any:
    """Numbers of a tree to six digits; an infinite bound (one window) is null."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / "reproduction_rows.npz"])
    parser.add_argument("--out", type=Path, default=RESULTS / "reproduction.json")
    given = parser.parse_args()
    rows = Rows(given.files)
    kinds = dict.fromkeys(("hf", "vllm", *(name.split()[0] for name in rows.rows)))
    figures: dict[str, Any] = {kind: parts_of(rows, kind) for kind in kinds}
    for kind in kinds:
        if near := rows.rows.get(f"{kind} engine", {}).get("symmetric_top20"):
            figures[kind]["symmetric KL of 20 ids, tail"] = shown(
                mean(np.asarray(near), np.ones(len(near)))
            )
    figures["claims"] = claims(rows)
    figures["ladder"] = ladder(rows)
    figures["preconditioning"] = preconditioning(rows)
    figures["facts"] = rows.facts
    figures["seconds"] = {n: r["seconds"] for n, r in rows.rows.items()}
    given.out.write_text(
        json.dumps(rounded(figures), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    given.out.with_suffix(".md").write_text(markdown(figures), encoding="utf-8")
    print(given.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
