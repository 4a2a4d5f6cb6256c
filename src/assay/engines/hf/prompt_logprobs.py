"""Log-probabilities of the tokens of one prompt."""

from __future__ import annotations

from typing import Any

import torch

from assay.engines.hf.cache import new_cache, with_cache

LOGITS_AT_ONCE = 2**25
"""Bound on tokens × vocabulary of the logits in memory (128 MiB as float32)."""


def token_logprobs(model: Any, ids: tuple[int, ...]) -> tuple[float | None, ...]:
    """Natural log-probability of each token given those before it, in float32; None for
    the first.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor([ids], device=device)
    vocabulary = model.get_input_embeddings().num_embeddings
    chunk = min(1024, max(16, LOGITS_AT_ONCE // vocabulary))
    cache = new_cache(model)
    found: list[float | None] = [None]
    with torch.inference_mode():
        for start in range(0, len(ids) - 1, chunk):
            end = min(start + chunk, len(ids) - 1)
            logits = model(
                input_ids=tokens[:, start:end], **with_cache(model, cache), use_cache=True
            ).logits[0]
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            found += logprobs.gather(1, tokens[0, start + 1 : end + 1, None]).squeeze(1).tolist()
    return tuple(found)
