"""Rotation: a few words, sentences or tool calls that take turns without end and without a fixed order.

Exact periods miss it ("SMS in the SMS SMS in the English and SMS"), as they miss the near-copies that a repetition
penalty makes of a loop, and a train of thought that puts the same dozen terms into one template for pages.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from assay.coherence.text import Detection, Ending, TextView, quote

WINDOW, MAX_DISTINCT = 60, 12
"""Words of a passage on one line, and how many different ones it may get along with."""
MAX_MARKS, MIN_LETTERS, MIN_LINE = 0.15, 0.55, 200
LONG, LONG_DISTINCT = 300, 56
"""The same for prose over any number of lines that breaks off; sane prose has 75 and more different words among so many."""
CLOSE = 12
"""Words between two new ones by which sane text is told from an exception."""
MIN_SENTENCES, MAX_DIGITS, MAX_LONG_MARKS = 1 / 40, 0.05, 0.3
"""Sentence ends a word, and shares of numbers and of marks among the tokens, by which prose is told from data."""
CALLS, CALLS_CUT, CALLS_TURNS = 24, 12, 6
"""Lines that are calls, in all (where the server cut the text fewer), and how often each of them comes."""
JSON_CALLS, JSON_TURNS = 9, 3
"""The same for calls of tools: no program is written so."""
_LINE = re.compile(r"[^\n]+")
_ANY_WORD = re.compile(r"[^\W\d_]+")
_PIECE = re.compile(r"\S+")
_CALL = re.compile(r"(?:[-*•>→$]|\d+[.)])?\s*(?:await |self\.)?[A-Za-z_][\w.]*\(.*\);?")
_TOOL = re.compile(
    r"(?:<tool_call>|<function=|<\|?tool_call\|?>|\[TOOL_CALLS\])?\s*\[?\{\s*\"(?:name|tool|function|action|tool_name)\"\s*:"
    r".*\"(?:arguments|parameters|args|input|action_input|tool_input)\".*|(?:Action|Tool)(?: call| Input)?:\s*\S.*"
    r"|(?:→|⏺|●)\s*\w+\(.*\)",
    re.IGNORECASE,
)


def detect_few_words(view: TextView) -> Detection | None:
    """The first passage on one line of `WINDOW` words with at most `MAX_DISTINCT` different ones."""
    for line in _LINE.finditer(view.text):
        if line.end() - line.start() < MIN_LINE:
            continue
        matches = list(_ANY_WORD.finditer(line.group()))
        words = [m.group().lower() for m in matches]
        index = next(iter(np.flatnonzero(_distinct(words, WINDOW) <= MAX_DISTINCT).tolist()), None)
        if index is None:
            continue
        start, end = matches[index].start(), matches[index + WINDOW - 1].end()
        passage = line.group()[start:end]
        marks = sum(not c.isalnum() and not c.isspace() for c in passage)
        if marks > MAX_MARKS * len(passage) or sum(map(str.isalpha, passage)) < MIN_LETTERS * len(passage):
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
    """Lines of the same few calls in turn, up to the end of the text: a loop, since no plan asks the same so often."""
    if "(" not in view.text and "{" not in view.text and ":" not in view.text:
        return None
    for pattern, least, turns in (
        (_TOOL, JSON_CALLS, JSON_TURNS),
        (_CALL, CALLS_CUT if view.ending is Ending.CUT else CALLS, CALLS_TURNS),
    ):
        calls = _calls_at_end(view, pattern)
        names = {m.group().strip() for m in calls}
        if len(calls) >= least and len(names) * turns <= len(calls) and len(names) > 1:
            evidence = {"calls": len(calls), "distinct": len(names), "call": quote(next(iter(names)))}
            return Detection("repeated_tool_call", calls[0].start(), view.visible_end, evidence)
    return None


def _calls_at_end(view: TextView, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The calls at the end of the text, with no more other lines than calls between them; the last may break off."""
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
    """Of the tool calls of one message, three identical ones in a row, or a few that take turns three times."""
    for index in range(len(calls) - 2):
        if calls[index] == calls[index + 1] == calls[index + 2]:
            break
    else:
        if len(calls) < JSON_CALLS or len(set(calls)) * JSON_TURNS > len(calls):
            return None
        index = 0
    evidence = {"name": calls[index][0], "calls": len(calls), "distinct": len(set(calls))}
    return Detection("repeated_tool_call", 0, 0, evidence)


def _distinct(words: Sequence[str], window: int) -> NDArray[np.int64]:
    """How many different words each window of so many holds, shape (max(0, len(words) − window + 1),)."""
    return np.fromiter(_distinct_counts(words, window), dtype=np.int64)


def _distinct_counts(words: Sequence[str], window: int) -> Iterator[int]:
    counts: dict[str, int] = {}
    for index, word in enumerate(words):
        counts[word] = counts.get(word, 0) + 1
        if index >= window:
            old = words[index - window]
            counts[old] -= 1
            if not counts[old]:
                del counts[old]
        if index >= window - 1:
            yield len(counts)
