"""Is a finished text sane? One label, the kind of fault, and where it begins."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from assay.bounded_json import loads
from assay.coherence.detection import Detection, Family, quote
from assay.coherence.detectors.like_calls import repeated_call
from assay.coherence.detectors.loops import without_request
from assay.coherence.detectors.registry import all_detectors
from assay.coherence.text import Ending, TextView, ending_of

MAX_CHARS = 2_000_000
"""Code points of one field that are examined; a longer one is examined up to here, and the grade
says so.
"""
TOGETHER = 200
"""Faults that begin within so many code points are one fault, named by the most exact detector."""

_ESCAPE = re.compile(r"\\([ntr\"\\/])")
_OPEN_THINK = "<think>"
_CLOSED_THINK = "</think>"


class Label(StrEnum):
    """What a text is."""

    OK = "ok"
    DEGENERATE = "degenerate"
    EMPTY = "empty"
    TRUNCATED_REASONING = "truncated_reasoning"
    NOT_EXAMINED = "not_examined"
    """Of a file: the envelope of a server from which no answer could be read."""


@dataclass(frozen=True)
class Grade:
    """The grade of one model output.

    `part` says which field decided: `content`, `reasoning`, `tool_calls`. `onset_char` counts code
    points into that field and is None where the label is ok. `coherent_chars` sums over all fields
    what stands before their onsets. `detections` holds the first fault of each degenerate field.
    """

    label: Label
    kind: str | None = None
    onset_char: int | None = None
    coherent_chars: int = 0
    part: str = "content"
    evidence: Mapping[str, Any] = field(default_factory=dict)
    detections: Mapping[str, Detection] = field(default_factory=dict)
    total_chars: int = 0
    examined_chars: int = 0

    @property
    def family(self) -> str:
        """The family of the fault that decided; empty where no passage is degenerate."""
        return self._deciding.family if self._deciding else ""

    @property
    def causes(self) -> tuple[str, ...]:
        """What the fault that decided most likely comes from, the likeliest first."""
        return self._deciding.likely_causes if self._deciding else ()

    @property
    def causes_of_others(self) -> tuple[str, ...]:
        """The causes of a fault whose family assay does not know."""
        known = {*Family} - {Family.OTHER}
        return () if self.family in known else self.causes

    @property
    def _deciding(self) -> Detection | None:
        return self.detections.get(self.part) if self.label is Label.DEGENERATE else None


def grade(
    text: str | None,
    *,
    reasoning: str | None = None,
    tool_calls: Sequence[Any] = (),
    finish_reason: str | None = None,
) -> Grade:
    """Grade one model output: content, reasoning and tool calls, each in its own right.

    `tool_calls` holds objects with `name` and `arguments` (a JSON string), or the dicts of the
    OpenAI schema. `finish_reason` is the server's; without it the ending is judged by the text
    alone.

    >>> grade("The capital of France is Paris.").label
    <Label.OK: 'ok'>
    >>> bad = grade("The capital of France is" + " the" * 50)
    >>> bad.label.value, bad.kind, bad.onset_char
    ('degenerate', 'the_the_the', 24)
    """
    content = text or ""
    calls = [_call(c) for c in tool_calls]
    fields = [("content", content), ("reasoning", reasoning or "")]
    fields += [
        ("tool_calls", f"{name} {_unescaped(arguments)}".strip()) for name, arguments in calls
    ]
    ending = ending_of(finish_reason)
    if ending is Ending.UNKNOWN and (
        _open_think(content) is not None or (reasoning and not content and not calls)
    ):
        ending = Ending.CUT  # reasoning was never closed
    found, coherent, examined = _detect_all(fields, ending)
    if "tool_calls" not in found and (faulty := repeated_call(calls) or _malformed(calls, ending)):
        found["tool_calls"] = faulty
    total = sum(len(value) for _, value in fields)
    common: dict[str, Any] = {
        "coherent_chars": coherent,
        "total_chars": total,
        "examined_chars": examined,
    }
    if found:
        name, first = next(iter(found.items()))
        return Grade(
            Label.DEGENERATE,
            first.kind,
            first.onset_char,
            part=name,
            evidence=first.evidence,
            detections=found,
            **common,
        )
    verdict = _unfinished(content, reasoning or "", bool(calls), finish_reason)
    if verdict is None:
        return Grade(Label.OK, **common)
    label, kind, where, onset = verdict
    return Grade(label, kind, onset, part=where, **common)


def first_fault(view: TextView) -> Detection | None:
    """The first fault that any detector finds; of several that begin together the former
    detector's.
    """
    found = [d for detect in all_detectors() if (d := detect(view))]
    if not found:
        return None
    rest = without_request(view)
    if rest is not None and first_fault(replace(view, text=rest)) is None:
        return None
    earliest = min(d.onset_char for d in found)
    return next(d for d in found if d.onset_char <= earliest + TOGETHER)


def _detect_all(
    fields: Sequence[tuple[str, str]], ending: Ending
) -> tuple[dict[str, Detection], int, int]:
    """The first fault of each field by name; code points before the faults; code points
    examined.
    """
    found: dict[str, Detection] = {}
    coherent = examined = 0
    for name, value in fields:
        head = value[:MAX_CHARS]
        detection = first_fault(TextView(head, ending)) if head else None
        coherent += detection.onset_char if detection else len(head)
        examined += len(head)
        if detection and name not in found:
            found[name] = detection
    return found, coherent, examined


def _unfinished(
    content: str, reasoning: str, called: bool, finish_reason: str | None
) -> tuple[Label, str, str, int] | None:
    """Label, kind, field and onset of an output with no answer in it; None where there is one."""
    if (opened := _open_think(content)) is not None:
        return Label.TRUNCATED_REASONING, "open_think_tag", "content", opened
    if content.strip() or called:
        return None
    if not reasoning.strip():
        return Label.EMPTY, "no_text" if not content else "blank_text", "content", 0
    if ending_of(finish_reason) is Ending.STOPPED:
        return Label.EMPTY, "answer_in_reasoning_field", "content", 0
    return Label.TRUNCATED_REASONING, "reasoning_cut", "reasoning", len(reasoning)


def _open_think(content: str) -> int | None:
    """Where reasoning begins that is never closed and before which nothing stands."""
    opened = content.rfind(_OPEN_THINK)
    whole = opened < 0 or _CLOSED_THINK in content[opened:] or content[:opened].strip()
    return None if whole else opened


def _call(call: Any) -> tuple[str, str]:
    if isinstance(call, Mapping):
        inner = call.get("function")
        call = inner if isinstance(inner, Mapping) else call
        name, arguments = call.get("name"), call.get("arguments")
    else:
        name, arguments = getattr(call, "name", ""), getattr(call, "arguments", "")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)
    return str(name or ""), written


def _unescaped(arguments: str) -> str:
    """The arguments of a call as a reader sees them: JSON with its escapes undone."""
    try:
        written = json.dumps(loads(arguments, strict=False), ensure_ascii=False)
    except ValueError:
        written = arguments
    return _ESCAPE.sub(lambda m: {"n": "\n", "t": "\t", "r": "\r"}.get(m[1], m[1]), written)


def _malformed(calls: Sequence[tuple[str, str]], ending: Ending) -> Detection | None:
    """Arguments that are no JSON, in a message of which the server says that it is whole."""
    for name, arguments in calls if ending is Ending.STOPPED else ():
        if arguments.strip()[:1] in ("{", "["):
            try:
                loads(arguments, strict=False, numbers="null")
            except ValueError as error:
                evidence = {"name": name, "arguments": quote(arguments), "error": str(error)}
                return Detection("malformed_arguments", 0, len(arguments), evidence, Family.CALLS)
    return None
