"""Greedy continuations by a causal model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from assay.engines.continuing import GreedyStep, top_two
from assay.engines.hf.cache_name import with_cache
from assay.engines.hf.caches import new_cache
from assay.engines.scoring import Head


def greedy_steps(
    model: Any, head: Head, prefixes: Sequence[tuple[int, ...]], count: int
) -> list[list[GreedyStep]]:
    """`count` tokens after each of the equally long prefixes, all in one batch, token by token through the cache."""
    import torch

    ids = torch.tensor(prefixes, dtype=torch.long, device=model.device)
    base, cache = model.base_model, new_cache(model)
    steps: list[list[GreedyStep]] = []
    with torch.inference_mode():
        for _ in range(count):
            states = base(input_ids=ids, **with_cache(base, cache), use_cache=True).last_hidden_state
            steps.append(top_two(head.logits(states[:, -1])))
            ids = torch.tensor([[step.token] for step in steps[-1]], device=model.device)
    return [list(row) for row in zip(*steps, strict=True)]
