"""An answer that begins again and again, each time a little longer, as a broken stream joins it."""

from __future__ import annotations

import re

from assay.coherence.detection import CORRUPT_CACHE, Detection, Family, quote
from assay.coherence.text import TextView

LEAST_WORDS, LEAST_ROUNDS = 5, 4
"""Words of the first round, and rounds of which each begins with all of the one before."""
MOST_LINES = 20_000
_LINE = re.compile(r"[^\n]+")
_CAUSES = ("events of a stream that repeat all that came before, joined one to another",)


def detect_growing_restarts(view: TextView) -> Detection | None:
    """Find lines of prose of which each is the line before and more."""
    rounds: list[re.Match[str]] = []
    for number, line in enumerate(_LINE.finditer(view.text)):
        if number >= MOST_LINES:
            break
        said = line.group().strip()
        if not said:
            continue
        before = rounds[-1].group().strip() if rounds else ""
        if rounds and len(said) > len(before) and said.startswith(before):
            rounds.append(line)
            if len(rounds) >= LEAST_ROUNDS and line.start() not in view.fence_spans:
                evidence = {"unit": quote(rounds[0].group()), "rounds": len(rounds)}
                causes = (*_CAUSES, CORRUPT_CACHE)
                return Detection(
                    "growing_restarts", rounds[1].start(), line.end(), evidence, Family.LOOP, causes
                )
        else:
            prose = len(said.split()) >= LEAST_WORDS and "  " not in said and said[:1].isalpha()
            rounds = [line] if prose else []
    return None
