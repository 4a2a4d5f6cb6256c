"""What an engine may offer beside scoring: to go on from a prefix, greedily with the two likeliest tokens, or sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

    from assay.engines.base import Engine


@dataclass(frozen=True)
class GreedyStep:
    """One token of a greedy continuation: the likeliest, the next likeliest, and their log-probabilities in nats."""

    token: int
    runner_up: int
    logprob: float
    runner_up_logprob: float

    @property
    def gap(self) -> float:
        """How far the likeliest lies above the next, in nats: also the difference of their logits."""
        return self.logprob - self.runner_up_logprob


@runtime_checkable
class GreedyGenerator(Protocol):
    """An engine that continues prefixes greedily."""

    def generate_greedy(self, prefixes: Sequence[tuple[int, ...]], count: int) -> list[list[GreedyStep]]:
        """`count` tokens after each prefix, past any end of text. All prefixes are equally long."""
        ...


@runtime_checkable
class Sampler(Protocol):
    """An engine that can write text of its own."""

    def sampler(self) -> tuple[Engine, tuple[int, ...]]:
        """What generates, and the ids that a text of its own begins after."""
        ...


def top_two(logits: torch.Tensor) -> list[GreedyStep]:
    """The steps that logits [B, V] make; the lower id wins a tie."""
    logprobs = logits.float().log_softmax(-1)
    best, token = logprobs.max(-1)
    others = logprobs.scatter(-1, token.unsqueeze(-1), float("-inf"))
    second, runner_up = others.max(-1)
    columns = (token, runner_up, best, second)
    return [GreedyStep(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
