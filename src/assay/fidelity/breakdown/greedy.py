"""Where the greedy continuations of two engines part, and whether that was a near tie.

Both continue the first half of a window, each on its own. Up to the first token that differs they
have read the same, so there, and only there, their two likeliest tokens can be compared. A small
gap on both sides is a coin that rounding may turn; a wide one is a change of the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import GreedyGenerator, GreedyStep, Window
from assay.errors import AssayError
from assay.runs import keep_value, read_value

if TYPE_CHECKING:
    pass


PREFIXES = 8
"""Windows that are continued."""


NEAR_TIE = 0.25
"""Nats: two units of a bf16 logit between 16 and 32. Gaps below this on both sides are a near tie.
"""


@dataclass(frozen=True)
class Continued:
    """Greedy continuations of one engine, or the reason why there are none."""

    steps: Sequence[Sequence[GreedyStep]] = ()
    reason: str = ""


@dataclass(frozen=True)
class Divergence:
    """One prefix: the index of the first token that differs (None where none does) and both sides'
    step there.
    """

    window: int
    first: int | None
    reference: GreedyStep | None = None
    candidate: GreedyStep | None = None

    @property
    def near_tie(self) -> bool:
        """Whether both were close to another token."""
        sides = (self.reference, self.candidate)
        return all(step is not None and step.gap < NEAR_TIE for step in sides)


@dataclass(frozen=True)
class Greedy:
    """The continuations of a candidate against those of the reference; `reason` says why there are
    none.
    """

    prefix_tokens: int
    tokens: int
    found: Sequence[Divergence] = ()
    texts: Callable[[int], str] = field(default=str, compare=False)
    reason: str = ""

    @property
    def diverged(self) -> Sequence[Divergence]:
        """The prefixes after which the two part."""
        return [d for d in self.found if d.first is not None]

    @property
    def median_first(self) -> float | None:
        """Median of the first difference over all prefixes, None where at least half of them never
        part.
        """
        if 2 * len(self.diverged) <= len(self.found):
            return None
        return statistics.median(self.tokens if d.first is None else d.first for d in self.found)

    def to_json(self) -> dict[str, Any]:
        """`results.greedy`."""
        if self.reason:
            return {"available": False, "reason": self.reason, "tokens": self.tokens}
        return {
            "available": True,
            "prefixes": len(self.found),
            "prefix_tokens": self.prefix_tokens,
            "tokens": self.tokens,
            "diverged": len(self.diverged),
            "near_ties": sum(d.near_tie for d in self.diverged),
            "near_tie_gap": NEAR_TIE,
            "median_first": self.median_first,
            "per_prefix": [
                {
                    "window": d.window,
                    "first": d.first,
                    "near_tie": d.near_tie if d.first is not None else None,
                    "reference": self._step(d.reference),
                    "candidate": self._step(d.candidate),
                }
                for d in self.found
            ],
        }

    def _step(self, step: GreedyStep | None) -> dict[str, Any] | None:
        if step is None:
            return None
        return asdict(step) | {
            "gap": step.gap,
            "text": self.texts(step.token),
            "runner_up_text": self.texts(step.runner_up),
        }


def prefixes_of(windows: Sequence[Window]) -> list[tuple[int, ...]]:
    """The first halves of the first windows."""
    return [w.tokens[: prefix_length(windows)] for w in windows[:PREFIXES]]


def prefix_length(windows: Sequence[Window]) -> int:
    """Tokens of a prefix."""
    return max(1, len(windows[0].tokens) // 2)


def continue_greedily(
    engine: object, windows: Sequence[Window], tokens: int, kept: Path | None
) -> Continued:
    """`tokens` greedy tokens after each prefix, read from `kept` where an interrupted run has them
    there.
    """
    if kept and (rows := read_value(kept)) is not None:
        return Continued([[GreedyStep(*step) for step in row] for row in rows])
    if not isinstance(engine, GreedyGenerator):
        return Continued(
            reason="this engine offers no greedy continuation with its two likeliest tokens"
        )
    try:
        steps = engine.generate_greedy(prefixes_of(windows), tokens)
    except AssayError as error:  # the scores stand without it
        return Continued(reason=error.message)
    if kept:
        rows = [
            [[s.token, s.runner_up, s.logprob, s.runner_up_logprob] for s in row] for row in steps
        ]
        keep_value(kept, rows)
    return Continued(steps)


def compare_greedy(
    reference: Continued,
    candidate: Continued,
    windows: Sequence[Window],
    tokens: int,
    texts: Callable[[int], str] = str,
) -> Greedy:
    """Where the candidate's continuations leave the reference's; `texts` gives the text of a
    token.
    """
    length = prefix_length(windows)
    if reason := " and ".join(
        f"{side}: {continued.reason}"
        for side, continued in (("reference", reference), ("candidate", candidate))
        if continued.reason
    ):
        return Greedy(length, tokens, reason=reason)
    found = []
    for window, own, other in zip(
        windows[:PREFIXES], reference.steps, candidate.steps, strict=True
    ):
        steps = enumerate(zip(own, other, strict=True))
        parted = ((i, a, b) for i, (a, b) in steps if a.token != b.token)
        found.append(Divergence(window.index, *next(parted, (None, None, None))))
    return Greedy(length, tokens, found, texts)
