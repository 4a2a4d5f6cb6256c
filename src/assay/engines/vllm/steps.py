"""Which tokens of a window each step feeds, and which row of a step's states belongs to which of them.

vLLM packs the requests of a step one after the other: request r of the batch has `count` rows, that of its tokens
`start`, `start + 1`, … A window is scored only if every wanted row came exactly once, each step fed exactly the
tokens that were planned, and the tokens fed were the window's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.engines.scoring import ScoreJob, ScoringPath
from assay.errors import AssayError


@dataclass(frozen=True)
class WindowPlan:
    """How one window of `length` tokens goes through the engine.

    The first `prompt` tokens are the prompt of the request; those that follow are generated, each forced to be the
    window's own. `blocks` are the (first, past the last) tokens of each step; the last token of a window predicts
    nothing and is never fed.
    """

    prompt: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def largest(self) -> int:
        """Tokens of the largest step."""
        return max(hi - lo for lo, hi in self.blocks)


def plan_window(length: int, job: ScoreJob) -> WindowPlan:
    """The plan of a window of `length` tokens.

    Prefill: everything in one step. Chunked: the prefix (`scored_from − 1` tokens) in one step, then blocks of
    `job.chunk`, all of it the prompt. Decode: the prefix is the prompt (the first token, where there is none: a
    request cannot be empty), then one token a step.
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
    wanted: int, plan: WindowPlan, length: int, *, step_tokens: int, sequences: int, cache_tokens: int, block: int
) -> int:
    """Windows that can run side by side without a step being cut or a request being put off; 0 if not even one.

    A step holds at most `step_tokens` tokens, the cache `cache_tokens` in blocks of `block`.
    """
    room = cache_tokens // (-(-length // block) * block)
    return max(0, min(wanted, sequences, step_tokens // plan.largest, room))


def cache_reads(blocks: Sequence[tuple[int, int]]) -> int:
    """Tokens of earlier steps that attention reads in all steps: each step reads what came before it."""
    return sum(lo for lo, _ in blocks)


@dataclass(frozen=True)
class Fed:
    """What one request had in one step: its window, the first position, the token ids that were fed."""

    window: int
    start: int
    tokens: Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Moves:
    """Rows `source` of a step's states go to rows `target` of the batch's buffer; both int64 [n]."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]


@dataclass
class RowLedger:
    """Books the rows of a batch of windows (all of one length). Row `first` … `length − 2` of each are wanted.

    The buffer of the batch has `rows` rows a window, in the order of `windows`: token ids by window key.
    """

    windows: Mapping[int, NDArray[np.int32]]
    first: int
    blocks: tuple[tuple[int, int], ...]
    _slots: dict[int, int] = field(init=False)
    _seen: NDArray[np.int32] = field(init=False)
    _steps: dict[int, list[tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = {key: slot for slot, key in enumerate(self.windows)}
        self._seen = np.zeros((len(self.windows), self.rows), np.int32)
        self._steps = {key: [] for key in self.windows}

    @property
    def rows(self) -> int:
        """Wanted rows of one window."""
        return self.blocks[-1][1] - self.first

    def book(self, step: Sequence[Fed]) -> Moves:
        """Book one step, its requests in the order of the batch; AssayError for what was not asked for."""
        source: list[NDArray[np.int64]] = []
        target: list[NDArray[np.int64]] = []
        offset = 0
        for fed in step:
            count = len(fed.tokens)
            if fed.window not in self.windows:
                raise _wrong(f"a request of another run was scheduled (window {fed.window})")
            own = self.windows[fed.window][fed.start : fed.start + count]
            if len(own) != count or not np.array_equal(own, np.asarray(fed.tokens)):
                raise _wrong(
                    f"window {fed.window} was fed other tokens than its own at position {fed.start}: "
                    "the forced token was not taken"
                )
            self._steps[fed.window].append((fed.start, fed.start + count))
            lo = max(fed.start, self.first)
            hi = min(fed.start + count, self.first + self.rows)
            if lo < hi:
                slot = self._slots[fed.window]
                self._seen[slot, lo - self.first : hi - self.first] += 1
                source.append(np.arange(lo, hi) - fed.start + offset)
                target.append(np.arange(lo, hi) - self.first + slot * self.rows)
            offset += count
        empty = np.zeros(0, np.int64)
        return Moves(np.concatenate(source) if source else empty, np.concatenate(target) if target else empty)

    def check(self) -> None:
        """AssayError unless every wanted row came once, in exactly the planned steps."""
        for key, slot in self._slots.items():
            missing, doubled = int((self._seen[slot] == 0).sum()), int((self._seen[slot] > 1).sum())
            if missing or doubled:
                raise _wrong(f"window {key}: {missing} rows are missing and {doubled} came more than once")
            if tuple(self._steps[key]) != self.blocks:
                raise _wrong(
                    f"window {key} went through in {len(self._steps[key])} steps instead of {len(self.blocks)}, "
                    f"beginning with {self._steps[key][:3]} instead of {list(self.blocks[:3])}"
                )


def _wrong(what: str) -> AssayError:
    return AssayError(
        f"vLLM did not run the windows as asked: {what}",
        finding_id="fidelity.engine_failed",
        remedy="use a smaller batch, so that the KV cache holds it, and no other requests in the same engine",
    )
