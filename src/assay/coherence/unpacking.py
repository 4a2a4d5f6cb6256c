"""Unpack a file: the answers in the body or stream of a model server, and what was lost on the way.

The JSON values of the file are offered one by one to the API formats. A file that is clearly an
envelope and from which no answer can be read has a `reason` instead of answers. One that shows no
sign of an envelope is the answer itself: `unpack` returns None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.bounded_json import join_halves
from assay.coherence.answers import Answer, Assembly, Value, finish, has
from assay.coherence.api_formats.registry import offer
from assay.coherence.python_reprs import python_fields
from assay.coherence.stream_decoder import Parsed, json_values
from assay.coherence.wrappings import http_head, without_noise


@dataclass(frozen=True)
class Unpacked:
    """The answers of a file, what was lost on the way, and, where no answer can be read, why."""

    api: str
    answers: Sequence[Answer] = ()
    notes: Sequence[str] = ()
    partial: bool = False
    """Something is missing: the stream breaks off, or some of it could not be read."""
    reason: str | None = None
    """`error_body`, `unknown_envelope`, `stream_cut`, `interleaved_streams` or `no_answer`."""


_SIGNS = re.compile(
    r'"(choices|finish_reason|stop_reason|done_reason|eval_count|meta_info|tokens_predicted|usageMetadata|candidates|usage'
    r'|system_fingerprint|completion_tokens|prompt_tokens|output_tokens|generated_text|output_ids|logprobs)"\s*:'
    r'|"object"\s*:\s*"(chat\.completion|text_completion|response|list|model|embedding)'
)
_PLAIN_ERROR = re.compile(
    r"(?:<(?:html|!doctype).{0,400}?<title>\s*[45]\d\d\b.*|(?:\d{3} )?(?:Internal Server Error|Bad"
    r" Gateway|Service Unavailable"
    r"|Gateway Time-?out|Not Found|page not found|Unauthorized|Forbidden|Too Many Requests|Method"
    r" Not Allowed"
    r"|no healthy upstream|upstream (?:connect error|request timeout)[^\n]*)\.?|curl: \(\d+\)"
    r" [^\n]*"
    r"|Error: (?:model \S+ not found|llama runner|connect E|could not connect|POST"
    r" predict)[^\n]*)\Z",
    re.IGNORECASE | re.DOTALL,
)
_PRINTED_RUN = re.compile(
    r"^Output \[Text (\d+)(?: Beam \d+)?\]: \"(.*?)\"?(?=\n(?:Input|Output) \[Text \d|\s*\Z)",
    re.MULTILINE | re.DOTALL,
)
"""What the example script of an engine prints: the input, which holds special tokens, and the
output.
"""
_TEXT_KEYS = ("text", "content", "completion", "response", "output", "answer", "token", "delta")


def unpack(text: str) -> Unpacked | None:
    """The answers in the text of a file, or None if it is no envelope but an answer itself."""
    status, body = http_head(text)
    if (len(body) < 20_000 and _PLAIN_ERROR.match(body)) or (
        status >= 400 and body[:1] not in ("{", "[")
    ):
        title = re.search(r"<title>\s*(.*?)\s*</title>", body, re.IGNORECASE | re.DOTALL)
        said = title[1] if title else body or f"status {status} and no body"
        return Unpacked("http", notes=(_said(said),), reason="error_body")
    for candidate in dict.fromkeys((body, without_noise(body))):
        parsed = json_values(candidate)
        found = None if parsed is None else unpack_values(parsed)
        if found is not None:
            return found
    if outputs := list(_PRINTED_RUN.finditer(body)):
        return Unpacked(
            "printed run", [Answer(f"text {m[1]}", content=[m[2]], whole=True) for m in outputs]
        )
    if (fields := python_fields(body)) is not None:
        return _from_python(fields)
    parsed = json_values(body)
    if parsed and parsed.stream and not (parsed.values or parsed.lost):
        return Unpacked("sse", notes=("the stream holds no event but its end",), reason="no_answer")
    if parsed and (parsed.stream or len(set(_SIGNS.findall(body[:100_000]))) > 1):
        return Unpacked(
            "unknown", notes=("no API that is known here writes it so",), reason="unknown_envelope"
        )
    return Unpacked("http", [Answer(content=[body], whole=True)]) if status else None


def _from_python(fields: Sequence[Mapping[str, str]]) -> Unpacked:
    """The answers in objects of a client library as Python prints them."""
    answers = []
    for said in fields:
        answer = Answer(
            content=[said.get("content", "")], reasoning=[said.get("reasoning", "")], whole=True
        )
        if "arguments" in said:
            answer.call(0, said.get("name"), said["arguments"])
        finish(answer, said.get("reason"))
        answers.append(answer)
    if not answers:
        return Unpacked(
            "python", notes=("the printed object shows no text",), reason="unknown_envelope"
        )
    return Unpacked("python", answers)


def unpack_values(parsed: Parsed) -> Unpacked | None:
    """The answers in JSON values, or None if no format understands any of them."""
    out = Assembly()
    objects = [v for v in _flat(parsed.values, 2) if has(v)]
    numbers = [v.get("sequence_number") for v in objects]
    if (
        parsed.stream
        and all(isinstance(n, int) for n in numbers)
        and len(set(numbers)) == len(numbers)
    ):
        objects = sorted(objects, key=lambda v: int(v["sequence_number"]))
    unknown = [value for value in objects if not _offered(value, out)]
    if unknown and parsed.breaks_off and unknown[-1] is objects[-1]:
        unknown.pop()  # of the value in which it breaks off too little has come
    if unknown and not (out.answers or out.errors) and _records(unknown, out, parsed.stream):
        unknown = []
    return (
        _finished(out, parsed, len(objects), len(unknown))
        if out.apis or out.errors or out.textless
        else None
    )


def _offered(value: Value, out: Assembly) -> bool:
    try:
        return offer(value, out)
    except RecursionError:  # bodies within bodies within bodies
        return False


def _flat(values: Iterable[Any], depth: int) -> list[Any]:
    """Values, with those of lists in their place, `depth` lists deep."""
    return [
        v
        for value in values
        for v in (_flat(value, depth - 1) if depth and isinstance(value, list) else (value,))
    ]


def _finished(out: Assembly, parsed: Parsed, objects: int, unknown: int) -> Unpacked:
    api = max(out.apis, key=lambda name: out.apis[name], default="error")
    notes = [_said(message) for message in out.errors[:3]]
    answers = list(out.answers.values())
    if out.overlapping and out.open <= 0:
        notes.append(
            "two streams are interleaved, and their events carry no id that tells them apart"
        )
        return Unpacked(api, notes=notes, reason="interleaved_streams")
    if out.textless:
        notes.append(f"{out.textless} of {objects} JSON values hold no text of the model's")
    if out.disorder:
        notes.append("events stand out of order: text follows the end of its answer")
    if unknown:
        notes.append(f"{unknown} of {objects} JSON values are of no form that is known here")
    if parsed.lost:
        notes.append(f"{parsed.lost} {'events' if parsed.stream else 'pieces'} are no whole JSON")
    open_ended = [answer for answer in answers if not answer.whole]
    streamed = api != "records" and (parsed.stream or objects > len(answers)) and not parsed.ended
    cut = bool(open_ended) and (streamed or parsed.breaks_off or out.open > 0)
    if cut:
        notes.append("it breaks off before its end")
    partial = bool(cut or unknown or parsed.lost or out.errors or out.disorder or out.textless)
    if all(answer.blank for answer in answers) and (out.errors or (cut and answers)):
        return Unpacked(api, notes=notes, reason="error_body" if out.errors else "stream_cut")
    if not answers and out.textless:
        return Unpacked(api, notes=notes, reason="no_answer")
    if not answers and api == "message":
        return Unpacked(api, notes=("it holds no message of the assistant",), reason="no_answer")
    return Unpacked(api, [a for a in answers if not (a.blank and out.errors)], notes, partial)


def _records(values: Sequence[Value], out: Assembly, stream: bool) -> bool:
    """Records, or events of a stream, that keep their text under one well-known key."""
    if all(set(v) == {"text"} and isinstance(v["text"], list) for v in values):
        stream = stream or len(values) > 1
        values = [
            {"text": text} for v in values for text in v["text"]
        ]  # vLLM's demonstration server
    elif len(values) == 1 and not stream:
        return False
    named = next(
        (k for k in ("type", "event") if all(isinstance(v.get(k), str) for v in values)), None
    )
    if named:  # events, of which the most tell the text
        told = [v for v in values if any(isinstance(v.get(k), str) for k in _TEXT_KEYS)]
        stream, values = True, told if len(told) > 1 else values
    key = next((k for k in _TEXT_KEYS if all(isinstance(v.get(k), str) for v in values)), None)
    if key is None:
        return False
    for number, value in enumerate(values):
        out.answer("text" if stream else f"record {number + 1}").grow(value[key])
    out.apis["records"] = len(values)
    return True


def _said(message: str) -> str:
    return f"the server says: {' '.join(join_halves(message).split())[:300]}"
