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
from enum import StrEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.coherence.text import (
    FUNCTION_WORDS,
    Detection,
    Ending,
    TextView,
    Units,
    has_stretch,
    mapped,
    quote,
    running_count,
    true_stretches,
)

MAX_PERIOD = 64
TOKEN_PERIOD = 80
"""Longest period in tokens: 64 words with the marks between them."""
CUT_COPIES = 60
"""Code points of exact copies of words, at least four, that a text which the server cut may not end
in.
"""
_CODE = frozenset("<>{};=|")
"""Marks of code and markup, where equal items follow one another by right."""
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
    return Detection(
        loop_kind(first.unit), _line_start_in(_first_part(first, loops)), first.end, evidence
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
            return Detection(loop_kind(unit), onset, view.visible_end, evidence)
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
        return True  # nobody knows when it would have ended, and four copies are no accident
    if loop.line_aligned and loop.concluded:
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
    if loop.cut:
        return loop.repeats >= 4 and loop.chars >= 120
    if words > 16:
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
        line_aligned="\n" in unit or (not before and end >= line_end),
        one_line=end <= line_end,
        inline=bool(before) and "\n" not in unit,
    )


_BLANK = re.compile(r"(?:\s|&nbsp;|&#160;|<br ?/?>)*")
_WORD = re.compile(r"[^\W\d_]+")
_DATA = re.compile(r"(?:0x|[\s\d.,;:|+/\\()\[\]{}<>\"'%a-fA-F=*-])+")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff]")
_SENTENCE_END = re.compile(r"[.!?。！？]|\n")


class UnitClass(StrEnum):
    """Blanks; marks without letters and digits; numbers; words."""

    BLANK = "blank"
    DECORATION = "decoration"
    DATA = "data"
    WORDS = "words"


def classify(unit: str) -> UnitClass:
    """The class of a repeated unit."""
    if _BLANK.fullmatch(unit):
        return UnitClass.BLANK
    if not any(c.isalnum() for c in unit):
        return UnitClass.DECORATION
    if any(c.isdigit() for c in unit) and _DATA.fullmatch(unit):
        return UnitClass.DATA
    return UnitClass.WORDS


def is_sentence(unit: str) -> bool:
    """Whether the unit holds an end mark or a line break, so that a text may stop after it."""
    return _SENTENCE_END.search(unit) is not None


def word_count(unit: str) -> int:
    """Words in the unit."""
    return len(_WORD.findall(unit))


def loop_kind(unit: str) -> str:
    """The name of a loop of `unit`; the six patterns that the field's tool looks for keep names of
    their own.
    """
    marks = "".join(unit.split()).lower()
    if not marks:
        return "newline_loop" if "\n" in unit else "blank_flood"
    if set(marks) == {"*"}:
        return "asterisk_attractor"
    if classify(unit) is UnitClass.DECORATION:
        return "delimiter_loop"
    words = _WORD.findall(unit.lower())
    if marks == "the":
        return "the_the_the"
    if marks == "a":
        return "a_a_a"
    if is_sentence(unit.strip().rstrip(".!?。！？")) or (is_sentence(unit) and len(words) > 2):
        return "sentence_loop"
    one_word = (
        len(words) <= 1 and len(marks) < 24 and (len(marks) <= 2 or not _UNSPACED.search(marks))
    )
    return "single_token_loop" if one_word else "phrase_loop"


# Loops with small changes: a counter that grows, a word swapped, a clause dropped now and then.
#
# Numbers are masked, and a stretch counts when at least 85 % of its tokens equal the token one
# period before. Data does the same (logs, tables, JSON), so only running prose is judged: few
# marks, and copies that do not stand on lines of their own. Copies on lines count only where the
# server says that the text was cut off.

MIN_REPEATS = 8
MIN_TOKENS = 48
MIN_SAME = 0.85
MIN_CHARS = 200
LONG_PERIOD = 8
"""Tokens from which a line says something: shorter ones must come again more often."""
MAX_MARKS = 0.3
MIN_LETTERS = 0.6


def detect_near_loop(view: TextView) -> Detection | None:
    """The first near-loop in running prose."""
    ids = view.masked_tokens.ids
    if len(ids) < MIN_TOKENS:
        return None
    counts = Counts(view)
    found = [d for p in range(2, MAX_PERIOD + 1) if (d := _with_period(view, counts, ids, p))]
    return min(found, key=lambda d: d.onset_char, default=None)


def _with_period(
    view: TextView, counts: Counts, ids: NDArray[Any], period: int
) -> Detection | None:
    width = max((MIN_REPEATS - 1) * period, MIN_TOKENS)
    if len(ids) < width + period:
        return None
    same = running_count(ids[period:] == ids[:-period])
    alike = same[width:] - same[:-width] >= MIN_SAME * width
    if not alike.any():
        return None
    starts, ends = true_stretches(alike)
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
        start = first + int(
            np.argmax(np.diff(same[first : first + width + 1]))
        )  # the first token that comes again
        last = min(end + width + period - 2, len(ids) - 1)
        a, b = int(view.tokens.starts[start]), int(view.tokens.ends[last])
        if _is_prose_loop(view, counts, a, b, start, last, period):
            unit = view.text[a : int(view.tokens.starts[start + period])]
            exact = bool(same[end + width - 1] - same[start] == end + width - 1 - start)
            kind = "counter_loop" if exact and any(c.isdigit() for c in unit) else "near_loop"
            evidence = {
                "unit": quote(unit),
                "period_tokens": period,
                "repeats": round((last + 1 - start) / period, 1),
            }
            return Detection(kind, a, b, evidence)
    return None


def _is_prose_loop(
    view: TextView, counts: Counts, a: int, b: int, first: int, last: int, period: int
) -> bool:
    tokens = last + 1 - first
    marks = tokens - int(counts.words[last + 1] - counts.words[first])
    letters = int(counts.letters[b] - counts.letters[a])
    if b - a < MIN_CHARS or marks > MAX_MARKS * tokens or letters < MIN_LETTERS * (b - a):
        return False
    if int(counts.breaks[b] - counts.breaks[a]) * 4 * period < tokens:
        return True
    at_end = len(view.words) - 1 - last <= period
    repeats = MIN_REPEATS if period >= LONG_PERIOD else 12
    return view.ending is Ending.CUT and at_end and tokens >= repeats * period


@dataclass(frozen=True)
class Counts:
    """Running counts with a leading 0, so that a passage of any length is counted in one step."""

    view: TextView

    @cached_property
    def words(self) -> NDArray[np.int64]:
        """Tokens that are no marks, before each token."""
        return running_count(self.view.is_word)

    @cached_property
    def letters(self) -> NDArray[np.int64]:
        """Letters before each code point."""
        return running_count(mapped(self.view.codes, str.isalpha))

    @cached_property
    def breaks(self) -> NDArray[np.int64]:
        """Line breaks before each code point."""
        return running_count(self.view.codes == ord("\n"))


# Find where a sequence repeats itself with a fixed period: compare it with itself, shifted.
#
# A sequence x has period p on a stretch where x[i] = x[i − p]. For each p up to `max_period` one
# vectorised comparison finds all such stretches, so the cost is max_period · n, linear in the
# length.


@dataclass(frozen=True)
class Run:
    """A stretch [start, end) of a sequence, in units, that repeats with `period`."""

    period: int
    start: int
    end: int

    @property
    def repeats(self) -> float:
        """How many times the unit stands there, the last time perhaps in part."""
        return (self.end - self.start) / self.period


def periodic_runs(
    ids: NDArray[Any], *, max_period: int = 64, min_repeats: int = 4, min_length: int = 1
) -> Sequence[Run]:
    """Maximal runs with period ≤ `max_period`, at least `min_repeats` periods and `min_length`
    units long.

    A run already explained by a smaller period is left out (aaaa has period 1, not 2). Order: by
    period, start.
    """
    covered = np.zeros(len(ids) + 1, dtype=np.int64)
    runs: list[Run] = []
    for period in range(1, min(max_period, len(ids) // min_repeats) + 1):
        need = max(min_repeats * period, min_length)
        same = ids[period:] == ids[:-period]
        if not has_stretch(same, need - period):
            continue
        starts, ends = true_stretches(same)
        ends = ends + period
        keep = ends - starts >= need
        if not keep.any():
            continue
        seen = np.concatenate(([0], np.cumsum(covered[:-1] > 0)))
        for start, end in zip(starts[keep].tolist(), ends[keep].tolist(), strict=True):
            if seen[end] - seen[start] < 0.9 * (end - start):
                runs.append(Run(period, start, end))
                covered[start:end] = 1
    return runs
