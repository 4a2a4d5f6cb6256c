"""Decode rows of several prompts together: batches, sampling, stops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from assay.engines import GIVEN_UP
from assay.engines.hf.cache import new_cache, with_cache

MAX_ROWS = 48
"""Bound on the requests that run together."""


MAX_CACHED_TOKENS = 32_768
"""Bound on rows × longest row of one batch, in tokens: what the KV cache of the batch may hold."""


PREFILL_CHUNK = 1024
"""Prompt tokens of a row that one forward pass takes, so that activations stay small on long
prompts.
"""


_HEAD = 512
"""How many of the likeliest tokens are looked at first; a sharp distribution needs no full sort."""


def plan_batches(
    prompt_tokens: Sequence[int],
    max_tokens: Sequence[int],
    *,
    max_rows: int = MAX_ROWS,
    max_cached_tokens: int = MAX_CACHED_TOKENS,
) -> Iterator[list[int]]:
    """Indices of the requests of each batch, in an order that wastes little on padding.

    Requests with equal limits and similar prompts run together. One that is too long for the bound
    runs alone.
    """
    order = sorted(
        range(len(prompt_tokens)), key=lambda i: (max_tokens[i], prompt_tokens[i]), reverse=True
    )
    batch: list[int] = []
    longest_prompt = longest_answer = 0
    for index in order:
        prompt = max(longest_prompt, prompt_tokens[index])
        answer = max(longest_answer, max_tokens[index])
        rows = len(batch) + 1
        if batch and (rows > max_rows or rows * (prompt + answer) > max_cached_tokens):
            yield batch
            batch, prompt, answer = [], prompt_tokens[index], max_tokens[index]
        batch.append(index)
        longest_prompt, longest_answer = prompt, answer
    if batch:
        yield batch


def draw_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """The next token of each row.

    `logits` is (B, V); `temperature`, `top_p` and `uniform` (in [0, 1)) are (B,). Temperature 0
    takes the likeliest token. Otherwise the token is drawn by inverting the cumulative distribution
    of the nucleus: the smallest set of likeliest tokens whose probabilities at that temperature sum
    to at least top_p (Holtzman et al., 2020). A row whose logits hold a NaN gives token 0, as
    sampling from nothing does in the engines of the field.
    """
    logits = logits.float()
    dead = logits.isnan().any(dim=-1)
    tokens = logits.argmax(dim=-1)
    sampled = (temperature > 0) & ~dead
    if sampled.any():
        rows = sampled.nonzero().squeeze(1)
        heat = temperature[rows, None].to(logits.dtype)
        tokens[rows] = _draw_nucleus(
            torch.softmax(logits[rows] / heat, dim=-1), top_p[rows], uniform[rows]
        )
    tokens[dead] = 0
    return tokens


def _draw_nucleus(probs: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`draw_tokens` for rows of probabilities (B, V) that sum to 1."""
    tokens = torch.empty(len(probs), dtype=torch.long, device=probs.device)
    open_rows = torch.arange(len(probs), device=probs.device)
    size = min(_HEAD, probs.shape[-1])
    while len(open_rows):
        whole = size == probs.shape[-1]
        value, index = probs[open_rows].topk(size, dim=-1)
        total = value.double().cumsum(dim=-1)
        enough = total >= top_p[open_rows, None].double()
        if whole:
            enough[:, -1] = True  # rounding must not leave a row without a nucleus
        done = enough[:, -1]
        last = enough.int().argmax(dim=-1)  # the first position at which the sum is large enough
        mass = total.gather(1, last[:, None]).squeeze(1)
        point = (uniform[open_rows].double() * mass)[:, None]
        rank = torch.minimum(torch.searchsorted(total, point, right=True).squeeze(1), last)
        tokens[open_rows[done]] = index.gather(1, rank[:, None]).squeeze(1)[done]
        open_rows = open_rows[~done]
        size = probs.shape[-1] if size >= 8 * _HEAD else min(8 * size, probs.shape[-1])
    return tokens


@dataclass
class Row:
    """One sequence: its prompt, how it is sampled, and what has been generated.

    `is_stop(tokens)` is asked after each token that is no end-of-text token. A row ends with the
    reason `stop` (an end-of-text token, which stays in `tokens`, or `is_stop`) or `length`.
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


def decode_batch(
    model: Any, rows: Sequence[Row], pad_id: int, deadline: float = float("inf")
) -> None:
    """Run all rows to their end, or until `deadline`. Prompts are padded on the left; finished rows
    leave the batch as it goes on.
    """
    if _given_up(rows, deadline):
        return
    device = next(model.parameters()).device
    width = max(len(row.prompt) for row in rows)
    ids = torch.tensor(
        [[pad_id] * (width - len(r.prompt)) + list(r.prompt) for r in rows], device=device
    )
    mask = torch.tensor(
        [[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in rows], device=device
    )
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
            if not keep or _given_up([live[i] for i in keep], deadline):
                return
            if len(keep) <= 0.8 * len(
                live
            ):  # selecting copies the cache, so not for every row that ends
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


def _given_up(rows: Sequence[Row], deadline: float) -> bool:
    """Whether the time is over; then these rows end where they are."""
    if time.monotonic() <= deadline:
        return False
    for row in rows:
        row.finish_reason = GIVEN_UP
    return True


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
    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)

    return draw_tokens(
        logits,
        column([row.temperature for row in live]),
        column([row.top_p for row in live]),
        column([float(row.rng.random()) for row in live]),
    )
