"""`assay kv diagnose`: where the error of a codec comes from, and what attention makes of it, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from assay.environment import describe
from assay.lab.kv.fit import kept_layers, last_readers
from assay.lab.kv.lab import open_lab
from assay.lab.kv.reconstruction import (
    Decoded,
    Distribution,
    StageError,
    Traffic,
    coded,
    distribution,
    outlier_share,
    output_error,
    relative_mse,
    score_error,
    span,
    stage_errors,
    watch,
)
from assay.lab.kv.spec import parse_spec
from assay.lab.options import DiagnosisPlan
from assay.progress import NO_PROGRESS, Progress
from assay.verdict import Block, Chart, Finding, Metric, Point, Report, Series, Severity, Table, Verdict

if TYPE_CHECKING:
    import torch

    from assay.lab.kv.stream_coder import FittedCodec


# -----------------------------------------------------------------------------
# The diagnosis of one stream (K or V) of one layer, as plain JSON.


def diagnose_stream(fitted: FittedCodec, traffic: Traffic, decoded: Decoded, layer: int, stream: str) -> dict[str, Any]:
    """`results.layers[]` of one stream: figures over all heads, then those of each, then the stages.

    `decoded` gives what the codec predicts from, and takes what came back.
    """
    keys = traffic.rotated(layer, traffic.keys[layer])
    if stream == "k":
        x = traffic.keys[layer].float() if fitted.before_rope else keys
    else:
        x = traffic.values[layer].float()
    side = decoded.sides(fitted)
    back = coded(fitted, x, side)
    decoded.put((layer, stream), fitted, back)
    lo, hi = span(fitted, x.shape[2])
    inside, outside = x[:, :, lo:hi], back[:, :, lo:hi]
    mse, far = relative_mse(inside, outside), outlier_share(inside)
    heads: list[dict[str, Any]] = [
        {
            "head": h,
            "relative_mse": float(mse[h]),
            "outlier_share": float(far[h]),
            "residual": to_json(distribution((outside - inside)[:, h])),
        }
        for h in range(x.shape[1])
    ]
    for head, found in zip(heads, _attention(traffic, layer, stream, keys, x, back, fitted), strict=True):
        head["attention"] = found
    stages = stage_errors(fitted, x, side)
    return {
        "layer": layer,
        "stream": stream,
        "coded_tokens": hi - lo,
        "relative_mse": _mean(heads, "relative_mse"),
        "outlier_share": _mean(heads, "outlier_share"),
        "attention": {name: sum(h["attention"][name] for h in heads) / len(heads) for name in heads[0]["attention"]},
        "residual": to_json(distribution(outside - inside)),
        "bits_per_value": 8 * len(fitted.encode(x[0], None if side is None else side[0])) / x[0].numel(),
        "rank": next((s.figures["rank"] for s in stages if "rank" in s.figures), None),
        "coded_apart": next((s.figures["outliers"] for s in stages if "outliers" in s.figures), None),
        "stages": [_stage(s) for s in stages],
        "heads": heads,
    }


def _attention(
    traffic: Traffic,
    layer: int,
    stream: str,
    keys: torch.Tensor,
    x: torch.Tensor,
    back: torch.Tensor,
    fitted: FittedCodec,
) -> list[dict[str, float]]:
    reads = traffic.reads(layer)
    if stream == "v":
        lost = output_error(reads, keys, x, back)
        return [{"output_error": float(value)} for value in lost]
    # Rotated again only where it was coded before RoPE, so that an exact cache differs by nothing.
    found = score_error(reads, keys, traffic.rotated(layer, back) if fitted.before_rope else back)
    return [{"score_error": float(rms), "attention_kl": float(kl)} for rms, kl in zip(found.rms, found.kl, strict=True)]


def to_json(found: Distribution | None) -> dict[str, Any] | None:
    """Plain JSON."""
    return None if found is None else asdict(found)


def _stage(stage: StageError) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "relative_mse": stage.relative_mse,
        "added": stage.added,
        "values": to_json(stage.values),
        **stage.figures,
    }


def _mean(heads: list[dict[str, Any]], name: str) -> float:
    return float(sum(h[name] for h in heads)) / len(heads)


# -----------------------------------------------------------------------------

HARM = {"k": "attention_kl", "v": "output_error"}
"""The figure of each stream that says most about what it does to the model."""
LISTED = 8
"""Layers of each stream that the table names."""


def run_diagnose(plan: DiagnosisPlan, progress: Progress = NO_PROGRESS) -> Report:
    """Capture keys, values and queries, code them, and say what was lost where."""
    spec = parse_spec(plan.codec)
    spec.require(plan.streams)
    with open_lab(
        plan.model, plan.text, windows=plan.windows, length=plan.length, calibration=plan.calibration, progress=progress
    ) as lab:
        shape, text = lab.bench.shape, lab.text
        layers = kept_layers(shape, plan.skip_layers)
        coders = lab.bench.fit_all(lambda _, stream: spec.of(stream), layers, plan.streams).by_stream
        traffic = watch(lab.engine, lab.windows, shape, queries=plan.queries, batch=plan.batch, progress=progress)
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
        headline=[_headline(found, stream) for stream in "kv" if any(f["stream"] == stream for f in found)],
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
        width = head_dim if f["rank"] <= head_dim and f["stages"][0]["stage"] == "pca" else head_dim * heads
        share = f["stages"][0]["relative_mse"] / max(f["stages"][-1]["relative_mse"], 1e-30)
        if share > 0.5 and f["rank"] < width / 2:
            where.append({"layer": f["layer"], "stream": f["stream"], "rank": f["rank"], "of": width, "share": share})
    if not where:
        return []
    worst = max(where, key=lambda w: w["share"])
    return [
        Finding(
            "kv.rank_collapse",
            Severity.WARNING,
            f"most of the error of {len(where)} of {len(found)} streams is that of components left out",
            f"layer {worst['layer']}, {worst['stream'].upper()}: rank {worst['rank']:.0f} of {worst['of']}, "
            f"{100 * worst['share']:.0f} % of the error",
            evidence={"streams": where},
            causes=("a share of variance sets the rank where the spectrum is steep, as it is after whitening",),
            remedies=("keep all the variance (variance=1) or set the rank itself",),
        )
    ]


def _headline(found: Sequence[Mapping[str, Any]], stream: str) -> Metric:
    mine = [f for f in found if f["stream"] == stream]
    harm = HARM[stream]
    worst = max(mine, key=lambda f: f["attention"][harm])
    mean = sum(f["attention"][harm] for f in mine) / len(mine)
    mse = sum(f["relative_mse"] for f in mine) / len(mine)
    what = {"attention_kl": "attention moves by", "output_error": "attention's output errs by"}[harm]
    unit = " nats" if stream == "k" else " of its power"
    return Metric(
        {"k": "keys", "v": "values"}[stream],
        f"squared error {mse:.3g} of the variance; {what} {mean:.3g}{unit}, most in layer {worst['layer']} "
        f"({worst['attention'][harm]:.3g})",
    )


def _blocks(found: Sequence[Mapping[str, Any]]) -> list[Block]:
    streams = [s for s in "kv" if any(f["stream"] == s for f in found)]
    blocks: list[Block] = [_worst(found, streams)]
    if any(f["stages"] for f in found):
        blocks.append(_stages(found, streams))
    blocks.append(
        _chart(found, streams, "Squared error over variance", lambda f: f["relative_mse"], "error / variance")
    )
    names = {"k": "attention KL (nats)", "v": "error of attention's output / its power"}
    for s in streams:
        title = {"k": "What the keys' error does to attention", "v": "What the values' error does to attention"}
        blocks.append(_chart(found, [s], title[s], lambda f: f["attention"][HARM[f["stream"]]], names[s]))
    return blocks


def _worst(found: Sequence[Mapping[str, Any]], streams: Sequence[str]) -> Table:
    rows = []
    for s in streams:
        mine = sorted((f for f in found if f["stream"] == s), key=lambda f: -f["attention"][HARM[s]])
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
        "layer", "stream", "error / variance", "attention", "worst head", "kurtosis", "W₂", "rank", "outliers %", "bits",
    )  # fmt: skip
    return Table(
        "Where attention is hurt most",
        columns,
        rows,
        numeric=frozenset({0, 2, 3, 5, 6, 7, 8, 9}),
        note="attention: KL of its weights for keys, relative error of its output for values; kurtosis and W₂ are those "
        "of what is lost, 0 and 0 for a normal distribution; outliers are beyond 4 standard deviations",
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
            notes = [f"{k} {sum(h[k] for h in here) / len(here):.3g}" for k in stage if k not in known]
            if stage["values"] and stage["values"]["w2"] is not None:
                w2 = [h["values"]["w2"] for h in here if h["values"] and h["values"]["w2"] is not None]
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


def _chart(found: Sequence[Mapping[str, Any]], streams: Sequence[str], title: str, of: Any, label: str) -> Chart:
    series = [Series(s, [Point(f["layer"], of(f)) for f in found if f["stream"] == s]) for s in streams]
    positive = all(p.y > 0 for s in series for p in s.points)
    return Chart(title, "line", series, x_label="layer", y_label=label, log_y=positive)
