"""`assay kv diagnose`: where the error of a codec comes from, and what attention makes of it, layer
by layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import ScoreJob, Window
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
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.calibrate import Capture
from assay_lab.kv.layer_coders import kept_layers
from assay_lab.kv.opening import ModelOnText, open_evaluator
from assay_lab.kv.predictors import last_readers
from assay_lab.kv.spec import parse_spec
from assay_lab.kv.stream_coder import Key
from assay_lab.kv.transforms import Rotary, Rotation
from assay_lab.options import DiagnosisPlan

if TYPE_CHECKING:
    import torch

    from assay_lab.kv.codecs.base import Stage
    from assay_lab.kv.stream_coder import FittedCodec


# Error of reconstructed keys or values by head, and the stages that it comes from.
#
# Tensors are [windows, heads, tokens, head_dim]. Errors are squared and relative to the variance:
# the squared distance of the values from the mean of their channel. An error of 1 is that of
# storing nothing but the mean.


# What attention makes of errors in keys and values, with real queries.
#
# An error that moves all scores of a query alike does nothing. For keys the error of a score is δ =
# q (k̂ − k)ᵀ · scale, and what counts is its variance under the exact attention p: KL(p ‖ p̂) ≈ ½
# Var_p(δ). For values it is the change of Σ p v.


@dataclass(frozen=True)
class Reads:
    """Queries after RoPE [windows, heads, n, head_dim], their positions [n], the scale of scores,
    the sliding window.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    scale: float
    window: int | None = None

    def scores(self, keys: torch.Tensor) -> torch.Tensor:
        """[windows, KV heads, group, n, tokens] of keys after RoPE; −∞ where a query does not look."""
        import torch

        grouped = self.queries.float().unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("whgnd,whtd->whgnt", grouped, keys.float()) * self.scale
        token = torch.arange(keys.shape[2], device=keys.device)
        at = self.positions.to(keys.device)[:, None]
        hidden = token > at
        if self.window is not None:
            hidden |= token <= at - self.window
        return scores.masked_fill(hidden, -torch.inf)


@dataclass(frozen=True)
class ScoreError:
    """Of each KV head [heads]: root mean softmax-weighted squared error of scores, and mean KL(p ‖
    p̂) in nats.
    """

    rms: torch.Tensor
    kl: torch.Tensor


def score_error(reads: Reads, keys: torch.Tensor, back: torch.Tensor) -> ScoreError:
    """Of keys that became `back`, both after RoPE."""
    exact, coded = reads.scores(keys), reads.scores(back)
    log_p = exact.log_softmax(dim=-1)
    p = log_p.exp()
    seen = p > 0
    delta = (coded - exact).masked_fill(~seen, 0.0)
    mean = (p * delta).sum(dim=-1, keepdim=True)
    variance = (p * (delta - mean).square()).sum(dim=-1)
    gap = (log_p - coded.log_softmax(dim=-1)).masked_fill(~seen, 0.0)
    kl = (p * gap).sum(dim=-1)
    return ScoreError(variance.mean(dim=(0, 2, 3)).sqrt(), kl.mean(dim=(0, 2, 3)).clamp_min(0.0))


def output_error(
    reads: Reads, keys: torch.Tensor, values: torch.Tensor, back: torch.Tensor
) -> torch.Tensor:
    """Σ‖p (v̂ − v)‖² / Σ‖p v‖² of each KV head [heads], p of the exact keys."""
    import torch

    p = reads.scores(keys).softmax(dim=-1)

    def read(states: torch.Tensor) -> torch.Tensor:
        return torch.einsum("whgnt,whtd->whgnd", p, states.float())

    exact = read(values).square().sum(dim=(0, 2, 3, 4))
    return read(back - values).square().sum(dim=(0, 2, 3, 4)) / exact.clamp_min(1e-30)


# All keys and values of some windows, and some of the queries that read them, as a model makes
# them.


@dataclass(frozen=True)
class Traffic:
    """Of each layer: keys before RoPE and values [windows, KV heads, tokens, d], bf16, and queries
    before RoPE.
    """

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    queries: dict[int, torch.Tensor]
    positions: torch.Tensor
    """Where the queries stand."""
    scales: dict[int, float]
    shape: CacheShape
    rotary: Rotary

    def rotated(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keys [windows, KV heads, tokens, d] of all positions after RoPE, float32."""
        return self._rotation(layer).apply(keys)

    def reads(self, layer: int) -> Reads:
        """What reads a layer's cache."""
        whole = self._rotation(layer)
        rotation = Rotation(whole.cos[self.positions], whole.sin[self.positions])
        queries = rotation.apply(self.queries[layer])
        return Reads(queries, self.positions, self.scales[layer], self.shape.windows[layer])

    def _rotation(self, layer: int) -> Rotation:
        """That of all positions, where the captured tensors are."""
        whole = self.rotary.at(layer, 0, self.keys[layer].shape[2])
        return Rotation(whole.cos.cpu(), whole.sin.cpu())


class Decoded:
    """What a decoder has of the streams of some windows, keys before RoPE, float32, while others
    predict from them.
    """

    def __init__(self, traffic: Traffic, last_readers: Mapping[Key, int]) -> None:
        self._traffic = traffic
        self._last_readers = last_readers
        self._held: dict[Key, torch.Tensor] = {}

    def sides(self, fitted: FittedCodec) -> torch.Tensor | None:
        """What a codec predicts from [windows, side heads, tokens, d]; streams that are not coded
        are exact.
        """
        import torch

        parts = [self._held[key] if key in self._held else self._exact(key) for key in fitted.sides]
        return torch.cat(parts, dim=1) if parts else None

    def put(self, key: Key, fitted: FittedCodec, back: torch.Tensor) -> None:
        """What came back of a stream, as its codec sees it; streams that nothing more predicts from
        are dropped.
        """
        if key in self._last_readers and not fitted.lossless:
            self._held[key] = back
        for old in [k for k in self._held if self._last_readers[k] < key[0]]:
            del self._held[old]

    def _exact(self, key: Key) -> torch.Tensor:
        layer, stream = key
        return (self._traffic.keys if stream == "k" else self._traffic.values)[layer].float()


class _Watch(Capture):
    """Keeps everything, and the queries at some positions."""

    def __init__(self, shape: CacheShape, length: int, positions: torch.Tensor) -> None:
        super().__init__(shape, length, length - 1)
        self._at = positions
        self.queries: dict[int, list[torch.Tensor]] = {}

    def on_queries(self, layer: int, queries: torch.Tensor) -> None:
        import torch

        some = queries[:, :, self._at.to(queries.device)].to(torch.bfloat16).cpu()
        self.queries.setdefault(layer, []).append(some)


def watch(
    scorer: Any,
    windows: Sequence[Window],
    shape: CacheShape,
    *,
    queries: int,
    batch: int,
    progress: Progress = NO_PROGRESS,
) -> Traffic:
    """Run windows of one length through the model. `queries` of each are kept, evenly over its last
    three quarters.
    """
    import torch

    tokens = len(windows[0].tokens) - 1
    count = min(queries, max(1, tokens - tokens // 4))
    positions = torch.linspace(tokens // 4, tokens - 1, count).round().long().unique()
    hook = _Watch(shape, tokens + 1, positions)
    model = scorer.engine.model
    with (
        hook.attach(model),
        progress("capturing keys, values and queries", len(windows)) as advance,
    ):
        for _ in window_states(model, windows, ScoreJob(batch=batch), hook):
            advance()

    def whole(layer: int, stream: str) -> torch.Tensor:
        # Batches of [h, B · tokens, d]
        parts = [t.unflatten(1, (-1, tokens)).transpose(0, 1) for t in hook.kept[layer, stream]]
        return torch.cat(parts)

    layers = range(shape.layers)
    modules = [layer.self_attn for layer in model.get_decoder().layers]
    return Traffic(
        {layer: whole(layer, "k") for layer in layers},
        {layer: whole(layer, "v") for layer in layers},
        {layer: torch.cat(hook.queries[layer]) for layer in layers},
        positions,
        {
            layer: float(getattr(modules[layer], "scaling", shape.head_dim**-0.5))
            for layer in layers
        },
        shape,
        Rotary(model, tokens + 1),
    )


# How far values are from a normal distribution, once they have mean 0 and variance 1.

MOST = 200_000
"""Values that are looked at; of more, every so many-th."""


@dataclass(frozen=True)
class Distribution:
    """Excess kurtosis (normal: 0), Wasserstein-2 and Kolmogorov-Smirnov distance to the normal
    distribution.

    W₂ is in standard deviations: about 0.21 for uniform values and 0.18 for Laplace ones; KS is the
    largest difference of the distribution functions. None where all values are the same.
    """

    kurtosis: float | None
    w2: float | None
    ks: float | None
    values: int


def distribution(values: torch.Tensor) -> Distribution:
    """Of values of any shape; those that are not finite are left out.

    W₂² = ∫ (F⁻¹(u) − Φ⁻¹(u))² du = 1 + mean z² − 2 Σ z₍ᵢ₎ (φ(aᵢ₋₁) − φ(aᵢ)) with z sorted and aᵢ =
    Φ⁻¹(i / n), exactly.
    """
    import numpy as np
    import torch
    from scipy.special import ndtr, ndtri

    flat = values.detach().flatten()
    flat = flat[torch.isfinite(flat)]
    flat = flat[:: max(1, flat.numel() // MOST)].double().cpu()
    n = flat.numel()
    # Rounding alone gives values that are all the same some spread.
    if n < 2 or float(flat.std()) <= 1e-9 * float(flat.abs().max()):
        return Distribution(None, None, None, n)
    z = np.sort(((flat - flat.mean()) / flat.std(correction=0)).numpy())
    density = np.exp(-0.5 * ndtri(np.arange(n + 1) / n) ** 2) / np.sqrt(2 * np.pi)
    square = 1 + float((z**2).mean()) - 2 * float(z @ -np.diff(density))
    normal, rank = ndtr(z), np.arange(n + 1) / n
    ks = max(float((rank[1:] - normal).max()), float((normal - rank[:-1]).max()))
    return Distribution(float((z**4).mean()) - 3, max(square, 0.0) ** 0.5, ks, n)


FAR = 4.0
"""Standard deviations beyond which a value is an outlier: 0.006 % of normal ones."""


@dataclass(frozen=True)
class StageError:
    """Mean over heads of the error after one stage, what that stage added, what entered the next,
    and other figures.
    """

    name: str
    relative_mse: float
    added: float
    values: Distribution | None
    figures: dict[str, float]


def coded(fitted: FittedCodec, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
    """What comes back of each window [windows, heads, tokens, head_dim], its exact ends as they
    were, float32.

    `side` [windows, side heads, tokens, head_dim]: what a decoder has of the streams that the codec
    predicts from.
    """
    import torch

    lo, hi = span(fitted, x.shape[2])
    result = x.float().clone()
    if hi > lo:
        nears = [None] * x.shape[0] if side is None else [near[:, lo:hi] for near in side]
        result[:, :, lo:hi] = torch.stack(
            [
                fitted.reconstruct(own[:, lo:hi], near)
                for own, near in zip(x.float(), nears, strict=True)
            ]
        )
    return result


def span(fitted: FittedCodec, tokens: int) -> tuple[int, int]:
    """The tokens of a sequence that are coded: not the exact ones at both ends."""
    lo = min(fitted.exact_first, tokens)
    return lo, max(lo, tokens - fitted.exact_last)


def spread(x: torch.Tensor) -> torch.Tensor:
    """Σ (x − mean of its channel)² of each head [heads], over windows and tokens."""
    return (x - x.mean(dim=(0, 2), keepdim=True)).square().sum(dim=(0, 2, 3)).clamp_min(1e-30)


def relative_mse(x: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Squared error over variance of each head [heads]."""
    return (x - back).square().sum(dim=(0, 2, 3)) / spread(x)


def outlier_share(x: torch.Tensor) -> torch.Tensor:
    """Share of each head's values [heads] more than `FAR` deviations of the head from the mean of
    their channel.
    """
    import torch

    off = x - x.mean(dim=(0, 2), keepdim=True)
    deviation = off.square().mean(dim=(0, 2, 3), keepdim=True).sqrt()
    return (off.abs() > FAR * deviation).to(torch.float32).mean(dim=(0, 2, 3))


def stage_errors(
    fitted: FittedCodec, x: torch.Tensor, side: torch.Tensor | None = None
) -> list[StageError]:
    """The stages of the coded tokens of all windows; none where the codec is one step. `side` as in
    `coded`.
    """
    import torch

    lo, hi = span(fitted, x.shape[2])
    whole = spread(x[:, :, lo:hi])
    lost: dict[str, torch.Tensor] = {}
    entering: dict[str, list[torch.Tensor]] = {}
    figures: dict[str, dict[str, float]] = {}
    tokens = 0
    size = fitted.granularity
    sides = itertools.repeat(None) if side is None else _batches(side[:, :, lo:hi], size)
    for blocks, near in zip(_batches(x[:, :, lo:hi], size), sides, strict=False):
        count = blocks.shape[0] * blocks.shape[2]
        tokens += count
        for stage in fitted.coder.stages(blocks, near):
            error = (blocks - stage.decoded).square().sum(dim=(0, 2, 3))
            lost[stage.name] = lost.get(stage.name, torch.zeros_like(error)) + error
            kept = figures.setdefault(stage.name, {})
            for name, value in stage.figures.items():
                kept[name] = kept.get(name, 0.0) + float(value.mean()) * count
            if stage.values is not None:
                entering.setdefault(stage.name, []).append(_standard(stage, x.shape[0]))
    found, before = [], 0.0
    for name, total in lost.items():
        error_now = float((total / whole).mean())
        values = distribution(torch.cat(entering[name])) if name in entering else None
        shares = {key: value / tokens for key, value in figures[name].items()}
        found.append(StageError(name, error_now, error_now - before, values, shares))
        before = error_now
    return found


def _batches(x: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Windows as blocks [blocks, heads, tokens, head_dim] of `size` tokens, then what is left of
    each.
    """
    if size == 1:
        yield x
        return
    whole = x.shape[2] // size * size
    for lo in range(0, whole, size):
        yield x[:, :, lo : lo + size]
    if whole < x.shape[2]:
        yield x[:, :, whole:]


def _standard(stage: Stage, windows: int) -> torch.Tensor:
    """Some of the values that leave a stage, flat."""
    import torch

    flat = (stage.values if stage.values is not None else torch.empty(0)).flatten()
    return flat[:: max(1, flat.numel() * windows // MOST)].float().cpu()


# The command.


# The diagnosis of one stream (K or V) of one layer, as plain JSON.


def diagnose_stream(
    fitted: FittedCodec, traffic: Traffic, decoded: Decoded, layer: int, stream: str
) -> dict[str, Any]:
    """`results.layers[]` of one stream: figures over all heads, then those of each, then the
    stages.

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
    for head, found in zip(
        heads, _attention(traffic, layer, stream, keys, x, back, fitted), strict=True
    ):
        head["attention"] = found
    stages = stage_errors(fitted, x, side)
    return {
        "layer": layer,
        "stream": stream,
        "coded_tokens": hi - lo,
        "relative_mse": _mean(heads, "relative_mse"),
        "outlier_share": _mean(heads, "outlier_share"),
        "attention": {
            name: sum(h["attention"][name] for h in heads) / len(heads)
            for name in heads[0]["attention"]
        },
        "residual": to_json(distribution(outside - inside)),
        "bits_per_value": (
            8 * len(fitted.encode(x[0], None if side is None else side[0])) / x[0].numel()
        ),
        "rank": next((s.figures["rank"] for s in stages if "rank" in s.figures), None),
        "coded_apart": next(
            (s.figures["outliers"] for s in stages if "outliers" in s.figures), None
        ),
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
    return [
        {"score_error": float(rms), "attention_kl": float(kl)}
        for rms, kl in zip(found.rms, found.kl, strict=True)
    ]


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
