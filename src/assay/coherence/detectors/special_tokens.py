"""Tokens that no reader should see: padding, reserved and turn markers, tags of reasoning, broken
bytes.

A text may speak of such tokens. What stands in code, in quotes or in an indented block does not
count, and neither does a token that a sentence or a list *names*: it stands where a noun would, in
a text about tokens. A single end-of-text marker at the very end is a setting of the server
(`skip_special_tokens`), not a broken model.
"""

from __future__ import annotations

import re
from collections import Counter

from assay.coherence.detection import Detection
from assay.coherence.detectors.broken_bytes import find_tokenizer_marks
from assay.coherence.detectors.roles import find_roles
from assay.coherence.detectors.token_mentions import (
    SPECIAL,
    detection_of,
    in_sentence,
    is_named,
    quoted_spans,
)
from assay.coherence.text import TextView

_TURN = re.compile(
    r"im_start|start_header|start_of_turn|inst\]|sys>|user|assistant|model|<\|system|turn[|>]|\]~!?b|\[\||channel|<\|return"
    r"|<\|message|<\|call\|",
    re.IGNORECASE,
)
_FILLER = re.compile(
    r"pad|unk|unused|reserved|extra_id|mask|0x|control|special|placeholder|\u2047", re.IGNORECASE
)
_NUMBERED = re.compile(r"(?:unused|reserved|control|special|placeholder)", re.IGNORECASE)
"""Slots that nothing was trained on: one is enough, whereas `<unk>` may stand for a word."""
_PLAIN = re.compile(r"</?(?:s|think|tool_call|tool_response)>", re.IGNORECASE)


OFTEN = 30
"""A token that comes so often is not named."""


def detect_special_tokens(view: TextView) -> Detection | None:
    """The first leak of special tokens, of turns without their marks, or of a tokenizer's internal
    marks.
    """
    found = [d for d in (_leak(view), find_roles(view), find_tokenizer_marks(view)) if d]
    return min(found, key=lambda d: d.onset_char, default=None)


def _leak(view: TextView) -> Detection | None:
    text = view.text
    if not any(mark in text for mark in "<[]\u2047"):
        return None
    marks = list(SPECIAL.finditer(text))
    if not marks:
        return None
    quoted = quoted_spans(view)
    marks = [m for m in marks if m.start() not in quoted]
    flood = _longest_row(view, marks)
    if flood:
        return flood
    if tag := _closing_tag(view, marks):
        return tag
    alone = (
        marks
        and not SPECIAL.sub("", text).strip()
        and marks[0].group() not in ("<think>", "</think>")
    )
    if alone or (marks and marks[0].group() == "<s>" and not text[: marks[0].start()].strip()):
        return detection_of("special_token_leak", marks)
    marks = [m for m in marks if not _PLAIN.fullmatch(m.group())]
    often = Counter(m.group() for m in marks)
    spoken = {m.group() for m in SPECIAL.finditer(text) if m.start() in quoted or is_named(text, m)}
    leaks = [
        m
        for m in marks
        if often[m.group()] > OFTEN
        or not (is_named(text, m) or (m.group() in spoken and in_sentence(text, m)))
    ]
    turns = [m for m in leaks if _TURN.search(m.group())]
    if turns:
        return detection_of("template_leak", turns)
    fillers = [m for m in leaks if _FILLER.search(m.group())]
    if len(fillers) >= 3 or any(_NUMBERED.search(m.group()) for m in fillers):
        return detection_of("special_token_leak", fillers)
    if fillers and len(text) < 40 * len(fillers):
        return detection_of("special_token_leak", fillers)
    ends = [m for m in leaks if m not in fillers]
    if len(ends) >= 2 or (
        ends and ends[0].end() < view.visible_end and text[ends[0].end() :].strip()
    ):
        return detection_of("special_token_leak", ends)
    return None


def _closing_tag(view: TextView, marks: list[re.Match[str]]) -> Detection | None:
    """`</think>` that nothing opened: the reasoning before it was taken for the answer."""
    tags = [m for m in marks if m.group().lower() in ("<think>", "</think>")]
    if not tags or tags[0].group().lower() == "<think>" or is_named(view.text, tags[0]):
        return None
    return detection_of("think_tag_leak", tags[:1])


def _longest_row(view: TextView, marks: list[re.Match[str]]) -> Detection | None:
    """Five special tokens in a row, blanks between them or not, or three equal ones without a
    blank.
    """
    row: list[re.Match[str]] = []
    for mark in marks:
        if row and view.text[row[-1].end() : mark.start()].strip():
            if len(row) >= 5:
                break
            row = []
        row.append(mark)
        last = row[-3:]
        if (
            len({m.group() for m in last}) == 1
            and len(last) == 3
            and last[2].end() - last[0].start() == 3 * len(mark.group())
        ):
            return detection_of("special_token_flood", row)
    return detection_of("special_token_flood", row) if len(row) >= 5 else None
