"""How many drafts a target accepts, measured without a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from assay.stats import Interval, cluster_proportion, cluster_ratio
from assay_lab.heads.drafting import Walk, batches, draft, padded, walk
from assay_lab.heads.model import AnyHead
from assay_lab.heads.observed import observe
from assay_lab.heads.text import Written


@dataclass(frozen=True)
class Acceptance:
    """Over steps of speculative decoding: shares accepted by position and tokens a step, clustered
    by prompt.
    """

    positions: tuple[Interval, ...]
    tokens_per_step: Interval
    steps: int
    prompts: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, walks: Sequence[Walk]) -> Acceptance | None:
        """None where no text was long enough for a step. Position j counts against all steps, as
        vLLM's log does.
        """
        walks = [w for w in walks if w.steps]
        if not walks:
            return None
        steps = [w.steps for w in walks]
        by = list(zip(*(w.accepted for w in walks), strict=True))
        return cls(
            tuple(cluster_proportion(own, steps).interval for own in by),
            cluster_ratio([w.steps + sum(w.accepted) for w in walks], steps).interval,
            sum(steps), len(walks), tuple(map(sum, by)),
        )  # fmt: skip


def accepted(
    head: AnyHead, target: Any, texts: Sequence[Written], depth: int, tokens: int, embed: Any = None
) -> list[Walk]:
    """What `depth` greedy drafts a step get accepted of each text; `tokens` of a batch; `embed` in
    place of the target's.
    """
    ids = [t.ids for t in texts]
    walks: dict[int, Walk] = {}
    for part in batches(ids, tokens):
        seen = observe(
            target, *padded([ids[i] for i in part], target.device), head.config.aux_layers
        )
        with autocast(target):
            drafts = draft(head, target, seen, depth, embed).tolist()
        for i, own in zip(part, drafts, strict=True):
            walks[i] = walk(ids[i], own, texts[i].begin)
    return [walks[i] for i in range(len(texts))]


def autocast(target: Any) -> torch.autocast:
    """The head's weights are float32; its products have the target's type."""
    return torch.autocast(
        target.device.type, dtype=torch.bfloat16, enabled=target.dtype == torch.bfloat16
    )
