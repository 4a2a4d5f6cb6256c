"""`assay kv diagnose`: what a codec loses of keys and values, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from assay.environment import describe
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import (
    Block,
    Chart,
    Finding,
    Metric,
    Point,
    Report,
    Series,
    Severity,
    Table,
    Verdict,
)
from assay_lab.kv.diagnose.capture import Decoded, watch
from assay_lab.kv.diagnose.stream import diagnose_stream
from assay_lab.kv.layer_coders import kept_layers
from assay_lab.kv.opening import ModelOnText, open_evaluator
from assay_lab.kv.predictors import last_readers
from assay_lab.kv.spec import parse_spec
from assay_lab.options import DiagnosisPlan

HARM = {"k": "attention_kl", "v": "output_error"}
"""The figure of each stream that says most about what it does to the model."""
LISTED = 8
"""Layers of each stream that the table names."""


def run_diagnose(plan: DiagnosisPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Capture keys, values and queries, code them, and say what was lost where."""
    spec = parse_spec(plan.codec)
    spec.require(plan.streams)
    request = ModelOnText(
        plan.model, plan.text, plan.windows, plan.length, calibration=plan.calibration
    )
    with open_evaluator(request, progress=progress) as lab:
        shape, text = lab.layer_coders.shape, lab.text
        layers = kept_layers(shape, plan.skip_layers)
        coders = lab.layer_coders.fit_all(
            lambda _, stream: spec.of(stream), layers, plan.streams
        ).by_stream
        traffic = watch(
            lab.engine,
            lab.windows,
            shape,
            queries=plan.queries,
            batch=plan.batch,
            progress=progress,
        )
    found = []
    decoded = Decoded(traffic, last_readers(coders))
    with progress("diagnosing", len(coders)) as advance:
        for (layer, stream), fitted in coders.items():
            found.append(diagnose_stream(fitted, traffic, decoded, layer, stream))
            advance()
    return Report(
        command="kv diagnose",
        verdict=Verdict.PASS,
        subject={"model": plan.model, "plan": plan.facts()},
        findings=collapsed(found, shape.head_dim, shape.kv_heads),
        results={"codec": str(spec), "layers": found, "text": text, "cache": shape.to_json()},
        environment=describe(),
        headline=[
            _headline(found, stream) for stream in "kv" if any(f["stream"] == stream for f in found)
        ],
        blocks=_blocks(found),
        summary=f"{spec} on {len(found)} streams, {plan.windows} windows of {plan.length} tokens",
    )


def collapsed(found: Sequence[Mapping[str, Any]], head_dim: int, heads: int) -> list[Finding]:
    """A warning where a cut rank loses most of what is lost: more bits cannot help there."""
    where = []
    for f in found:
        if f["rank"] is None or not f["relative_mse"]:
            continue
        # A rank over all heads is that of their joint width.
        width = (
            head_dim
            if f["rank"] <= head_dim and f["stages"][0]["stage"] == "pca"
            else head_dim * heads
        )
        share = f["stages"][0]["relative_mse"] / max(f["stages"][-1]["relative_mse"], 1e-30)
        if share > 0.5 and f["rank"] < width / 2:
            where.append(
                {
                    "layer": f["layer"],
                    "stream": f["stream"],
                    "rank": f["rank"],
                    "of": width,
                    "share": share,
                }
            )
    if not where:
        return []
    worst = max(where, key=lambda w: w["share"])
    return [
        Finding(
            "kv.rank_collapse",
            Severity.WARNING,
            f"most of the error of {len(where)} of {len(found)} streams is that of components"
            " left out",
            f"layer {worst['layer']}, {worst['stream'].upper()}: rank {worst['rank']:.0f} of"
            f" {worst['of']}, {100 * worst['share']:.0f} % of the error",
            evidence={"streams": where},
            causes=(
                (
                    "a share of variance sets the rank where the spectrum is steep, as it is after"
                    " whitening"
                ),
            ),
            remedies=("keep all the variance (variance=1) or set the rank itself",),
        )
    ]


def _headline(found: Sequence[Mapping[str, Any]], stream: str) -> Metric:
    mine = [f for f in found if f["stream"] == stream]
    harm = HARM[stream]
    worst = max(mine, key=lambda f: f["attention"][harm])
    mean = sum(f["attention"][harm] for f in mine) / len(mine)
    mse = sum(f["relative_mse"] for f in mine) / len(mine)
    what = {"attention_kl": "attention moves by", "output_error": "attention's output errs by"}[
        harm
    ]
    unit = " nats" if stream == "k" else " of its power"
    return Metric(
        {"k": "keys", "v": "values"}[stream],
        f"squared error {mse:.3g} of the variance; {what} {mean:.3g}{unit}, most in layer"
        f" {worst['layer']} ({worst['attention'][harm]:.3g})",
    )


def _blocks(found: Sequence[Mapping[str, Any]]) -> list[Block]:
    streams = [s for s in "kv" if any(f["stream"] == s for f in found)]
    blocks: list[Block] = [_worst(found, streams)]
    if any(f["stages"] for f in found):
        blocks.append(_stages(found, streams))
    blocks.append(
        _chart(
            found,
            streams,
            "Squared error over variance",
            lambda f: f["relative_mse"],
            "error / variance",
        )
    )
    names = {"k": "attention KL (nats)", "v": "error of attention's output / its power"}
    for s in streams:
        title = {
            "k": "What the keys' error does to attention",
            "v": "What the values' error does to attention",
        }
        blocks.append(
            _chart(found, [s], title[s], lambda f: f["attention"][HARM[f["stream"]]], names[s])
        )
    return blocks


def _worst(found: Sequence[Mapping[str, Any]], streams: Sequence[str]) -> Table:
    rows = []
    for s in streams:
        mine = sorted(
            (f for f in found if f["stream"] == s), key=lambda f: -f["attention"][HARM[s]]
        )
        for f in mine[:LISTED]:
            head = max(f["heads"], key=lambda h: h["attention"][HARM[s]])
            rows.append(
                [
                    str(f["layer"]),
                    s,
                    f"{f['relative_mse']:.3g}",
                    f"{f['attention'][HARM[s]]:.3g}",
                    f"{head['head']} ({head['attention'][HARM[s]]:.3g})",
                    _figure(f["residual"]["kurtosis"]),
                    _figure(f["residual"]["w2"]),
                    "–" if f["rank"] is None else f"{f['rank']:.0f}",
                    f"{100 * f['outlier_share']:.2f}",
                    f"{f['bits_per_value']:.2f}",
                ]
            )
    columns = (
        "layer",
        "stream",
        "error / variance",
        "attention",
        "worst head",
        "kurtosis",
        "W₂",
        "rank",
        "outliers %",
        "bits",
    )
    return Table(
        "Where attention is hurt most",
        columns,
        rows,
        numeric=frozenset({0, 2, 3, 5, 6, 7, 8, 9}),
        note=(
            "attention: KL of its weights for keys, relative error of its output for values;"
            " kurtosis and W₂ are those of what is lost, 0 and 0 for a normal distribution;"
            " outliers are beyond 4 standard deviations"
        ),
    )


def _stages(found: Sequence[Mapping[str, Any]], streams: Sequence[str]) -> Table:
    rows = []
    for s in streams:
        mine = [f for f in found if f["stream"] == s and f["stages"]]
        for number, stage in enumerate(mine[0]["stages"] if mine else []):
            here = [f["stages"][number] for f in mine if number < len(f["stages"])]
            added = sum(h["added"] for h in here) / len(here)
            last = sum(f["stages"][-1]["relative_mse"] for f in mine) / len(mine)
            known = {"stage", "relative_mse", "added", "values"}
            notes = [
                f"{k} {sum(h[k] for h in here) / len(here):.3g}" for k in stage if k not in known
            ]
            if stage["values"] and stage["values"]["w2"] is not None:
                w2 = [
                    h["values"]["w2"] for h in here if h["values"] and h["values"]["w2"] is not None
                ]
                notes.append(f"W₂ to normal {sum(w2) / len(w2):.3g}")
            share = f"{100 * added / last:.1f}" if last else "–"
            rows.append([s, stage["stage"], f"{added:.3g}", share, ", ".join(notes)])
    return Table(
        "Stages, mean over layers",
        ("stream", "stage", "adds error / variance", "% of all", "also"),
        rows,
        numeric=frozenset({2, 3}),
        note="W₂ is of the values that leave the stage",
    )


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _chart(
    found: Sequence[Mapping[str, Any]], streams: Sequence[str], title: str, of: Any, label: str
) -> Chart:
    series = [
        Series(s, [Point(f["layer"], of(f)) for f in found if f["stream"] == s]) for s in streams
    ]
    positive = all(p.y > 0 for s in series for p in s.points)
    return Chart(title, "line", series, x_label="layer", y_label=label, log_y=positive)
