"""Watch a text while it is written, so that a gateway can stop a loop in flight.

Every `STRIDE` code points the same detectors that `grade` runs look at the last `TAIL` code
points as an unfinished text: where it stands at that moment proves nothing, so what counts
against a text that is cut off does not count here. The work per token is bounded: TAIL / STRIDE
code points are looked at for each one that arrives.

Latency: a fault of which `grade` on the unfinished text would speak is reported at the latest
`STRIDE` code points later, as long as it shows within `TAIL` code points. `finish` grades the
whole text, with its ending known.
"""

from __future__ import annotations

import re
from dataclasses import replace

from assay.coherence.detection import Detection
from assay.coherence.grading import Grade, first_fault, grade
from assay.coherence.text import Ending, TextView

TAIL = 4096
STRIDE = 256

_FENCE = re.compile(r"^[ \t]{0,3}(?:```|~~~)", re.MULTILINE)


class StreamingGrader:
    """Takes token after token of one text; O(1) amortised per token.

    >>> grader = StreamingGrader()
    >>> for token in ["Once", " upon"] + [" a time"] * 100:
    ...     if grader.push(token):
    ...         break
    >>> grader.detection.kind
    'phrase_loop'
    """

    def __init__(self) -> None:
        self.detection: Detection | None = None
        """The first fault, once there is one."""
        self._parts: list[str] = []
        self._tail = ""
        self._tail_start = 0
        self._in_fence = False
        self._unseen = 0

    def push(self, token_text: str) -> Detection | None:
        """Take the text of the next token. Returns the first fault as soon as it shows, and from
        then on.
        """
        self._parts.append(token_text)
        if self.detection is None:
            for start in range(
                0, len(token_text), STRIDE
            ):  # a large chunk is looked at like many small ones
                self._append(token_text[start : start + STRIDE])
        return self.detection

    def finish(self, finish_reason: str | None = None) -> Grade:
        """The grade of the whole text, as `grade` gives it."""
        return grade("".join(self._parts), finish_reason=finish_reason)

    def _append(self, piece: str) -> None:
        self._tail += piece
        self._unseen += len(piece)
        if self._unseen < STRIDE or self.detection is not None:
            return
        self._unseen = 0
        self._trim()
        found = first_fault(TextView(self._tail, Ending.OPEN, in_fence=self._in_fence))
        if found:
            shift = self._tail_start
            self.detection = replace(
                found, onset_char=found.onset_char + shift, end=found.end + shift
            )

    def _trim(self) -> None:
        """Drop what lies before the tail, at a line break where there is one, and remember open
        code fences.
        """
        surplus = len(self._tail) - TAIL
        if surplus <= 0:
            return
        line = self._tail.find("\n", surplus, surplus + STRIDE)
        cut = line + 1 if line >= 0 else surplus
        if len(_FENCE.findall(self._tail[:cut])) % 2:
            self._in_fence = not self._in_fence
        self._tail = self._tail[cut:]
        self._tail_start += cut
