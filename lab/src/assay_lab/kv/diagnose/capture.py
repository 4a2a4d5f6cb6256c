"""Keys, values and queries of a model, watched while it reads windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import ScoreJob, Window
from assay.progress import NO_PROGRESS, Progress
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.capture import Capture
from assay_lab.kv.diagnose.metrics import Reads
from assay_lab.kv.rotary import Rotary, Rotation
from assay_lab.kv.stream_coder import Key

if TYPE_CHECKING:
    import torch

    from assay_lab.kv.stream_coder import FittedCodec


@dataclass(frozen=True)
class Traffic:
    """Of each layer: keys before RoPE and values [windows, KV heads, tokens, d], bf16, and queries
    before RoPE.
    """

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    queries: dict[int, torch.Tensor]
    positions: torch.Tensor
    """Positions of the queries."""
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

    def predictors(self, fitted: FittedCodec) -> torch.Tensor | None:
        """What a codec predicts from [windows, predictor heads, tokens, d]; streams that are not
        coded are exact.
        """
        import torch

        parts = [
            self._held[key] if key in self._held else self._exact(key)
            for key in fitted.predictor_keys
        ]
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
