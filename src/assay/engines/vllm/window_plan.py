"""How windows are fed to vLLM: their prompts, what is forced, how many run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from assay.engines.scoring import ScoreJob, ScoringPath


@dataclass(frozen=True)
class WindowPlan:
    """How one window of `length` tokens goes through the engine.

    The first `prompt` tokens are the prompt of the request; those that follow are generated, each
    forced to be the window's own. `blocks` are the (first, past the last) tokens of each step; the
    last token of a window predicts nothing and is never fed.
    """

    prompt: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def largest(self) -> int:
        """Tokens of the largest step."""
        return max(hi - lo for lo, hi in self.blocks)


def plan_window(length: int, job: ScoreJob) -> WindowPlan:
    """The plan of a window of `length` tokens.

    Prefill: everything in one step. Chunked: the prefix (`scored_from − 1` tokens) in one step,
    then blocks of `job.chunk`, all of it the prompt. Decode: the prefix is the prompt (the first
    token, where there is none: a request cannot be empty), then one token a step.
    """
    last, prefix = length - 1, job.scored_from - 1
    if job.path is ScoringPath.PREFILL:
        return WindowPlan(last, ((0, last),))
    if job.path is ScoringPath.CHUNKED:
        edges = sorted({0, prefix, *range(prefix, last, job.chunk), last})
        return WindowPlan(last, tuple(pairwise(edges)))
    prompt = max(1, prefix)
    return WindowPlan(prompt, ((0, prompt), *((i, i + 1) for i in range(prompt, last))))


def batch_size(
    wanted: int,
    plan: WindowPlan,
    length: int,
    *,
    step_tokens: int,
    sequences: int,
    cache_tokens: int,
    block: int,
) -> int:
    """Windows that can run side by side without a step being cut or a request being put off; 0 if
    not even one.

    A step holds at most `step_tokens` tokens, the cache `cache_tokens` in blocks of `block`.
    """
    room = cache_tokens // (-(-length // block) * block)
    return max(0, min(wanted, sequences, step_tokens // plan.largest, room))


def cache_reads(blocks: Sequence[tuple[int, int]]) -> int:
    """Tokens of earlier steps that attention reads in all steps: each step reads what came before
    it.
    """
    return sum(lo for lo, _ in blocks)
