"""Greedy continuations by a causal model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assay.engines.continuing import GreedyStep, top_two
from assay.engines.scoring import Head


def greedy_steps(
    model: Any, head: Head, prefixes: Sequence[tuple[int, ...]], count: int
) -> list[list[GreedyStep]]:
    """`count` tokens after each of the equally long prefixes, all in one batch, token by token through the cache."""
    import torch
    from transformers import DynamicCache

    ids = torch.tensor(prefixes, dtype=torch.long, device=model.device)
    cache = DynamicCache(config=model.config)
    steps: list[list[GreedyStep]] = []
    with torch.inference_mode():
        for _ in range(count):
            states = model.base_model(input_ids=ids, past_key_values=cache, use_cache=True).last_hidden_state
            steps.append(top_two(head.logits(states[:, -1])))
            ids = torch.tensor([[step.token] for step in steps[-1]], device=model.device)
    return [list(row) for row in zip(*steps, strict=True)]
