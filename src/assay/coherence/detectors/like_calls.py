"""Calls that come again: lines of the same few calls, equal blocks, equal calls of one message."""

from __future__ import annotations

import re
from collections.abc import Sequence

from assay.coherence.detection import WEAK, Detection, Family, quote
from assay.coherence.text import Ending, TextView

CALLS, CALLS_CUT, CALLS_TURNS = 24, 12, 6
"""Lines that are calls, in all (where the server cut the text fewer), and how often each of them
comes.
"""
JSON_CALLS, JSON_TURNS = 9, 3
"""The same for calls of tools: no program is written so."""
_LINE = re.compile(r"[^\n]+")


_CALL = re.compile(r"(?:[-*•>→$]|\d+[.)])?\s*(?:await |self\.)?[A-Za-z_][\w.]*\(.*\);?")
_TOOL = re.compile(
    r"(?:<tool_call>|<function=|<\|?tool_call\|?>|\[TOOL_CALLS\])?\s*\[?\{\s*\"(?:name|tool|function|action|tool_name)\"\s*:"
    r".*\"(?:arguments|parameters|args|input|action_input|tool_input)\".*|(?:Action|Tool)(?: call|"
    r" Input)?:\s*\S.*"
    r"|(?:→|⏺|●)\s*\w+\(.*\)",
    re.IGNORECASE,
)

_UNSEEN = ("the tool's result is not shown to the model by the template", WEAK)


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
            return Detection(
                "repeated_tool_call",
                calls[0].start(),
                view.visible_end,
                evidence,
                Family.LOOP,
                _UNSEEN,
            )
    return None


_BLOCK = re.compile(r"<(tool_call|function_call|invoke|function)\b[^<>]{0,80}>[^\0]{1,2000}?</\1>")


def _same_blocks(view: TextView) -> Detection | None:
    """Three equal blocks between the marks of a call, one after the other."""
    blocks = list(_BLOCK.finditer(view.text)) if view.text.count("</") >= 3 else []
    for a, b, c in zip(blocks, blocks[1:], blocks[2:], strict=False):
        between = view.text[a.end() : b.start()] + view.text[b.end() : c.start()]
        if a.group() == b.group() == c.group() and not between.strip():
            return Detection(
                "repeated_tool_call",
                a.start(),
                c.end(),
                {"call": quote(a.group())},
                Family.LOOP,
                _UNSEEN,
            )
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
    return Detection("repeated_tool_call", 0, 0, evidence, Family.LOOP, _UNSEEN)
