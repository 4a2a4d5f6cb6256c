"""`assay grade`: unpack files of finished model output, label each answer, and report on all of
them.

Bodies and streams of model servers are unpacked into the answers in them, so that `grade` takes
what `curl` saved.

The JSON values of a file are offered one by one to the readers of `readers`.

What was lost (a stream that breaks off, events that are no JSON, an error in the middle) is a note
beside the answers. A file that is clearly an envelope and from which no answer can be read has a
`reason` instead of answers. One that shows no sign of an envelope is the answer itself: `unpack`
returns None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.coherence.causes import explain
from assay.coherence.grading import Grade, Label, grade
from assay.coherence.readers import read
from assay.coherence.reading import (
    MAX_BYTES,
    Answer,
    Assembly,
    Parsed,
    Reading,
    Value,
    finish,
    has,
    http_head,
    json_values,
    python_fields,
    read_text,
    without_noise,
)
from assay.errors import AssayError
from assay.verdict import Block, Finding, Metric, Quote, Report, Severity, Table, Verdict, worst


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
    """The answers in JSON values, or None if no reader understands any of them."""
    out = Assembly()
    objects = [v for v in _flat(parsed.values, 2) if has(v)]
    numbers = [v.get("sequence_number") for v in objects]
    if (
        parsed.stream
        and all(isinstance(n, int) for n in numbers)
        and len(set(numbers)) == len(numbers)
    ):
        objects = sorted(objects, key=lambda v: int(v["sequence_number"]))
    unknown = [value for value in objects if not read(value, out)]
    if unknown and parsed.breaks_off and unknown[-1] is objects[-1]:
        unknown.pop()  # of the value in which it breaks off too little has come
    if unknown and not (out.answers or out.errors) and _records(unknown, out, parsed.stream):
        unknown = []
    return (
        _finished(out, parsed, len(objects), len(unknown))
        if out.apis or out.errors or out.textless
        else None
    )


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
    return f"the server says: {' '.join(message.split())[:300]}"


# Label the answers, and report on all files.


_WORST_FIRST = (
    Label.DEGENERATE,
    Label.EMPTY,
    Label.NOT_EXAMINED,
    Label.TRUNCATED_REASONING,
    Label.OK,
)
_VERDICTS = {
    Label.OK: Verdict.PASS,
    Label.DEGENERATE: Verdict.FAIL,
    Label.EMPTY: Verdict.FAIL,
    Label.TRUNCATED_REASONING: Verdict.INCONCLUSIVE,
    Label.NOT_EXAMINED: Verdict.INCONCLUSIVE,
}
_SHOWN_BEFORE, _SHOWN_AFTER = 160, 240
_MAX_QUOTES = 20
MOST_CHOICES = 1000
"""Answers of one file that are listed in the results, the worst first."""


@dataclass(frozen=True)
class GradedFile:
    """One file with its grade: that of its worst answer, of which `shown` is the field that
    decided.

    `choices` holds the name and grade of every answer where the file is a body or a stream, `notes`
    what was lost.
    """

    path: str
    grade: Grade
    shown: str
    reading: Reading
    choices: Sequence[tuple[str, Grade]] = ()
    unpacked: Unpacked | None = None


def grade_files(paths: Sequence[str]) -> Report:
    """Grade every file (`-` is stdin). What cannot be read becomes a finding; the others are still
    graded.
    """
    graded: list[GradedFile] = []
    findings: list[Finding] = []
    unreadable = 0
    for path in dict.fromkeys(paths):
        try:
            graded.append(grade_file(path))
        except AssayError as error:
            unreadable += 1
            findings.append(error.to_finding())
    findings += [f for file in graded for f in _findings(file)]
    verdicts = [_VERDICTS[file.grade.label] for file in graded] + [Verdict.ERROR] * unreadable
    return Report(
        command="grade",
        verdict=worst(verdicts),
        subject={"files": list(dict.fromkeys(paths))},
        findings=findings,
        results={"files": [_row(file) for file in graded]},
        headline=_headline(graded, unreadable),
        blocks=_blocks(graded),
    )


def grade_file(path: str) -> GradedFile:
    """Grade one file: the body or stream of a server (`envelopes`), or a text that is the answer
    itself.
    """
    reading = read_text(path)
    unpacked = unpack(reading.text)
    if unpacked is None:
        return GradedFile(path, grade(reading.text), reading.text, reading)
    choices = [(answer.name, _grade_answer(answer)) for answer in unpacked.answers]
    if not choices:
        return GradedFile(path, _without_answer(unpacked), "", reading, (), unpacked)
    worst_at = min(range(len(choices)), key=lambda i: _WORST_FIRST.index(choices[i][1].label))
    answer, result = unpacked.answers[worst_at], choices[worst_at][1]
    shown = "".join(answer.reasoning if result.part == "reasoning" else answer.content)
    return GradedFile(path, result, shown, reading, choices, unpacked)


def grade_completion(response: Mapping[str, Any]) -> Grade:
    """The grade of a response as JSON, of any API that `envelopes` knows; of several choices the
    worst.

    >>> silent = {"choices": [{"finish_reason": "stop", "message": {"content": None}}]}
    >>> grade_completion(silent).label.value
    'empty'
    """
    unpacked = unpack_values(Parsed([response]))
    if unpacked is None:
        return Grade(Label.NOT_EXAMINED, "unknown_envelope")
    grades = [_grade_answer(answer) for answer in unpacked.answers]
    return min(grades, key=lambda g: _WORST_FIRST.index(g.label), default=_without_answer(unpacked))


def _grade_answer(answer: Answer) -> Grade:
    return grade(
        "".join(answer.content),
        reasoning="".join(answer.reasoning),
        tool_calls=list(answer.calls.values()),
        finish_reason=answer.finish_reason,
    )


def _without_answer(unpacked: Unpacked) -> Grade:
    if unpacked.reason is None:
        return Grade(Label.EMPTY, "no_choices", 0)
    return Grade(Label.NOT_EXAMINED, unpacked.reason, evidence={"why": "; ".join(unpacked.notes)})


def _row(file: GradedFile) -> dict[str, Any]:
    result = file.grade
    row = {
        "path": file.path,
        "label": result.label.value,
        "kind": result.kind,
        "onset_char": result.onset_char,
        "coherent_chars": result.coherent_chars,
        "part": result.part,
        "total_chars": result.total_chars,
        "examined_chars": result.examined_chars,
        "evidence": dict(result.evidence),
    }
    if file.unpacked is None:
        return row
    worst_first = sorted(file.choices, key=lambda choice: _WORST_FIRST.index(choice[1].label))
    kept = file.choices if len(file.choices) <= MOST_CHOICES else worst_first[:MOST_CHOICES]
    choices = [
        {
            "name": name,
            "label": g.label.value,
            "kind": g.kind,
            "onset_char": g.onset_char,
            "part": g.part,
            "coherent_chars": g.coherent_chars,
        }
        for name, g in kept
    ]
    told = {
        "api": file.unpacked.api,
        "partial": file.unpacked.partial,
        "notes": list(file.unpacked.notes),
    }
    return {**row, **told, "choices_total": len(file.choices), "choices": choices}


def _findings(file: GradedFile) -> list[Finding]:
    found = []
    result, reading = file.grade, file.reading
    if result.label is Label.NOT_EXAMINED:
        found.append(_not_examined(file))
    elif result.label is not Label.OK:
        explained = explain(file.path, result)
        found.append(replace(explained, title=explained.title + _which(file)))
    if part := _part(file):
        title = f"{file.path}: only a part was examined: {part}"
        evidence = {"path": file.path, "examined_chars": result.examined_chars}
        found.append(
            Finding("coherence.not_all_examined", Severity.WARNING, title, evidence=evidence)
        )
    if reading.invalid_bytes:
        title = (
            f"{file.path}: not valid UTF-8, first at byte {reading.first_invalid}; read with U+FFFD"
            " there"
        )
        evidence = {
            "path": file.path,
            "count": reading.invalid_bytes,
            "first_byte": reading.first_invalid,
        }
        remedies = ("write the output as UTF-8",)
        found.append(
            Finding(
                "coherence.invalid_utf8",
                Severity.WARNING,
                title,
                evidence=evidence,
                remedies=remedies,
            )
        )
    return found


def _which(file: GradedFile) -> str:
    """Which answer decided for a file of several, and how many of them are not ok."""
    if len(file.choices) < 2:
        return ""
    name = next(name for name, result in file.choices if result is file.grade)
    bad = sum(result.label is not Label.OK for _, result in file.choices)
    return f": {name}, the worst of {len(file.choices):,} answers, of which {bad:,} are not ok"


_ASK_AGAIN = {
    "error_body": "ask again; the server sent an error and no answer",
    "stream_cut": "ask again; nothing of the answer had arrived when the stream broke off",
    "interleaved_streams": "write each stream to a file of its own",
}


def _not_examined(file: GradedFile) -> Finding:
    kind = file.grade.kind or ""
    title = f"{file.path}: not examined ({kind.replace('_', ' ')}): {file.grade.evidence['why']}"
    remedy = _ASK_AGAIN.get(
        kind, "save the body or the stream as the server sent it, or the answer as plain text"
    )
    evidence = {"path": file.path, "kind": kind}
    return Finding(
        "coherence.not_examined", Severity.WARNING, title, evidence=evidence, remedies=(remedy,)
    )


def _part(file: GradedFile) -> str:
    """What is missing of the file, in words; empty where all of it was examined."""
    reading, result, unpacked = file.reading, file.grade, file.unpacked
    missing = [f"the first {MAX_BYTES // 2**20} MiB were read"] if reading.truncated else []
    if result.examined_chars < result.total_chars:
        missing.append(f"the first {result.examined_chars:,} of {result.total_chars:,} characters")
    if reading.nul_bytes:
        missing.append(f"{reading.nul_bytes:,} NUL bytes were left out")
    if unpacked and unpacked.partial and result.label is not Label.NOT_EXAMINED:
        missing += unpacked.notes
    return "; ".join(missing)


def _headline(graded: Sequence[GradedFile], unreadable: int) -> list[Metric]:
    counts = {label: sum(file.grade.label is label for file in graded) for label in Label}
    metrics = [Metric("files", str(len(graded)))]
    metrics += [
        Metric(label.value.replace("_", " "), str(n))
        for label, n in counts.items()
        if n or label is Label.OK
    ]
    return metrics + ([Metric("unreadable", str(unreadable))] if unreadable else [])


def _blocks(graded: Sequence[GradedFile]) -> list[Block]:
    if not graded:
        return []
    rows = [
        (
            file.path,
            file.grade.label.value.replace("_", " "),
            file.grade.kind or "",
            "" if file.grade.onset_char is None else f"{file.grade.onset_char:,}",
            f"{file.grade.coherent_chars:,}",
        )
        for file in graded
    ]
    columns = ("file", "label", "kind", "onset", "coherent characters")
    bad = [
        file for file in graded if file.grade.label in {Label.DEGENERATE, Label.TRUNCATED_REASONING}
    ]
    quotes = [_quote(file) for file in bad[:_MAX_QUOTES]]
    note = (
        f"the first {_MAX_QUOTES} of {len(bad)} faulty texts are quoted below"
        if len(bad) > _MAX_QUOTES
        else ""
    )
    return [Table("Files", columns, rows, numeric=frozenset({3, 4}), note=note), *quotes]


def _quote(file: GradedFile) -> Quote:
    onset = file.grade.onset_char or 0
    start = max(0, onset - _SHOWN_BEFORE)
    text = file.shown[start : onset + _SHOWN_AFTER]
    return Quote(
        f"{file.path} ({file.grade.part})", text, status=file.grade.label.value, onset=onset - start
    )
