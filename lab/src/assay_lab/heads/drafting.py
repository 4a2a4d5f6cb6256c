"""What a head makes of a text: losses, drafts, accepted walks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from assay_lab.heads.model import AnyHead, Cache
from assay_lab.heads.observed import Observed, shifted


@dataclass(frozen=True)
class Losses:
    """Of a batch: the loss to minimise; by step, the mean cross-entropy and the share whose top
    token is the target's.
    """

    total: torch.Tensor
    by_step: torch.Tensor
    agreement: torch.Tensor


def losses(head: AnyHead, target: Any, seen: Observed, depth: int, decay: float = 0.8) -> Losses:
    """Training-time test: `depth` steps unrolled on the head's own states, each against the
    target's distribution.

    Step j weighs `decay`ʲ.
    """
    embed, teach = target.get_input_embeddings(), head.teacher(target, seen)
    hidden, cache, terms, agree = head.first(seen), Cache(), [], []
    for j in range(depth):
        state, hidden = head.step(
            embed(shifted(seen.ids, j + 1)).to(hidden.dtype), hidden, j, cache
        )
        loss, right = teach(state, j)
        terms.append(loss)
        agree.append(right / shifted(seen.mask, j + 1).sum().clamp_min(1))
    by_step = torch.stack(terms)
    weights = decay ** torch.arange(depth, device=by_step.device)
    return Losses(
        (by_step * weights).sum() / weights.sum(), by_step.detach(), torch.stack(agree).detach()
    )


@torch.no_grad()  # type: ignore[untyped-decorator]
def draft(
    head: AnyHead, target: Any, seen: Observed, depth: int, embed: Any = None
) -> torch.Tensor:
    """The greedy drafts of every row, [B, T, depth]: entry [b, p, j] guesses token p + 2 + j after
    text up to p + 1.

    `embed` in place of the target's embedding.
    """
    embed = embed or target.get_input_embeddings()
    hidden, cache, drafts = head.first(seen), Cache(), []
    token = shifted(seen.ids, 1)
    for j in range(depth):
        state, hidden = head.step(embed(token).to(hidden.dtype), hidden, j, cache)
        token = head.guess(state, target)
        drafts.append(token)
    return torch.stack(drafts, -1)


@dataclass(frozen=True)
class Walk:
    """What an engine counts over one text: its steps, and how many accepted at least the first,
    second, … draft.
    """

    steps: int
    accepted: tuple[int, ...]


def walk(ids: list[int], drafts: list[list[int]], begin: int) -> Walk:
    """Speculative decoding of a text that the target wrote: drafts [T][depth], `begin` the first
    written token.

    A step after token n accepts its drafts up to the first that differs from the text, and the
    target adds one token. So it is at temperature 0, and at any other for greedy drafts: a draft is
    accepted exactly if the target's own draw is it. Steps that reach past the end of the text are
    left out.
    """
    depth = len(drafts[0]) if drafts else 0
    counts, steps, n = [0] * depth, 0, begin
    while n >= 1 and n + depth < len(ids):
        right = _leading(drafts[n - 1], ids[n + 1 :])
        for j in range(right):
            counts[j] += 1
        steps += 1
        n += right + 1
    return Walk(steps, tuple(counts))


def _leading(drafts: list[int], text: list[int]) -> int:
    return next(
        (j for j, (a, b) in enumerate(zip(drafts, text, strict=False)) if a != b), len(drafts)
    )


def batches(texts: list[list[int]], tokens: int) -> Iterator[list[int]]:
    """Indices of texts of like length, so that a batch of padded rows holds at most `tokens`."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    part: list[int] = []
    for i in order:
        if part and len(texts[i]) * (len(part) + 1) > tokens:
            yield part
            part = []
        part.append(i)
    if part:
        yield part


def padded(texts: list[list[int]], device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) [B, T], padded on the right."""
    width = max(map(len, texts))
    ids = torch.tensor([t + [0] * (width - len(t)) for t in texts], device=device)
    mask = torch.tensor(
        [[True] * len(t) + [False] * (width - len(t)) for t in texts], device=device
    )
    return ids, mask
