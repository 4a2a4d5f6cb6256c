"""Which requests run together: rows of like length, within bounds on rows and on cached tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_ROWS = 48
MAX_CACHED_TOKENS = 32_768
"""Bound on rows × longest row of one batch, in tokens: what the KV cache of the batch may hold."""


def plan_batches(
    prompt_tokens: Sequence[int],
    max_tokens: Sequence[int],
    *,
    max_rows: int = MAX_ROWS,
    max_cached_tokens: int = MAX_CACHED_TOKENS,
) -> Iterator[list[int]]:
    """Indices of the requests of each batch, in an order that wastes little on padding.

    Requests with equal limits and similar prompts run together. One that is too long for the bound runs alone.
    """
    order = sorted(range(len(prompt_tokens)), key=lambda i: (max_tokens[i], prompt_tokens[i]), reverse=True)
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
