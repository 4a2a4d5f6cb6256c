"""Exact loops: a unit of characters, words or sentences that repeats with a fixed period.

Repetition alone is no fault: tables, refrains, zero rows and lines written twenty times on request
repeat too. What tells a loop is how the repetition ends. A unit without an end mark ("the name of
the name of") has nowhere to stop; a sentence may be said again, but not until the text is cut off.
So the limits depend on what the unit is, and on whether the run reaches the end of a text that
breaks off.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from assay.coherence.detection import Detection, quote
from assay.coherence.detectors.periodic import periodic_runs
from assay.coherence.detectors.repeated_units import (
    UnitClass,
    classify,
    family_of,
    is_sentence,
    loop_kind,
    word_count,
)
from assay.coherence.language import FUNCTION_WORDS
from assay.coherence.text import Ending, TextView, Units

MAX_PERIOD = 64
TOKEN_PERIOD = 80
"""Longest period in tokens: 64 words with the marks between them."""
CUT_COPIES = 60
"""Code points of exact copies of words, at least four, that a text which the server cut may not end
in.
"""
_CODE = frozenset("<>{};=|")
"""Marks of code and markup, where equal items follow one another by right."""
LONG_SENTENCE = 16
"""Words: people do not say a longer sentence five times, or three times and begins once more."""
LOOK_BACK = 200
"""Code points looked at before a run to see what stands on its line."""
MAX_GAP = 4
"""Code points between two runs of one loop."""
CONCLUSION = 3
"""Words that follow a repetition which came to an end; lines that did so may come again"""
CONCLUDED_LINES = 400
"""fewer than so many times."""
MIN_WHOLE, MAX_WHOLE, MIN_WHOLE_UNSPACED = 12, 400, 20
"""Code points of a reply that is nothing but two or three characters over and over, more in a
script without spaces.
"""
LONGEST_ENCLOSED = 400
"""Code points of marks that repeat between two brackets or quotes."""
_CLOSES = {"(": ")", "[": "]", "{": "}", '"': '"', "'": "'"}
_PARAGRAPH = re.compile(r"[^\n]+(?:\n[^\n]+)*")
_RULE = frozenset("-=*_~.+#|/\\^:")
_PAIRS = frozenset(("()", "[]", "{}", "<>", "><", ")(", "][", "}{"))


@dataclass(frozen=True)
class Loop:
    """A run of repetition in code points, with what decides whether it is a fault."""

    unit: str
    repeats: float
    start: int
    end: int
    at_end: bool
    """The run reaches the end of the text."""
    open_ended: bool
    """Nothing at all stands after it, not even a closing bracket."""
    cut: bool
    """It reaches the end of a text that breaks off there."""
    line_aligned: bool
    """Each copy stands on lines of its own."""
    one_line: bool
    """The whole run stands on one line."""
    inline: bool
    """Words stand before it on its line."""
    cut_round: bool = False
    """The text breaks off within one more round."""
    concluded: bool = False
    """Text of another kind follows: the repetition came to an end, and the writer went on."""

    @property
    def chars(self) -> int:
        """Code points of the whole run."""
        return self.end - self.start


def detect_loop(view: TextView) -> Detection | None:
    """The first exact loop that is a fault."""
    loops = candidates(view)
    faults = [loop for loop in loops if is_fault(loop, view.ending) and not _enclosed(view, loop)]
    if not faults:
        return _whole_reply(view)
    first = min(faults, key=lambda loop: (loop.start, -loop.end))
    evidence = {
        "unit": quote(first.unit),
        "period_chars": len(first.unit),
        "repeats": round(first.repeats, 1),
    }
    kind = loop_kind(first.unit)
    return Detection(
        kind, _line_start_in(_first_part(first, loops)), first.end, evidence, *family_of(kind)
    )


def _enclosed(view: TextView, loop: Loop) -> bool:
    """Whether marks repeat between two brackets or quotes of one line: `[{}, {}, {}]`, `VALUES (?,
    ?, ?)`, `"{} {} {}"`.
    """
    unit = set("".join(loop.unit.split()))
    if (
        len(unit) < 2
        or loop.chars > LONGEST_ENCLOSED
        or classify(loop.unit) is not UnitClass.DECORATION
    ):
        return False
    before, after = (
        view.text[: loop.start].rstrip()[-1:],
        view.text[loop.end : loop.end + 8].lstrip()[:1],
    )
    return loop.one_line and before != "" and after == _CLOSES.get(before)


def _first_part(loop: Loop, loops: Sequence[Loop]) -> Loop:
    """The run in which the loop really begins: a line break within it cuts one loop into runs of
    the same unit.
    """
    around = 2 * "".join(loop.unit.split())
    for other in sorted(loops, key=lambda o: -o.start):
        unit = "".join(other.unit.split())
        gap = loop.start - other.end
        if (
            gap <= max(MAX_GAP, len(unit))
            and other.start < loop.start
            and unit in around
            and 2 * len(unit) == len(around)
        ):
            loop = other
    return loop


def _whole_reply(view: TextView) -> Detection | None:
    """A reply that is two or three characters over and over, and nothing else."""
    text = view.text.strip()
    if not MIN_WHOLE <= len(text) <= MAX_WHOLE or view.ending is Ending.OPEN:
        return None
    for period in (2, 3):
        unit = text[:period]
        if (
            len(set(unit)) > 1
            and text == (unit * len(text))[: len(text)]
            and not _said_by_right(unit, len(text))
        ):
            onset = len(view.text) - len(view.text.lstrip())
            evidence = {
                "unit": unit,
                "period_chars": period,
                "repeats": round(len(text) / period, 1),
            }
            kind = loop_kind(unit)
            return Detection(kind, onset, view.visible_end, evidence, *family_of(kind))
    return None


def _said_by_right(unit: str, length: int) -> bool:
    """Whether someone may have asked for the unit: laughter, a rule, brackets, a row of numbers or
    of single words.
    """
    visible = "".join(unit.split())
    if any(map(str.isdigit, visible)) or (len(visible) == 1 and visible.isalpha()):
        return True
    if "," in visible:
        return set(visible).isdisjoint("()[]{}<>;=")
    if visible.isalpha():
        return visible.isascii() or length < MIN_WHOLE_UNSPACED
    return set(visible) <= _RULE or visible in _PAIRS or not visible.isascii()


def without_request(view: TextView) -> str | None:
    """The text without a paragraph of copies that it announced with a colon and left again; None if
    it has none.
    """
    if view.cut or view.ending is Ending.OPEN:
        return None
    paragraphs = list(_PARAGRAPH.finditer(view.text))
    for before, block, after in zip(paragraphs, paragraphs[1:], paragraphs[2:], strict=False):
        copies = block.group().strip("` \n")
        announced = before.group().rstrip("` \n").endswith((":", "："))
        if (
            announced
            and word_count(after.group())
            and any(
                copies[period:] == copies[:-period]
                for period in range(1, min(MAX_PERIOD, len(copies) // 8) + 1)
            )
        ):
            return view.text[: block.start()] + view.text[block.end() :]
    return None


def _line_start_in(loop: Loop) -> int:
    """Where the first whole copy begins: a run of lines often starts inside the line before."""
    break_ = loop.unit.find("\n")
    return loop.start + break_ + 1 if 0 <= break_ < len(loop.unit) - 1 else loop.start


def candidates(view: TextView) -> Sequence[Loop]:
    """Every run of repetition of the text that is long enough to be looked at."""
    loops = [
        _loop(view, run.start, run.end, run.repeats, view.text[run.start : run.start + run.period])
        for run in periodic_runs(view.codes, max_period=MAX_PERIOD, min_repeats=4, min_length=20)
    ]
    loops += _unit_loops(view, view.tokens, TOKEN_PERIOD, 4)
    loops += _unit_loops(view, view.segments, MAX_PERIOD, 3)
    last = max((loop.start for loop in loops), default=0)
    ended = view.ending is not Ending.CUT
    return [
        replace(loop, concluded=True) if ended and _goes_on(view, loop, last) else loop
        for loop in loops
    ]


def _goes_on(view: TextView, loop: Loop, last: int) -> bool:
    """Whether words follow the loop in which nothing is repeated."""
    return (
        last < loop.end < view.visible_end
        and word_count(view.text[loop.end : loop.end + 400]) >= CONCLUSION
    )


def is_fault(loop: Loop, ending: Ending) -> bool:
    """Whether a repetition is a loop that a sane text would not hold."""
    kind = classify(loop.unit)
    if kind is UnitClass.BLANK or len(set(loop.unit)) == 1:
        return False  # floods.py knows blanks and single characters
    if kind is not UnitClass.DECORATION and len(set(loop.unit.strip())) == 1 and "\n" in loop.unit:
        return False  # zeros in base64, or a flood that lines break
    if kind is UnitClass.DECORATION:
        return _decoration_fault(loop, ending)
    if kind is UnitClass.DATA:
        return _data_fault(loop, ending)
    if ending is Ending.CUT and loop.open_ended and loop.repeats >= 4 and loop.chars >= CUT_COPIES:
        return True  # its end is unknown, and four copies are no accident
    if loop.line_aligned and loop.concluded and ("\n" in loop.unit or is_sentence(loop.unit)):
        return loop.repeats >= CONCLUDED_LINES
    if any(c in _CODE for c in loop.unit):
        return loop.repeats >= (8 if loop.cut else 40)
    if is_sentence(loop.unit):
        return _sentence_fault(loop, ending)
    return _run_on_fault(loop)


def _decoration_fault(loop: Loop, ending: Ending) -> bool:
    if loop.line_aligned and not loop.one_line:  # lines of marks: empty bullets, rules, table rows
        return loop.repeats >= (16 if loop.cut else 60)
    if loop.inline:  # marks after words, as in "The capital * * * * * *"
        return loop.repeats >= 8 and loop.chars >= 24 and (loop.at_end or loop.chars >= 160)
    cut = ending is Ending.CUT and loop.open_ended
    return loop.repeats >= (8 if cut else 12) and loop.chars >= (
        36 if cut else 60 if loop.at_end else 400
    )


def _data_fault(loop: Loop, ending: Ending) -> bool:
    if not loop.one_line:
        return loop.repeats >= 64 and loop.cut
    if ending is Ending.CUT and loop.open_ended and loop.repeats >= 10:
        return loop.chars >= 40
    return loop.chars >= (160 if loop.open_ended else 1000)


def _sentence_fault(loop: Loop, ending: Ending) -> bool:
    words = word_count(loop.unit)
    if loop.cut_round and words > LONG_SENTENCE:
        return loop.repeats >= 3
    if loop.cut:
        return loop.repeats >= 4 and loop.chars >= 120
    if words > LONG_SENTENCE:
        return loop.repeats >= (8 if ending is Ending.STOPPED else 5)
    if loop.line_aligned:  # twenty lines on request end by themselves
        return loop.repeats >= (120 if ending is Ending.STOPPED else 40)
    return loop.repeats >= (30 if ending is Ending.STOPPED else 12)


def _run_on_fault(loop: Loop) -> bool:
    unit = loop.unit.strip(" ,-").lower()
    if unit in FUNCTION_WORDS and unit not in {"no", "very", "so", "more", "all", "up", "out"}:
        return loop.repeats >= 5
    if word_count(loop.unit) > 1:
        return loop.repeats >= (6 if loop.cut else 8) and loop.chars >= 40
    if " " not in loop.unit and "," not in loop.unit and len(unit) < 4:  # hahaha, lalala
        return loop.chars >= 80
    return loop.repeats >= (10 if loop.cut else 16)


def _unit_loops(view: TextView, units: Units, max_period: int, min_repeats: int) -> Iterator[Loop]:
    for run in periodic_runs(units.ids, max_period=max_period, min_repeats=min_repeats):
        start, end = int(units.starts[run.start]), int(units.ends[run.end - 1])
        unit = view.text[start : int(units.starts[run.start + run.period])]
        # Marks and numbers are compared as characters only: as tokens, a drawing or a matrix would
        # be one loop.
        if end - start >= 12 and classify(unit) is UnitClass.WORDS:
            yield _loop(view, start, end, run.repeats, unit)


def _ends_whole(view: TextView, end: int, unit: str) -> bool:
    """Whether lines repeat and the last one is whole, in a text of which the server does not say
    that it was cut.
    """
    if view.ending is Ending.CUT or "\n" not in unit:
        return False
    start, stop = view.line_at(max(end - 1, 0))
    return view.text[start:stop].strip() in {
        line.strip() for line in (unit + unit).split("\n")[1:-1]
    }


def _loop(view: TextView, start: int, end: int, repeats: float, unit: str) -> Loop:
    at_end = view.visible_end - end <= len(unit)
    rest = view.text[end : view.visible_end].strip() if at_end else ""
    line_start, line_end = view.line_at(start)
    before = view.text[max(line_start, start - LOOK_BACK) : start].strip()
    return Loop(
        unit=unit,
        repeats=repeats,
        start=start,
        end=end,
        at_end=at_end,
        open_ended=end >= view.visible_end,
        cut=at_end and view.cut and not _ends_whole(view, end, unit),
        cut_round=view.cut and word_count(rest) >= 3 and unit.strip().startswith(rest),
        line_aligned="\n" in unit or (not before and end >= line_end),
        one_line=end <= line_end,
        inline=bool(before) and "\n" not in unit,
    )
