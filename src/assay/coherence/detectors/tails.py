"""Long loops that were cut in their second or third round: the end of the text is a copy of what
stood before it.

Two equal paragraphs are no fault by themselves. But where the server cut the text off, and the last
sixty words and more repeat, word for word and up to the very end, what stands one period earlier,
the model was going round.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from assay.coherence.text import Detection, Ending, TextView, distinct_in_windows, quote

MAX_PERIOD = 400
MIN_PERIOD = 8
MIN_COPIED = 60
"""Tokens that must be a copy; in code, where items look alike, twice as many."""
MIN_PERIODS = 0.8
MAX_MARKS = 0.35
MIN_COPIED_LETTERS = 0.4


def detect_copied_tail(view: TextView) -> Detection | None:
    """A tail that copies what stands one period before it, in a text that the server cut."""
    if view.ending is not Ending.CUT or len(view.words) < MIN_COPIED + MIN_PERIOD:
        return None
    ids = view.tokens.ids[-4 * MAX_PERIOD :]
    first = len(view.words) - len(ids)
    for period in range(MIN_PERIOD, min(MAX_PERIOD, len(ids) - MIN_COPIED) + 1):
        differs = np.flatnonzero(ids[period:] != ids[:-period])
        copied = len(ids) - period - (int(differs[-1]) + 1 if len(differs) else 0)
        if copied < max(MIN_COPIED, MIN_PERIODS * period):
            continue
        start = first + len(ids) - copied
        marks = int((~view.is_word[start:]).sum())
        if marks > MAX_MARKS * copied and copied < 2 * MIN_COPIED:
            continue
        unit = view.text[int(view.tokens.starts[start]) :]
        if sum(c.isalpha() for c in unit) < MIN_COPIED_LETTERS * len(unit):
            continue  # a matrix, a table of numbers
        # The first copy is where the loop begins.
        onset, end = int(view.tokens.starts[max(start - period, 0)]), int(view.tokens.ends[-1])
        evidence = {"unit": quote(unit), "period_tokens": period, "copied_tokens": copied}
        return Detection("copied_tail", onset, end, evidence)
    return None


# A loop in changing copies: the end of the text holds nothing new, though no period fits it.
#
# An item gets another of five numbers, a line is dropped, two answers take turns: exact comparison
# fails, but every stretch of words has stood in the text before. So each run of a few tokens is
# looked up among the earlier ones, and a long tail that is made of known runs alone is a fault.
# Data repeat their frame and not their content (records, log lines, getters), and refrains are
# short.
#
# Long runs prove more, short ones catch copies that change more: runs of four count in prose that
# the server cut. What is said for the third or fourth time counts in code and markup as well, and
# so does an end of characters that come again, eight at a time, however words are cut in it.

_COUNTER = re.compile(r"^[ \t#*|]*(\d+)(?=[.):])", re.MULTILINE)
REACH = 1500
"""Tokens within which a run must have stood before: a licence that comes again after pages is no
loop.
"""
COUNTER = 2**40
"""The id of every counter."""


@dataclass(frozen=True)
class Recycled:
    """A tail of at least `runs` runs of `gram` tokens, of which a share of `known` stood in the
    text before.
    """

    gram: int
    runs: int
    known: float
    letters: float = 0.4
    """Share of letters that its characters must hold."""
    marks: float = 0.4
    """Share of marks among its tokens, at most."""
    code: bool = True
    """Whether code counts too, if it has few different tokens."""
    times: int = 1
    """How often each run must have stood before."""


CUT = (
    Recycled(8, 80, 0.9),
    Recycled(4, 57, 0.85, letters=0.6, marks=0.3, code=False),
    Recycled(8, 50, 0.9, letters=0.35, marks=1.0, times=2),
    Recycled(6, 30, 0.9, letters=0.3, marks=1.0, times=3),
)
"""What counts where the server cut the text."""
WHOLE = (Recycled(8, 200, 0.9, letters=0.6, marks=0.35, code=False),)
"""What counts where it ended or nothing is known."""
CHARS = 8
CHAR_TAIL, CHAR_REACH, MIN_KNOWN, MIN_LETTERS = 160, 4000, 0.9, 0.4
"""Code points of a cut end whose runs of `CHARS` stood twice before, how far one looks back, the
share of such runs, and of letters.
"""
LAST = 3
"""Runs at the very end of a text that was not cut, of which one must have stood before."""
MIN_DISTINCT = 20
"""Different tokens of the tail of a text that was not cut: one line said again and again may have
been asked for.
"""
MAX_CODE_DISTINCT = 0.2
"""Share of different tokens in a tail of code or data, where frames repeat by right."""


def detect_recycled_tail(view: TextView) -> Detection | None:
    """A tail of the text in which next to nothing is new."""
    if view.ending is Ending.OPEN:
        return None
    # A numbered list of equal items may have been asked for, but then it comes to an end.
    cut = view.ending is Ending.CUT
    ids = _without_counters(view) if cut else view.tokens.ids
    found = (_tail(view, ids[-2 * REACH :], kind) for kind in (CUT if cut else WHOLE))
    return next((d for d in found if d), None) or (_characters(view) if cut else None)


def _characters(view: TextView) -> Detection | None:
    """An end made of runs of characters that stood twice before."""
    first = max(0, view.visible_end - CHAR_REACH)
    earlier = earlier_runs(view.codes[first : view.visible_end].astype(np.int64), CHARS)
    if len(earlier) < CHAR_TAIL + CHARS:
        return None
    known = earlier >= 0
    known &= known[earlier]
    share = np.cumsum(known[::-1]) / np.arange(1, len(known) + 1)
    end = view.text[view.visible_end - CHAR_TAIL : view.visible_end]
    if share[CHAR_TAIL - 1] < MIN_KNOWN or sum(map(str.isalpha, end)) < MIN_LETTERS * CHAR_TAIL:
        return None
    runs = int(np.flatnonzero(share >= MIN_KNOWN)[-1]) + 1
    at = len(known) - runs + int(np.argmax(known[-runs:]))
    onset = first + int(earlier[earlier[at]])
    return Detection("recycled_tail", onset, view.visible_end, {"again": quote(end), "chars": runs})


def _tail(view: TextView, ids: NDArray[np.int64], kind: Recycled) -> Detection | None:
    """The longest tail of one kind, if it is a fault."""
    if len(ids) < kind.runs + kind.gram:
        return None
    earlier = earlier_runs(ids, kind.gram)
    known = (earlier >= 0) & (np.arange(len(earlier)) - earlier <= REACH)
    for _ in range(kind.times - 1):
        known &= known[earlier]  # where there is none, `known` is false already
    share = np.cumsum(known[::-1]) / np.arange(1, len(known) + 1)
    long_enough = np.flatnonzero(share >= kind.known)
    runs = int(long_enough[-1]) + 1 if len(long_enough) else 0
    # Where nothing says that the text was cut, a tail that ends in words of its own came to a
    # conclusion.
    concluded = view.ending is not Ending.CUT and not known[-LAST:].any()
    if runs < kind.runs or concluded or not _is_fault(view, kind, runs):
        return None
    first = len(known) - runs + int(np.argmax(known[-runs:]))
    offset = len(view.tokens) - len(known) - kind.gram + 1
    # The loop begins where the first of the known runs stood first.
    start = int(view.tokens.starts[offset + int(earlier[first])])
    end = int(view.tokens.ends[-1])
    again = view.text[int(view.tokens.starts[offset + first]) :]
    return Detection("recycled_tail", start, end, {"again": quote(again), "tokens": runs})


def _is_fault(view: TextView, kind: Recycled, runs: int) -> bool:
    tail = len(view.tokens) - runs
    letters, marks = _letters_and_marks(view, tail)
    distinct = len(set(view.tokens.ids[tail:].tolist()))
    if view.ending is not Ending.CUT and distinct < MIN_DISTINCT:
        return False
    prose = marks <= kind.marks
    return letters >= kind.letters and (
        prose or (kind.code and distinct <= MAX_CODE_DISTINCT * runs)
    )


def _without_counters(view: TextView) -> NDArray[np.int64]:
    """Token ids, with all numbers alike that count the items of a list: at the start of a line,
    before a stop.
    """
    ids = view.tokens.ids.copy()
    for match in _COUNTER.finditer(view.text):
        ids[bisect_left(view.tokens.starts, match.start(1))] = COUNTER
    return ids


def _letters_and_marks(view: TextView, tail: int) -> tuple[float, float]:
    """Share of letters among the characters, and of marks among the tokens, from token `tail` on."""
    text = view.text[int(view.tokens.starts[tail]) : int(view.tokens.ends[-1])]
    return sum(map(str.isalpha, text)) / len(text), 1.0 - float(view.is_word[tail:].mean())


def earlier_runs(ids: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """For every run of `length` units the place where an equal run last began before it, or −1.

    Shape (len(ids) − length + 1,). Runs are compared by a 64-bit polynomial hash.
    """
    places = max(0, len(ids) - length + 1)
    hashed = np.zeros(places, dtype=np.uint64)
    for k in range(length):
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + (ids[k : k + places] + 1).astype(
            np.uint64
        )
    order = np.argsort(hashed, kind="stable")
    same = hashed[order[1:]] == hashed[order[:-1]]
    earlier = np.full(places, -1, dtype=np.int64)
    earlier[order[1:][same]] = order[:-1][same]
    return earlier


# Rotation: a few words, sentences or tool calls that take turns without end and without a fixed
# order.
#
# Exact periods miss it ("SMS in the SMS SMS in the English and SMS"), as they miss a train of
# thought that puts the same dozen terms into one template for pages.

WINDOW, MAX_DISTINCT = 60, 12
"""Words of a passage on one line, and how many different ones it may get along with."""
LINE_MARKS, LINE_LETTERS, LEAST_LINE = 0.15, 0.55, 200
LONG, LONG_DISTINCT = 300, 56
"""The same for prose over any number of lines that breaks off; sane prose has 75 and more different
words among so many.
"""
CLOSE = 12
"""Words between two new ones by which sane text is told from an exception."""
MIN_SENTENCES, MAX_DIGITS, MAX_LONG_MARKS = 1 / 40, 0.05, 0.3
"""Sentence ends a word, and shares of numbers and of marks among the tokens, by which prose is told
from data.
"""
CALLS, CALLS_CUT, CALLS_TURNS = 24, 12, 6
"""Lines that are calls, in all (where the server cut the text fewer), and how often each of them
comes.
"""
JSON_CALLS, JSON_TURNS = 9, 3
"""The same for calls of tools: no program is written so."""
_LINE = re.compile(r"[^\n]+")
_ANY_WORD = re.compile(r"[^\W\d_]+")
_PIECE = re.compile(r"\S+")
_CALL = re.compile(r"(?:[-*•>→$]|\d+[.)])?\s*(?:await |self\.)?[A-Za-z_][\w.]*\(.*\);?")
_TOOL = re.compile(
    r"(?:<tool_call>|<function=|<\|?tool_call\|?>|\[TOOL_CALLS\])?\s*\[?\{\s*\"(?:name|tool|function|action|tool_name)\"\s*:"
    r".*\"(?:arguments|parameters|args|input|action_input|tool_input)\".*|(?:Action|Tool)(?: call|"
    r" Input)?:\s*\S.*"
    r"|(?:→|⏺|●)\s*\w+\(.*\)",
    re.IGNORECASE,
)


def detect_few_words(view: TextView) -> Detection | None:
    """The first passage on one line of `WINDOW` words with at most `MAX_DISTINCT` different ones."""
    for line in _LINE.finditer(view.text):
        if line.end() - line.start() < LEAST_LINE:
            continue
        matches = list(_ANY_WORD.finditer(line.group()))
        words = [m.group().lower() for m in matches]
        index = next(
            iter(np.flatnonzero(distinct_in_windows(words, WINDOW) <= MAX_DISTINCT).tolist()), None
        )
        if index is None:
            continue
        start, end = matches[index].start(), matches[index + WINDOW - 1].end()
        passage = line.group()[start:end]
        marks = sum(not c.isalnum() and not c.isspace() for c in passage)
        if marks > LINE_MARKS * len(passage) or sum(map(str.isalpha, passage)) < LINE_LETTERS * len(
            passage
        ):
            continue  # code, a table, a list of numbers
        window = Counter(words[index : index + WINDOW])
        used = [word for word, _ in window.most_common(6)]
        evidence = {"words": used, "distinct": len(window)}
        return Detection("few_words", line.start() + start, line.start() + end, evidence)
    return None


def detect_rotation(view: TextView) -> Detection | None:
    """Prose that breaks off and in which, up to the end, the same few words take turns."""
    if not view.cut or len(view.words) < LONG:
        return None
    tokens = view.tokens
    numbers = sum(w.isdecimal() for w in view.words)
    if numbers > MAX_DIGITS * len(tokens) or 1 - view.is_word.mean() > MAX_LONG_MARKS:
        return None
    pieces = list(_PIECE.finditer(view.text))
    words = [m.group().strip(".,;:!?\"'()[]*_`").lower() for m in pieces]
    if len(words) < LONG:
        return None
    ends = (set(words[-max(LONG, len(words) // part) :]) for part in (2, len(words)))
    used = next((end for end in ends if len(end) <= LONG_DISTINCT), None)
    if used is None:
        return None
    # It begins where words last came close together that the end does without.
    new = [index for index, word in enumerate(words) if word not in used]
    first = max((b + 1 for a, b in itertools.pairwise(new) if b - a <= CLOSE), default=0)
    passage = view.text[pieces[first].start() :]
    sentences = sum(passage.count(mark) for mark in (". ", ".\n", "? ", "?\n", "! ", "!\n", "。"))
    if (
        len(words) - first < LONG
        or sentences < MIN_SENTENCES * (len(words) - first)
        or sum(map(str.isalpha, passage)) < 0.6 * len(passage)
    ):
        return None
    evidence = {"words": len(words) - first, "distinct": len(used)}
    return Detection("few_words", pieces[first].start(), view.visible_end, evidence)


def detect_like_calls(view: TextView) -> Detection | None:
    """Lines of the same few calls in turn, up to the end of the text: a loop, since no plan asks
    the same so often.
    """
    if same := _same_blocks(view):
        return same
    if "(" not in view.text and "{" not in view.text and ":" not in view.text:
        return None
    for pattern, least, turns in (
        (_TOOL, JSON_CALLS, JSON_TURNS),
        (_CALL, CALLS_CUT if view.ending is Ending.CUT else CALLS, CALLS_TURNS),
    ):
        calls = _calls_at_end(view, pattern)
        names = {m.group().strip() for m in calls}
        if len(calls) >= least and len(names) * turns <= len(calls) and len(names) > 1:
            evidence = {
                "calls": len(calls),
                "distinct": len(names),
                "call": quote(next(iter(names))),
            }
            return Detection("repeated_tool_call", calls[0].start(), view.visible_end, evidence)
    return None


_BLOCK = re.compile(r"<(tool_call|function_call|invoke|function)\b[^<>]{0,80}>[^\0]{1,2000}?</\1>")


def _same_blocks(view: TextView) -> Detection | None:
    """Three equal blocks between the marks of a call, one after the other."""
    blocks = list(_BLOCK.finditer(view.text)) if view.text.count("</") >= 3 else []
    for a, b, c in zip(blocks, blocks[1:], blocks[2:], strict=False):
        between = view.text[a.end() : b.start()] + view.text[b.end() : c.start()]
        if a.group() == b.group() == c.group() and not between.strip():
            return Detection("repeated_tool_call", a.start(), c.end(), {"call": quote(a.group())})
    return None


def _calls_at_end(view: TextView, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The calls at the end of the text, with no more other lines than calls between them; the last
    may break off.
    """
    calls: list[re.Match[str]] = []
    others = 0
    for line in reversed([m for m in _LINE.finditer(view.text) if m.group().strip()]):
        if pattern.fullmatch(line.group().strip()):
            calls.append(line)
        else:
            others += 1
            if others > len(calls) + 1 or (others == 1 and not calls and not view.cut):
                break
    return calls[::-1]


def repeated_call(calls: Sequence[tuple[str, str]]) -> Detection | None:
    """Of the tool calls of one message, three identical ones in a row, or a few that take turns
    three times.
    """
    for index in range(len(calls) - 2):
        if calls[index] == calls[index + 1] == calls[index + 2]:
            break
    else:
        if len(calls) < JSON_CALLS or len(set(calls)) * JSON_TURNS > len(calls):
            return None
        index = 0
    evidence = {"name": calls[index][0], "calls": len(calls), "distinct": len(set(calls))}
    return Detection("repeated_tool_call", 0, 0, evidence)
