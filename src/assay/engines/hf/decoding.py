"""Generate for a batch of prompts with a causal language model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from assay.engines.hf.cache_name import with_cache
from assay.engines.hf.caches import new_cache
from assay.engines.hf.sampling import draw_tokens

if TYPE_CHECKING:
    import numpy as np
    import torch

PREFILL_CHUNK = 1024
"""Prompt tokens of a row that one forward pass takes, so that activations stay small on long prompts."""


@dataclass
class Row:
    """One sequence: its prompt, how it is sampled, and what has been generated.

    `is_stop(tokens)` is asked after each token that is no end-of-text token. A row ends with the reason `stop`
    (an end-of-text token, which stays in `tokens`, or `is_stop`) or `length`.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    rng: np.random.Generator
    stop_ids: frozenset[int]
    is_stop: Callable[[list[int]], bool] | None = None
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, token: int) -> None:
        """Add the next token and see whether the row ends with it."""
        self.tokens.append(token)
        if token in self.stop_ids or (self.is_stop is not None and self.is_stop(self.tokens)):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"


def decode_batch(model: Any, rows: Sequence[Row], pad_id: int) -> None:
    """Run all rows to their end. Prompts are padded on the left; finished rows leave the batch as it goes on."""
    import torch

    device = next(model.parameters()).device
    width = max(len(row.prompt) for row in rows)
    ids = torch.tensor([[pad_id] * (width - len(r.prompt)) + list(r.prompt) for r in rows], device=device)
    mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in rows], device=device)
    cache = new_cache(model)
    live = list(rows)
    with torch.inference_mode():
        logits = _prefill(model, ids, mask, cache)
        while True:
            tokens = _next_tokens(logits, live)
            for row, token in zip(live, tokens.tolist(), strict=True):
                if row.finish_reason is None:
                    row.take(token)
            keep = [i for i, row in enumerate(live) if row.finish_reason is None]
            if not keep:
                return
            if len(keep) <= 0.8 * len(live):  # selecting copies the cache, so not for every row that ends
                index = torch.tensor(keep, device=device)
                cache.batch_select_indices(index)
                mask, tokens, live = mask[index], tokens[index], [live[i] for i in keep]
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
            logits = model(
                input_ids=tokens[:, None],
                attention_mask=mask,
                position_ids=mask.sum(dim=1, keepdim=True) - 1,
                **with_cache(model, cache),
                use_cache=True,
            ).logits[:, -1]


def _prefill(model: Any, ids: torch.Tensor, mask: torch.Tensor, cache: Any) -> torch.Tensor:
    """Logits (B, V) after the last prompt token."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    logits: Any = None
    for start in range(0, ids.shape[1], PREFILL_CHUNK):
        end = start + PREFILL_CHUNK
        logits = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            **with_cache(model, cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits
    last: torch.Tensor = logits[:, -1]
    return last


def _next_tokens(logits: torch.Tensor, live: Sequence[Row]) -> torch.Tensor:
    import torch

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)

    return draw_tokens(
        logits,
        column([row.temperature for row in live]),
        column([row.top_p for row in live]),
        column([float(row.rng.random()) for row in live]),
    )
