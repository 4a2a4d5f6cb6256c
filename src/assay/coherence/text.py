"""One text, seen as code points, tokens and segments: what the detectors share.

Every view is computed once, on first use, in time linear in the length of the text.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.coherence.arrays import Spans, mapped

# A token is a run of letters, a run of digits, one character of a script written without spaces, or
# one mark. The scripts: kana, Chinese characters, Thai, Lao, Khmer, Myanmar.
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
)
_SINGLE = re.compile(rf"[{_UNSPACED}]|[^\w\s]|_")
_DIGITS = re.compile(r"\d+")

# A segment ends at a line break or after a sentence's end mark.
_SEGMENT_END = re.compile(r"\n+|(?<=[.!?;])[ \t]+|(?<=[。！？])")
_FENCE = re.compile(r"^[ \t]{0,3}(```|~~~)", re.MULTILINE)
_SENTENCE_END = ".!?。！？…\"'”’»)]}`>|*"


class Ending(StrEnum):
    """How a text came to its end, as far as is known."""

    STOPPED = "stop"
    CUT = "length"
    OPEN = "open"
    """Still being written: nothing can be concluded from where it ends."""
    UNKNOWN = "unknown"


def ending_of(finish_reason: str | None) -> Ending:
    """The ending that a server's `finish_reason` reports."""
    if finish_reason in {"stop", "tool_calls", "function_call", "eos", "end_turn", "stop_sequence"}:
        return Ending.STOPPED
    return Ending.CUT if finish_reason in {"length", "max_tokens"} else Ending.UNKNOWN


@dataclass(frozen=True)
class Units:
    """A text as a sequence of units: `ids` names equal units alike, `starts` and `ends` are code
    points.
    """

    ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class TextView:
    """A text with its views. `in_fence` says that it begins inside a fenced code block (a stream's
    tail).
    """

    text: str
    ending: Ending = Ending.UNKNOWN
    in_fence: bool = field(default=False)

    @cached_property
    def codes(self) -> NDArray[np.uint32]:
        """Code points, shape (len(text),)."""
        return np.frombuffer(self.text.encode("utf-32-le", "surrogatepass"), dtype="<u4")

    @cached_property
    def words(self) -> Sequence[str]:
        """The tokens as they stand in the text."""
        starts, ends = self._bounds
        return [self.text[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    @cached_property
    def is_word(self) -> NDArray[np.bool_]:
        """For every token whether it is made of letters or digits, and no mark."""
        alnum: NDArray[np.bool_] = mapped(self.codes, str.isalnum).astype(bool)[self._bounds[0]]
        return alnum

    @cached_property
    def tokens(self) -> Units:
        """Tokens, equal when they differ in case only."""
        distinct, which = self.distinct_words
        return self._units(_number([w.lower() for w in distinct])[which])

    @cached_property
    def distinct_words(self) -> tuple[Sequence[str], NDArray[np.int64]]:
        """The different tokens, case and all, and for every token which of them it is."""
        return list(dict.fromkeys(self.words)), _number(self.words)

    @cached_property
    def masked_tokens(self) -> Units:
        """Tokens, all numbers alike: a loop with a counter repeats exactly here."""
        distinct, which = self.distinct_words
        return self._units(_number([_DIGITS.sub("0", w.lower()) for w in distinct])[which])

    @cached_property
    def segments(self) -> Units:
        """Sentences and lines, stripped, in order; blank ones are left out."""
        keys: list[str] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for start, end in [
            *((m.start(), m.end()) for m in _SEGMENT_END.finditer(self.text)),
            (len(self.text),) * 2,
        ]:
            piece = self.text[at:start].strip()
            if piece:
                keys.append(piece.lower())
                spans.append((at, start))
            at = end
        bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
        return Units(_number(keys), bounds[:, 0], bounds[:, 1])

    @cached_property
    def visible_end(self) -> int:
        """Where the text ends but for trailing blanks."""
        return len(self.text.rstrip())

    @cached_property
    def cut(self) -> bool:
        """Whether the text breaks off: reported by the server, or it ends without an end mark."""
        if self.ending is not Ending.UNKNOWN:
            return self.ending is Ending.CUT
        return self.visible_end > 0 and self.text[self.visible_end - 1] not in _SENTENCE_END

    @cached_property
    def fences(self) -> Sequence[tuple[int, int]]:
        """Spans of fenced code blocks; the last may run to the end of the text."""
        marks = [m.start() for m in _FENCE.finditer(self.text)]
        if self.in_fence:
            marks.insert(0, 0)
        if len(marks) % 2:
            marks.append(len(self.text))
        return list(zip(marks[::2], marks[1::2], strict=True))

    @cached_property
    def fence_spans(self) -> Spans:
        """Membership in the fenced code blocks."""
        return Spans(self.fences)

    def line_at(self, position: int) -> tuple[int, int]:
        """Start and end of the line that holds `position`, in logarithmic time (a text may be one
        huge line).
        """
        index = bisect_left(self._breaks, position)
        start = self._breaks[index - 1] + 1 if index else 0
        return start, self._breaks[index] if index < len(self._breaks) else len(self.text)

    @cached_property
    def _breaks(self) -> list[int]:
        return [m.start() for m in re.finditer("\n", self.text)]

    def _units(self, ids: NDArray[np.int64]) -> Units:
        return Units(ids, *self._bounds)

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and ends of all tokens: where the kind of character changes, and around every
        single.
        """
        kinds = mapped(self.codes, _kind)
        changes = np.flatnonzero((kinds[1:] != kinds[:-1]) | (kinds[1:] == _KIND_SINGLE)) + 1
        edges = (
            np.concatenate(([0], changes, [len(kinds)]))
            if len(kinds)
            else np.zeros(1, dtype=np.int64)
        )
        starts, ends = edges[:-1], edges[1:]
        solid = kinds[starts] != _KIND_BLANK
        return starts[solid], ends[solid]


_KIND_BLANK, _KIND_LETTER, _KIND_DIGIT, _KIND_SINGLE = range(4)


def _kind(char: str) -> int:
    if char.isspace():
        return _KIND_BLANK
    if _SINGLE.fullmatch(char):
        return _KIND_SINGLE
    return _KIND_DIGIT if char.isdecimal() else _KIND_LETTER


def _number(keys: Sequence[str]) -> NDArray[np.int64]:
    known: dict[str, int] = {}
    return np.array([known.setdefault(k, len(known)) for k in keys], dtype=np.int64)


def __getattr__(name: str) -> Any:
    """`Detection` lived here up to 0.2.0."""
    if name != "Detection":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import warnings

    from assay.coherence.detection import Detection

    warnings.warn(
        "assay.coherence.text.Detection moved to assay.coherence.detection",
        DeprecationWarning,
        stacklevel=2,
    )
    return Detection
