"""Keys, values and queries of real text, captured from a model of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from assay.engines.hf.scorer import window_states
from assay.engines.scoring import Engagement, ScoreJob, Window
from assay.errors import AssayError
from assay.progress import NO_PROGRESS, Progress
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.observed_cache import observed_cache
from assay_lab.kv.rotary import Rotary
from assay_lab.kv.sampler import Sampler, kept_per_window


class Capture(Sampler):
    """A hook of transformers that keeps some keys (before RoPE) and values of every window, and
    sums moments of queries.
    """

    passes = 1

    def __init__(self, shape: CacheShape, length: int, keep: int, seed: int = 0) -> None:
        super().__init__(shape, length, keep, seed)
        self._rotary: Rotary | None = None
        self._model: Any = None

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
                    f"{type(model).__name__} has no query projection in layer {index} that could be"
                    " watched",
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
        self.begin(batch)
        return observed_cache(self._model, self._on_update)

    def after_prefix(self, cache: Any) -> None:
        """Nothing to do: all is prefill."""

    def engagement(self) -> Any:
        """A capture is no codec."""
        return Engagement(fires=len(self.kept))

    def _on_update(
        self, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rotary is None or position:
            raise ValueError("calibration text goes through in one pass")
        self.on_states(layer, "k", self._rotary.at(layer, 0, keys.shape[-2]).remove(keys))
        self.on_states(layer, "v", values)
        return keys, values

    def _watch(self, layer: int) -> Any:
        heads, width = self.shape.query_heads, self.shape.head_dim

        def watch(_: Any, __: Any, output: torch.Tensor) -> None:
            self.on_queries(layer, queries_of(output, heads, width, self.length - 1))

        return watch


def queries_of(output: torch.Tensor, heads: int, width: int, tokens: int) -> torch.Tensor:
    """Queries [B, H, T, d] from what their projection or norm put out.

    Projections put out [B, T, H·d]; norms [B, T, H, d] (Qwen3) or [B, H, T, d] (Gemma 3).
    """
    if output.ndim == 3:
        output = output.unflatten(-1, (heads, width))
    by_token = tuple(output.shape[1:3]) == (tokens, heads)
    return output.transpose(1, 2) if by_token else output


def capture(
    scorer: Any,
    windows: Sequence[Window],
    shape: CacheShape,
    *,
    tokens: int,
    batch: int,
    progress: Progress = NO_PROGRESS,
) -> dict[str, torch.Tensor]:
    """Run the windows through the model and return the tensors of a calibration of about `tokens`
    samples.
    """
    length = len(windows[0].tokens)
    hook = Capture(shape, length, kept_per_window(tokens, len(windows), length))
    model = scorer.engine.model
    with (
        hook.attach(model),
        progress("capturing keys, values and queries", len(windows)) as advance,
    ):
        for _ in window_states(model, windows, ScoreJob(batch=batch), hook):
            advance()
    decoder = model.get_decoder()
    output = {index: layer.self_attn.o_proj.weight for index, layer in enumerate(decoder.layers)}
    return hook.tensors(Rotary(model, length), output)
