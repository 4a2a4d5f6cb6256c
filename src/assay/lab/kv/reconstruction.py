"""Error of reconstructed keys or values by head, and the stages that it comes from.

Tensors are [windows, heads, tokens, head_dim]. Errors are squared and relative to the variance: the squared distance of
the values from the mean of their channel. An error of 1 is that of storing nothing but the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import ScoreJob, Window
from assay.lab.kv.calibrate import Capture
from assay.lab.kv.codec import CacheShape
from assay.lab.kv.live_stream import Key
from assay.lab.kv.rope import Rotary, Rotation
from assay.progress import NO_PROGRESS, Progress

if TYPE_CHECKING:
    import torch

    from assay.lab.kv.codec import Stage
    from assay.lab.kv.stream_coder import FittedCodec


# -----------------------------------------------------------------------------
# What attention makes of errors in keys and values, with real queries.
#
# An error that moves all scores of a query alike does nothing. For keys the error of a score is δ = q (k̂ − k)ᵀ · scale, and
# what counts is its variance under the exact attention p: KL(p ‖ p̂) ≈ ½ Var_p(δ). For values it is the change of Σ p v.


@dataclass(frozen=True)
class Reads:
    """Queries after RoPE [windows, heads, n, head_dim], their positions [n], the scale of scores, the sliding window."""

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
    """Of each KV head [heads]: root mean softmax-weighted squared error of scores, and mean KL(p ‖ p̂) in nats."""

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


def output_error(reads: Reads, keys: torch.Tensor, values: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """Σ‖p (v̂ − v)‖² / Σ‖p v‖² of each KV head [heads], p of the exact keys."""
    import torch

    p = reads.scores(keys).softmax(dim=-1)

    def read(states: torch.Tensor) -> torch.Tensor:
        return torch.einsum("whgnt,whtd->whgnd", p, states.float())

    exact = read(values).square().sum(dim=(0, 2, 3, 4))
    return read(back - values).square().sum(dim=(0, 2, 3, 4)) / exact.clamp_min(1e-30)


# -----------------------------------------------------------------------------
# All keys and values of some windows, and some of the queries that read them, as a model makes them.


@dataclass(frozen=True)
class Traffic:
    """Of each layer: keys before RoPE and values [windows, KV heads, tokens, d], bf16, and queries before RoPE."""

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
    """What a decoder has of the streams of some windows, keys before RoPE, float32, while others predict from them."""

    def __init__(self, traffic: Traffic, last_readers: Mapping[Key, int]) -> None:
        self._traffic = traffic
        self._last_readers = last_readers
        self._held: dict[Key, torch.Tensor] = {}

    def sides(self, fitted: FittedCodec) -> torch.Tensor | None:
        """What a codec predicts from [windows, side heads, tokens, d]; streams that are not coded are exact."""
        import torch

        parts = [self._held[key] if key in self._held else self._exact(key) for key in fitted.sides]
        return torch.cat(parts, dim=1) if parts else None

    def put(self, key: Key, fitted: FittedCodec, back: torch.Tensor) -> None:
        """What came back of a stream, as its codec sees it; streams that nothing more predicts from are dropped."""
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
    """Run windows of one length through the model. `queries` of each are kept, evenly over its last three quarters."""
    import torch

    tokens = len(windows[0].tokens) - 1
    count = min(queries, max(1, tokens - tokens // 4))
    positions = torch.linspace(tokens // 4, tokens - 1, count).round().long().unique()
    hook = _Watch(shape, tokens + 1, positions)
    model = scorer.engine.model
    with hook.attach(model), progress("capturing keys, values and queries", len(windows)) as advance:
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
        {layer: float(getattr(modules[layer], "scaling", shape.head_dim**-0.5)) for layer in layers},
        shape,
        Rotary(model, tokens + 1),
    )


# -----------------------------------------------------------------------------
# How far values are from a normal distribution, once they have mean 0 and variance 1.

MOST = 200_000
"""Values that are looked at; of more, every so many-th."""


@dataclass(frozen=True)
class Distribution:
    """Excess kurtosis (normal: 0), Wasserstein-2 and Kolmogorov-Smirnov distance to the normal distribution.

    W₂ is in standard deviations: about 0.21 for uniform values and 0.18 for Laplace ones; KS is the largest difference
    of the distribution functions. None where all values are the same.
    """

    kurtosis: float | None
    w2: float | None
    ks: float | None
    values: int


def distribution(values: torch.Tensor) -> Distribution:
    """Of values of any shape; those that are not finite are left out.

    W₂² = ∫ (F⁻¹(u) − Φ⁻¹(u))² du = 1 + mean z² − 2 Σ z₍ᵢ₎ (φ(aᵢ₋₁) − φ(aᵢ)) with z sorted and aᵢ = Φ⁻¹(i / n), exactly.
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


# -----------------------------------------------------------------------------

FAR = 4.0
"""Standard deviations beyond which a value is an outlier: 0.006 % of normal ones."""


@dataclass(frozen=True)
class StageError:
    """Mean over heads of the error after one stage, what that stage added, what entered the next, and other figures."""

    name: str
    relative_mse: float
    added: float
    values: Distribution | None
    figures: dict[str, float]


def coded(fitted: FittedCodec, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
    """What comes back of each window [windows, heads, tokens, head_dim], its exact ends as they were, float32.

    `side` [windows, side heads, tokens, head_dim]: what a decoder has of the streams that the codec predicts from.
    """
    import torch

    lo, hi = span(fitted, x.shape[2])
    result = x.float().clone()
    if hi > lo:
        nears = [None] * x.shape[0] if side is None else [near[:, lo:hi] for near in side]
        result[:, :, lo:hi] = torch.stack(
            [fitted.reconstruct(own[:, lo:hi], near) for own, near in zip(x.float(), nears, strict=True)]
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
    """Share of each head's values [heads] more than `FAR` deviations of the head from the mean of their channel."""
    import torch

    off = x - x.mean(dim=(0, 2), keepdim=True)
    deviation = off.square().mean(dim=(0, 2, 3), keepdim=True).sqrt()
    return (off.abs() > FAR * deviation).to(torch.float32).mean(dim=(0, 2, 3))


def stage_errors(fitted: FittedCodec, x: torch.Tensor, side: torch.Tensor | None = None) -> list[StageError]:
    """The stages of the coded tokens of all windows; none where the codec is one step. `side` as in `coded`."""
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
    """Windows as blocks [blocks, heads, tokens, head_dim] of `size` tokens, then what is left of each."""
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
