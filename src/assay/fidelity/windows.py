"""Token ids cut into windows, the unit that is scored and resampled.

Two protocols, both without overlap:

`all`          A window of length L is the tokenizer's start token, where it puts one before a text,
               and the next L − 1 tokens (L without one). Every token but the first is scored.
`second-half`  llama.cpp's: the next L tokens, the first of them replaced by the start token; tokens
               L/2 + 1 … L − 1 are scored, so that each has at least half a window of context.

Neighbouring windows are alike: the KL of one tells that of the next. So `all` takes its windows
from all over the text, in an order of which any first part is spread evenly: an interrupted run has
seen the whole text, and a longer run keeps the windows of a shorter one. `second-half` takes them
from the start, as llama.cpp does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from assay.engines.scoring import Window
from assay.errors import AssayError, UsageError

_USAGE = "fidelity.usage"
ScoredPart = Literal["all", "second-half"]


@dataclass(frozen=True)
class Cut:
    """How windows are cut. `stride` is in tokens of the text; None: one window begins where the
    last ended.

    `skip` windows of the order are passed over first, so that text for calibration and for
    evaluation can be kept apart.
    """

    length: int = 1024
    protocol: ScoredPart = "all"
    stride: int | None = None
    skip: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise UsageError(
                f"a window needs at least 2 tokens, got {self.length}",
                remedy="use a larger --length",
                finding_id=_USAGE,
            )
        if self.skip < 0:
            raise UsageError(
                f"cannot skip {self.skip} windows", remedy="skip 0 or more", finding_id=_USAGE
            )

    @property
    def scored_from(self) -> int:
        """Index of the first token of a window that is scored."""
        return 1 if self.protocol == "all" else self.length // 2 + 1

    def text_tokens(self, bos_id: int | None) -> int:
        """Tokens of the text that one window takes."""
        return self.length - 1 if self.protocol == "all" and bos_id is not None else self.length

    def step(self, bos_id: int | None) -> int:
        """Tokens of the text from the start of one window to the next; UsageError where windows
        would overlap.
        """
        taken = self.text_tokens(bos_id)
        if self.stride is None:
            return taken
        if self.stride < taken:
            raise UsageError(
                f"a stride of {self.stride} lets windows of {taken} tokens overlap",
                remedy=f"use {taken} or more: tokens that are counted twice are no new evidence",
                finding_id=_USAGE,
            )
        return self.stride


def available_windows(token_count: int, cut: Cut, bos_id: int | None) -> int:
    """How many windows `token_count` tokens give, those that are skipped not counted."""
    taken = cut.text_tokens(bos_id)
    if token_count < taken:
        return 0
    return max(0, 1 + (token_count - taken) // cut.step(bos_id) - cut.skip)


def places_of(
    token_count: int, cut: Cut, bos_id: int | None, count: int | None = None
) -> list[int]:
    """Where in the text the first `count` windows of the order lie, in steps from its start."""
    available = available_windows(token_count, cut, bos_id)
    total = available + cut.skip if available else 0
    order = list(range(total))
    if cut.protocol == "all":
        # The cells whose multiple of the golden ratio has the smallest fraction: any first part of
        # them is spread evenly (the three-distance theorem: Sos, Ann. Univ. Sci. Budapest Eotvos 1
        # (1958) 127).
        order.sort(key=lambda cell: (cell * _GOLDEN) % 1.0)
    return order[cut.skip : cut.skip + (available if count is None else min(count, available))]


_GOLDEN = (5**0.5 - 1) / 2


def blocks_of(places: Sequence[int]) -> list[int]:
    """The cluster that each window belongs to, given where the windows lie: neighbours share what
    they are about.

    A cluster is up to four windows wide; less where that would leave fewer than eight clusters of
    as many windows.
    """
    width = min(4, max(1, len(places) // 8))
    return [place // width for place in places]


def cut_windows(
    token_ids: Sequence[int], cut: Cut, bos_id: int | None, count: int | None = None
) -> list[Window]:
    """`count` windows (all of them by default, fewer where there are fewer), numbered from 0; see
    `places_of`.

    AssayError where the text is too short for one.
    """
    taken, step = cut.text_tokens(bos_id), cut.step(bos_id)
    available = available_windows(len(token_ids), cut, bos_id)
    if available == 0:
        raise _too_short(len(token_ids), taken, cut)
    windows = []
    for index, place in enumerate(places_of(len(token_ids), cut, bos_id, count)):
        start = place * step
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
