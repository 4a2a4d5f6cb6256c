"""Distance of a changed target from the unchanged one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay_lab.heads.drafting import batches, padded
from assay_lab.heads.observed import observe
from assay_lab.heads.text import Written


@dataclass(frozen=True)
class Distance:
    """Per text: tokens, and sums of KL(P₀‖P), of the total variation, and of changed top tokens."""

    tokens: list[int]
    kl: list[float]
    tv: list[float]
    flips: list[int]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def last_states(target: Any, texts: Sequence[Written], tokens: int) -> list[torch.Tensor]:
    """Final states at the positions that predict a written token, by text, on the CPU."""
    found: dict[int, torch.Tensor] = {}
    ids = [t.ids for t in texts]
    for part in batches(ids, tokens):
        seen = observe(target, *padded([ids[i] for i in part], target.device), (0,))
        for row, i in zip(seen.last, part, strict=True):
            found[i] = row[texts[i].begin - 1 : len(ids[i]) - 1].cpu()
    return [found[i] for i in range(len(texts))]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def distance(target: Any, before: list[torch.Tensor], after: list[torch.Tensor]) -> Distance:
    """From final states of both; the output head is changed by no variant."""
    output, found = target.get_output_embeddings(), Distance([], [], [], [])
    for a, b in zip(before, after, strict=True):
        p, q = (output(x.to(target.device)).float().log_softmax(-1) for x in (a, b))
        found.tokens.append(len(a))
        found.kl.append(float((p.exp() * (p - q)).sum()))
        found.tv.append(float((p.exp() - q.exp()).abs().sum() / 2))
        found.flips.append(int((p.argmax(-1) != q.argmax(-1)).sum()))
    return found
