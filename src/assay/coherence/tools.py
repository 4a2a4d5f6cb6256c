"""The tools suite: 24 calls and 24 JSON objects, asked one at a time and many at once, each with
one right answer.

A fault of batching, of a cache or of low-bit numbers often spares prose and breaks what must be
exact. So each answer is parsed, checked against its schema and the right values; a reference
answers the same, and pairs are compared (McNemar's exact test, mid-p). The cases are in
`tool_cases.json`; all are asked greedily.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any

from assay.coherence.conversation import BatchEngine, side_by_side, user
from assay.coherence.record import CheckRecord, ToolAnswer, ToolLevel
from assay.engines import GIVEN_UP, Engine, Reply, Request, ToolCall, call_remains, read_calls
from assay.errors import AssayError
from assay.stats.answers import mcnemar, paired_answers
from assay.stats.non_inferiority import Standing

LEVELS = (1, 8, 32)
"""Requests at once."""
_MAX_TOKENS = 160
_HEAD = 160


@dataclass(frozen=True)
class Case:
    """One question: a call of the tool `name`, or without a name a JSON object; `expect` are the
    right values.
    """

    key: str
    ask: str
    schema: Mapping[str, Any]
    expect: Mapping[str, Any]
    name: str = ""
    about: str = ""

    def request(self) -> Request:
        """The question to an engine."""
        if not self.name:
            text = (
                f"{self.ask}\n\nReply with one JSON object only, which follows this schema:"
                f" {json.dumps(self.schema)}"
            )
            return Request(messages=(user(text),), max_tokens=_MAX_TOKENS)
        function = {"name": self.name, "description": self.about, "parameters": self.schema}
        return Request(
            messages=(user(f"{self.ask} Use the tool."),),
            max_tokens=_MAX_TOKENS,
            tools=({"type": "function", "function": function},),
        )


@cache
def cases() -> tuple[Case, ...]:
    """All cases, calls and objects in turns, so that a run that is cut short has both."""
    document = json.loads(
        (files("assay.coherence") / "tool_cases.json").read_text(encoding="utf-8")
    )
    calls = [
        Case(f"call {c['name']}", c["ask"], c["parameters"], c["expect"], c["name"], c["about"])
        for c in document["calls"]
    ]
    objects = [
        Case(f"object {i + 1}", c["ask"], c["schema"], c["expect"])
        for i, c in enumerate(document["schemas"])
    ]
    return tuple(case for pair in zip(calls, objects, strict=True) for case in pair)


def run_level(
    engine: Engine, streams: int, on_done: Callable[[], None], deadline: float = float("inf")
) -> ToolLevel:
    """Ask all cases, `streams` at once (an engine in this process answers them as one batch)."""
    if isinstance(engine, BatchEngine):
        replies = engine.generate_batch([case.request() for case in cases()], deadline=deadline)
        whole = [
            (c, r) for c, r in zip(cases(), replies, strict=True) if r.finish_reason != GIVEN_UP
        ]
        return ToolLevel(streams, tuple(answer_of(case, reply) for case, reply in whole))
    answers: list[ToolAnswer] = []
    failed, error = 0, ""
    for answer in side_by_side(
        [partial(_asked, engine, case) for case in cases()], streams, deadline
    ):
        on_done()
        if isinstance(answer, AssayError):
            failed, error = failed + 1, answer.message
        else:
            answers.append(answer)
    return ToolLevel(streams, tuple(sorted(answers, key=lambda a: a.case)), failed, error)


def _asked(engine: Engine, case: Case) -> ToolAnswer | AssayError:
    try:
        return answer_of(case, engine.generate(case.request()))
    except AssayError as error:
        return error


def answer_of(case: Case, reply: Reply) -> ToolAnswer:
    """What came of one case. A whole call that was left in the text is not parsed, and still judged
    by its values.
    """
    form, value, parsed = "", None, False
    if case.name:
        calls: Sequence[ToolCall] = reply.tool_calls or read_calls(reply.content, {case.name}).calls
        form = "parsed" if reply.tool_calls else "unread" if calls else ""
        if not calls and call_remains(reply.content, {case.name}):
            form = "remains"
        value = _object(calls[0].arguments) if calls and calls[0].name == case.name else None
        parsed = bool(reply.tool_calls) and value is not None
    else:
        value = _object(_unfenced(reply.content))
        parsed = value is not None
    valid = value is not None and conforms(value, case.schema)
    right = value is not None and all(
        key in value and same(value[key], want) for key, want in case.expect.items()
    )
    shown = reply.content or " ".join(f"{call.name}({call.arguments})" for call in reply.tool_calls)
    return ToolAnswer(
        case.key, parsed, valid, valid and right, form, "" if valid and right else shown[:_HEAD]
    )


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _unfenced(text: str) -> str:
    """The text in a code fence where it is nothing but that: many models put their JSON there."""
    fenced = re.fullmatch(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", text, re.DOTALL)
    return fenced.group(1) if fenced else text


def same(value: Any, want: Any) -> bool:
    """Equality of JSON values: 3 and 3.0 are one number, true is none, composed and decomposed
    accents are one letter.
    """
    if isinstance(want, bool) or isinstance(value, bool) or want is None:
        return value is want
    if isinstance(want, int | float):
        return isinstance(value, int | float) and abs(value - want) <= 1e-9 * max(1.0, abs(want))
    if isinstance(want, str):
        return isinstance(value, str) and unicodedata.normalize("NFC", value.strip()) == want
    if isinstance(want, list):
        return isinstance(value, list) and len(value) == len(want) and all(map(same, value, want))
    return (
        isinstance(value, dict)
        and value.keys() == want.keys()
        and all(same(value[k], want[k]) for k in want)
    )


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "null": lambda v: v is None,
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "integer": lambda v: (
        not isinstance(v, bool)
        and (isinstance(v, int) or (isinstance(v, float) and v.is_integer()))
    ),
}


def conforms(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value follows a schema, for the part of JSON Schema that the cases use."""
    kinds = schema.get("type", ())
    if not any(_KINDS[kind](value) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, str):
        return re.search(schema.get("pattern", ""), value) is not None
    if isinstance(value, list):
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(conforms(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        known = schema["properties"]
        return (
            all(name in value for name in schema["required"])
            and all(name in known for name in value)
            and all(conforms(item, known[name]) for name, item in value.items())
        )
    if isinstance(value, int | float):
        return bool(schema.get("minimum", value) <= value <= schema.get("maximum", value))
    return True


def paired(ours: ToolLevel, theirs: ToolLevel) -> tuple[int, int, float]:
    """Cases that only `ours` and only `theirs` answered right, of those that both answered, and the
    mid-p value.
    """
    known = {answer.case: answer.right for answer in theirs.answers}
    pairs = [(answer.right, known[answer.case]) for answer in ours.answers if answer.case in known]
    ours_only = sum(a and not b for a, b in pairs)
    theirs_only = sum(b and not a for a, b in pairs)
    return ours_only, theirs_only, mcnemar(ours_only, theirs_only)


JUDGED = ("parsed", "schema_valid", "right")


def against(ours: ToolLevel, theirs: ToolLevel, margin: float) -> dict[str, dict[str, Any]]:
    """How each count of a level stands against that of a reference on the same cases; empty where
    none is the same.
    """
    known = {answer.case: answer for answer in theirs.answers}
    pairs = [(answer, known[answer.case]) for answer in ours.answers if answer.case in known]
    return {
        n: standing([(getattr(a, n), getattr(b, n)) for a, b in pairs], margin)
        for n in JUDGED
        if pairs
    }


def standing(pairs: Sequence[tuple[bool, bool]], margin: float) -> dict[str, Any]:
    """No worse, worse or undecided, from (ours, theirs) for each question; `margin` is a difference
    of shares.
    """
    gained, lost = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    found = paired_answers(gained, lost, len(pairs), margin=margin)
    open_ = found.standing is Standing.UNDECIDED
    return {
        "decision": found.standing.value.replace(" ", "_"),
        "questions_needed": found.questions_needed if open_ else None,
        "asked": len(pairs),
        "right": sum(a for a, _ in pairs),
        "reference": sum(b for _, b in pairs),
        "gained": gained,
        "lost": lost,
        "difference": {k: getattr(found.difference, k) for k in ("value", "lo", "hi")},
        "p_value": found.p_value,
        "margin": margin,
    }


def checked_answers(record: CheckRecord) -> dict[tuple[str, str, str], bool]:
    """Whether more than half of the texts of each checked question (probe, variant and check) were
    right.

    The texts of one question are no independent pieces of evidence, so each question counts once.
    """
    texts: dict[tuple[str, str, str], list[bool]] = {}
    for probe in record.probes:
        for sample in probe.samples:
            for check in sample.checks:
                texts.setdefault((probe.name, sample.variant, check.name), []).append(check.passed)
    return {question: 2 * sum(passed) > len(passed) for question, passed in texts.items()}
