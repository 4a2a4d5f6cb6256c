"""Token ids cut into windows, the unit that is scored and resampled.

Two protocols, both without overlap and from the start of the text:

`all`          A window of length L is the tokenizer's start token, where it puts one before a text, and the next
               L − 1 tokens (L without one). Every token but the first is scored.
`second-half`  llama.cpp's: the next L tokens, the first of them replaced by the start token; tokens L/2 + 1 … L − 1
               are scored, so that every one has at least half a window of context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from assay.engines.scoring import Window
from assay.errors import AssayError, UsageError

Protocol = Literal["all", "second-half"]


@dataclass(frozen=True)
class Cut:
    """How windows are cut. `stride` is in tokens of the text; None: one window begins where the last ended.

    `skip` windows are passed over first, so that text for calibration and for evaluation can be kept apart.
    """

    length: int = 1024
    protocol: Protocol = "all"
    stride: int | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise _usage(f"a window needs at least 2 tokens, got {self.length}", "use a larger --length")
        if self.skip < 0:
            raise _usage(f"cannot skip {self.skip} windows", "skip 0 or more")

    @property
    def scored_from(self) -> int:
        """Index of the first token of a window that is scored."""
        return 1 if self.protocol == "all" else self.length // 2 + 1

    def text_tokens(self, bos_id: int | None) -> int:
        """Tokens of the text that one window takes."""
        return self.length - 1 if self.protocol == "all" and bos_id is not None else self.length

    def step(self, bos_id: int | None) -> int:
        """Tokens of the text from the start of one window to the next; UsageError where windows would overlap."""
        taken = self.text_tokens(bos_id)
        if self.stride is None:
            return taken
        if self.stride < taken:
            raise _usage(
                f"a stride of {self.stride} lets windows of {taken} tokens overlap",
                f"use {taken} or more: tokens that are counted twice are no new evidence",
            )
        return self.stride


def available_windows(token_count: int, cut: Cut, bos_id: int | None) -> int:
    """How many windows `token_count` tokens give, those that are skipped not counted."""
    taken = cut.text_tokens(bos_id)
    if token_count < taken:
        return 0
    return max(0, 1 + (token_count - taken) // cut.step(bos_id) - cut.skip)


def cut_windows(
    token_ids: Sequence[int], cut: Cut, bos_id: int | None, count: int | None = None
) -> list[Window]:
    """The first `count` windows (all of them by default, fewer where there are fewer), numbered from 0.

    AssayError where the text is too short for one.
    """
    taken, step = cut.text_tokens(bos_id), cut.step(bos_id)
    available = available_windows(len(token_ids), cut, bos_id)
    if available == 0:
        raise _too_short(len(token_ids), taken, cut)
    windows = []
    for index in range(available if count is None else min(count, available)):
        start = (index + cut.skip) * step
        ids = [int(i) for i in token_ids[start : start + taken]]
        if bos_id is not None:
            ids = [bos_id, *(ids if cut.protocol == "all" else ids[1:])]
        windows.append(Window(index, tuple(ids)))
    return windows


def _too_short(token_count: int, taken: int, cut: Cut) -> AssayError:
    needed = f"one window of {cut.length:,} needs {taken:,}"
    if cut.skip:
        needed += f" after the {cut.skip} that are skipped"
    return AssayError(
        f"the text has {token_count:,} tokens, {needed}",
        finding_id="fidelity.text_too_short",
        remedy="give more text or a smaller --length",
        evidence={"tokens": token_count, "window": cut.length, "skipped_windows": cut.skip},
    )


def _usage(message: str, remedy: str) -> UsageError:
    return UsageError(message, remedy=remedy, finding_id="fidelity.usage")
