"""Tokens that no reader should see: padding, unknown, reserved and turn markers of chat templates.

A text may speak of such tokens, most often in code; so what stands in code spans or quotes does not count, and a
single end-of-text marker at the very end is a setting of the server (`skip_special_tokens`), not a broken model.
"""

from __future__ import annotations

import re
from bisect import bisect_right

from assay.coherence.text import Detection, TextView

_SPECIAL = re.compile(
    r"<\|[A-Za-z][\w./ -]{0,40}\|>"  # <|im_start|>, <|reserved_special_token_7|>
    r"|<｜[^｜\n]{1,40}｜>"  # DeepSeek's full-width bars
    r"|\[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS|/?INST|unused\d+)\]"
    r"|<(?:pad|PAD|unk|UNK|bos|eos|mask|unused\d+|extra_id_\d+|start_of_turn|end_of_turn|reserved_\d+)>"
    r"|</?(?:s|SYS|think|tool_call|tool_response)>|<</?SYS>>"
    r"|<0x[0-9A-F]{2}>"
    r"|\u2047"
)
_TURN = re.compile(
    r"im_start|start_header|start_of_turn|INST|SYS|User|Assistant|<\|(?:user|assistant|system)\|>"
)
_FILLER = re.compile(r"pad|unk|unused|reserved|extra_id|mask|0x|\u2047", re.IGNORECASE)
_PLAIN = re.compile(r"</?(?:s|think|tool_call|tool_response)>")
_BYTE_LEVEL = re.compile(r"[A-Za-z][Ġ▁][A-Za-z]|Ċ")
_CODE_SPAN = re.compile(r"`[^`\n]*`|\"[^\"\n]{0,40}\"|'[^'\n]{0,40}'")


def detect_special_tokens(view: TextView) -> Detection | None:
    """The first leak of special tokens or of a tokenizer's internal marks."""
    found = [d for d in (_leak(view), _byte_level(view)) if d]
    return min(found, key=lambda d: d.onset, default=None)


def _leak(view: TextView) -> Detection | None:
    if "<" not in view.text and "[" not in view.text and "\u2047" not in view.text:
        return None
    marks = list(_SPECIAL.finditer(view.text))
    if not marks:
        return None
    hidden = _Spans([*view.fences, *(m.span() for m in _CODE_SPAN.finditer(view.text))])
    marks = [m for m in marks if m.start() not in hidden]
    flood = _longest_row(view, marks)
    if flood:
        return flood
    leaks = [m for m in marks if not _PLAIN.fullmatch(m.group())]
    fillers = [m for m in leaks if _FILLER.search(m.group())]
    turns = [m for m in leaks if _TURN.search(m.group())]
    ends = [m for m in leaks if m not in fillers and m not in turns]
    if turns:
        return _found("template_leak", turns, view)
    if len(fillers) >= 3 or (fillers and len(view.text) < 40 * len(fillers)):
        return _found("special_token_leak", fillers, view)
    if len(ends) >= 2 or (ends and ends[0].end() < view.visible_end and view.text[ends[0].end() :].strip()):
        return _found("special_token_leak", ends, view)
    return None


def _longest_row(view: TextView, marks: list[re.Match[str]]) -> Detection | None:
    """Five special tokens in a row, blanks between them or not."""
    row: list[re.Match[str]] = []
    for mark in marks:
        if row and view.text[row[-1].end() : mark.start()].strip():
            if len(row) >= 5:
                break
            row = []
        row.append(mark)
    return _found("special_token_flood", row, view) if len(row) >= 5 else None


def _byte_level(view: TextView) -> Detection | None:
    """`Ġ`, `▁` or `Ċ` between letters: ids were turned into text without the tokenizer's decoder."""
    marks = list(_BYTE_LEVEL.finditer(view.text))
    if len(marks) < 5 or len(marks) < len(view.text) / 60:
        return None
    return Detection("tokenizer_marks", marks[0].start(), marks[-1].end(), {"count": len(marks)})


def _found(kind: str, marks: list[re.Match[str]], view: TextView) -> Detection:
    evidence = {"token": marks[0].group(), "count": len(marks)}
    return Detection(kind, marks[0].start(), marks[-1].end(), evidence)


class _Spans:
    """Membership in a union of spans, by bisection."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self._edges: list[int] = []
        for start, end in sorted(spans):
            if self._edges and start < self._edges[-1]:
                self._edges[-1] = max(self._edges[-1], end)
            else:
                self._edges += (start, end)

    def __contains__(self, position: int) -> bool:
        return bisect_right(self._edges, position) % 2 == 1


# -----------------------------------------------------------------------------
# Characters that stand for broken bytes: U+FFFD from half a UTF-8 sequence, and control characters.
#
# These name a decoding fault (bytes of one character split over tokens or chunks), not always a broken model.

_BROKEN = re.compile("\ufffd+")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")
_LONE = re.compile("[\ud800-\udfff]")


def detect_replacement(view: TextView) -> Detection | None:
    """The first of enough replacement, control or lone surrogate characters."""
    n = len(view.text)
    for kind, pattern, share in (
        ("replacement_characters", _BROKEN, 0.002),
        ("replacement_characters", _LONE, 0.002),
        ("control_characters", _CONTROL, 0.01),
    ):
        runs = [m.span() for m in pattern.finditer(view.text)]
        count = sum(end - start for start, end in runs)
        if (count >= 3 and count >= share * n) or count >= 40:
            return Detection(kind, runs[0][0], runs[-1][1], {"count": count, "runs": len(runs)})
    return None
