"""Keys, values and queries of real text, captured from a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from assay.engines.hf.window_scoring import window_states
from assay.engines.scoring import ScoreJob, Window
from assay.errors import AssayError
from assay.kv.layers import observed_cache
from assay.kv.model import CacheShape
from assay.kv.rope import Rotary
from assay.progress import NO_PROGRESS, Progress

if TYPE_CHECKING:
    import torch

DISTANCES = 64
"""Relative positions over which the queries' metric is averaged."""


class Capture:
    """A hook that keeps some keys (before RoPE) and values of every window, and sums the queries' second moments."""

    passes = 1

    def __init__(self, shape: CacheShape, length: int, keep: int, seed: int = 0) -> None:
        import torch

        self.shape = shape
        self.length = length
        self.keep = keep
        self._generator = torch.Generator().manual_seed(seed)
        self.positions: list[torch.Tensor] = []
        self.kept: dict[tuple[int, str], list[torch.Tensor]] = {}
        self.moments: dict[int, torch.Tensor] = {}
        self.tokens = 0
        self._chosen = self._draw()
        self._rotary: Rotary | None = None
        self._model: Any = None

    def _draw(self) -> torch.Tensor:
        """Sorted random positions, the same in every window of a batch; each batch draws new ones."""
        import torch

        order = torch.randperm(self.length - 1, generator=self._generator)
        return order[: self.keep].sort().values

    @contextmanager
    def attach(self, model: Any) -> Iterator[None]:
        """Hooks on the queries' projection (and norm, where there is one); undone on leaving."""
        self._model, self._rotary = model, Rotary(model, self.length)
        handles = []
        for index, layer in enumerate(model.get_decoder().layers):
            attention = getattr(layer, "self_attn", None)
            module = getattr(attention, "q_norm", None) or getattr(attention, "q_proj", None)
            if module is None:
                raise AssayError(
                    f"{type(model).__name__} has no query projection in layer {index} that could be watched",
                    finding_id="kv.unsupported",
                    remedy="codecs that need calibration take Llama, Qwen and Gemma models",
                )
            handles.append(module.register_forward_hook(self._watch(index)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def new_cache(self, batch: int, index: int) -> Any:
        """A cache that shows its keys and values as they come."""
        self._chosen = self._draw()
        self.positions += [self._chosen] * batch
        self.tokens += batch * (self.length - 1)
        return observed_cache(self._model, self._on_update)

    def after_prefix(self, cache: Any) -> None:
        """Nothing to do: all is prefill."""

    def engagement(self) -> Any:
        """A capture is no codec."""
        from assay.engines.scoring import Engagement

        return Engagement(fires=len(self.kept))

    def _on_update(
        self, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if self._rotary is None or position:
            raise ValueError("calibration text goes through in one pass")
        plain = self._rotary.at(layer, 0, keys.shape[-2]).remove(keys)
        for stream, states in (("k", plain), ("v", values)):
            some = states[..., self._chosen.to(states.device), :].to(torch.bfloat16).cpu()
            # [B, h, n, d] → [h, B·n, d]
            self.kept.setdefault((layer, stream), []).append(some.transpose(0, 1).flatten(1, 2))
        return keys, values

    def _watch(self, layer: int) -> Any:
        heads, width = self.shape.query_heads, self.shape.head_dim

        def watch(_: Any, __: Any, output: torch.Tensor) -> None:
            self.on_queries(layer, queries_of(output, heads, width, self.length - 1))

        return watch

    def on_queries(self, layer: int, queries: torch.Tensor) -> None:
        """Add the second moment of queries [B, H, T, d] before RoPE, over the group of each KV head."""
        grouped = queries.float().unflatten(1, (self.shape.kv_heads, -1)).transpose(0, 1).flatten(1, 3)
        moment = (grouped.mT @ grouped).double().cpu()
        before = self.moments.get(layer)
        self.moments[layer] = moment if before is None else before + moment

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the calibration file holds."""
        import torch

        found: dict[str, torch.Tensor] = {"positions": torch.cat(self.positions).to(torch.int32)}
        layers = self._model.get_decoder().layers
        per_head = self.tokens * (self.shape.query_heads // self.shape.kv_heads)
        rotary = Rotary(self._model, self.length)
        for layer in range(self.shape.layers):
            for stream in ("k", "v"):
                found[f"layer_{layer}_{stream}"] = torch.cat(self.kept[layer, stream], dim=1)
            sigma = (self.moments[layer] / per_head).float()
            found[f"layer_{layer}_sigma"] = sigma
            found[f"layer_{layer}_sigma_rope"] = averaged(sigma, rotary, layer, self.length)
            found[f"layer_{layer}_gram"] = self._gram(layers[layer].self_attn.o_proj.weight)
        return found

    def _gram(self, weight: torch.Tensor) -> torch.Tensor:
        """Σ over the query heads of a group of Wₕᵀ Wₕ, for the output projection [hidden, H·d]."""
        heads, groups, width = self.shape.query_heads, self.shape.kv_heads, self.shape.head_dim
        parts = weight.detach().float().cpu().reshape(-1, groups, heads // groups, width)
        grouped = parts.permute(1, 2, 0, 3).flatten(1, 2)  # [groups, share · hidden, d]
        return grouped.mT @ grouped


def queries_of(output: torch.Tensor, heads: int, width: int, tokens: int) -> torch.Tensor:
    """Queries [B, H, T, d] from what their projection or norm put out.

    Projections put out [B, T, H·d]; norms [B, T, H, d] (Qwen3) or [B, H, T, d] (Gemma 3).
    """
    if output.ndim == 3:
        output = output.unflatten(-1, (heads, width))
    by_token = tuple(output.shape[1:3]) == (tokens, heads)
    return output.transpose(1, 2) if by_token else output


def averaged(sigma: torch.Tensor, rotary: Rotary, layer: int, length: int) -> torch.Tensor:
    """Mean over relative positions δ of R(δ)ᵀ Σ R(δ): what a query at any distance makes of an error in a key.

    q R(i) · (k R(j))ᵀ depends on q R(i − j) kᵀ, so in the frame of the key before RoPE the query's moment is turned back.
    """
    import torch

    width = sigma.shape[-1]
    total = torch.zeros_like(sigma)
    picked = torch.linspace(0, length - 1, DISTANCES).round().long().tolist()
    for distance in picked:
        rotation = rotary.at(layer, distance, distance + 1)
        # Rows are the images of the unit vectors: x R = x @ matrix.
        eye = torch.eye(width).unsqueeze(1)
        matrix = type(rotation)(rotation.cos.cpu(), rotation.sin.cpu()).apply(eye).squeeze(1)
        total += matrix.T @ sigma @ matrix
    return total / len(picked)


def capture(
    scorer: Any,
    windows: Sequence[Window],
    shape: CacheShape,
    *,
    tokens: int,
    batch: int,
    progress: Progress = NO_PROGRESS,
) -> dict[str, torch.Tensor]:
    """Run the windows through the model and return the tensors of a calibration of about `tokens` samples."""
    length = len(windows[0].tokens)
    keep = min(length - 1, max(1, tokens // len(windows)))
    hook = Capture(shape, length, keep)
    model = scorer.engine.model
    with hook.attach(model), progress("capturing keys, values and queries", len(windows)) as advance:
        for _ in window_states(model, windows, ScoreJob(batch=batch), hook):
            advance()
        return hook.tensors()
