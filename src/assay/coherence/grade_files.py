"""`assay grade`: label files of finished model output and report on all of them."""

from __future__ import annotations

import codecs
import json
import os
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.coherence.diagnosis import explain
from assay.coherence.grading import Grade, Label, grade
from assay.errors import AssayError
from assay.verdict import Block, Finding, Metric, Quote, Report, Severity, Table, Verdict, worst

# -----------------------------------------------------------------------------
# Read one file of model output as text, in bounded memory, and say what was odd about it.

MAX_BYTES = 16 * 2**20
"""Bytes of one file that are read; of a longer one the beginning is graded, and the report says so."""
FIFO_WAIT_S = 10.0
"""Seconds that a named pipe may stay silent."""
_ALLOWED_INVALID = 0.1
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@dataclass(frozen=True)
class Reading:
    """The text of a file, and what was odd about its bytes."""

    text: str
    truncated: bool = False
    invalid_bytes: int = 0
    first_invalid: int | None = None
    """Byte offset of the first byte that is not UTF-8."""


def read_text(path: str) -> Reading:
    """The text in `path`, or on stdin for `-`. Raises `AssayError` for what holds no text."""
    try:
        data = sys.stdin.buffer.read(MAX_BYTES + 1) if path == "-" else _read_file(Path(path))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise unreadable(path, reason) from None
    return decode(data[:MAX_BYTES], path, truncated=len(data) > MAX_BYTES)


def decode(data: bytes, path: str, *, truncated: bool = False) -> Reading:
    """Bytes as text: UTF-8, with or without a byte order mark, or UTF-16 with one. Broken bytes become U+FFFD."""
    bom, encoding = next(((b, name) for b, name in _BOMS if data.startswith(b)), (b"", "utf-8"))
    data = data[len(bom) :]
    if encoding == "utf-8" and data.count(0) > max(8, len(data) // 50):
        raise unreadable(path, "a binary file, not text")
    decoder = codecs.getincrementaldecoder(encoding)("strict")
    try:
        return Reading(decoder.decode(data, final=not truncated), truncated)
    except UnicodeDecodeError as error:
        first = error.start
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data, final=not truncated)
    invalid = text.count("\ufffd")
    if invalid > _ALLOWED_INVALID * len(text):
        raise unreadable(path, f"not UTF-8 text (first invalid byte at offset {first})")
    return Reading(text, truncated, invalid, first)


def _read_file(path: Path) -> bytes:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(0, "a directory, not a file")
    if stat.S_ISFIFO(mode):
        return _read_fifo(path)
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _read_fifo(path: Path) -> bytes:
    """Read a pipe to its end. A plain open would wait for a writer for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        chunks: list[bytes] = []
        size = 0
        poll = select.poll()
        poll.register(fd, select.POLLIN | select.POLLHUP)
        while size <= MAX_BYTES:
            if not poll.poll(FIFO_WAIT_S * 1000):
                raise OSError(0, f"a named pipe to which nothing was written for {FIFO_WAIT_S:g} s")
            chunk = os.read(fd, 2**16)
            if not chunk:
                break
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def unreadable(path: str, reason: str) -> AssayError:
    """The error for a file (`-` is stdin) that holds no text."""
    shown = "stdin" if path == "-" else path
    return AssayError(
        f"{shown}: {reason}",
        finding_id="coherence.unreadable",
        remedy="give a text file with one model output, or one chat-completion response as JSON",
        evidence={"path": path},
    )


# -----------------------------------------------------------------------------
# Grade one chat-completion (or text-completion) response, as the JSON object that a server sends.

_WORST_FIRST = (Label.DEGENERATE, Label.EMPTY, Label.TRUNCATED_REASONING, Label.OK)


RESPONSES = ("chat.completion", "text_completion")
"""What a server writes as `object` into a response."""


def is_completion(value: Any) -> bool:
    """Whether a JSON value is a server's response, and not a model's answer that happens to be JSON."""
    choices = value.get("choices") if isinstance(value, Mapping) else None
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        return False
    return all(
        isinstance(c, Mapping) and (isinstance(c.get("message"), Mapping) or "text" in c) for c in choices
    )


def grade_completion(response: Mapping[str, Any]) -> Grade:
    """The grade of a response; of several choices the worst.

    `reasoning` and `reasoning_content` are one field under two names. Text completions (`text`) are content.

    >>> grade_completion({"choices": [{"finish_reason": "stop", "message": {"content": None}}]}).label.value
    'empty'
    """
    grades = [_grade_choice(choice) for choice in response["choices"]]
    return min(grades, key=lambda g: _WORST_FIRST.index(g.label))


def _grade_choice(choice: Mapping[str, Any]) -> Grade:
    message = _message(choice)
    return grade(
        _plain(message.get("content")),
        reasoning=_reasoning(message),
        tool_calls=_calls(message),
        finish_reason=reason if isinstance(reason := choice.get("finish_reason"), str) else None,
    )


def _message(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    message = choice.get("message")
    return message if isinstance(message, Mapping) else {"content": choice.get("text")}


def _reasoning(message: Mapping[str, Any]) -> str:
    return _plain(message.get("reasoning") or message.get("reasoning_content"))


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def _plain(content: Any) -> str:
    """Text of a content field: a string, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return ""


def graded_part(response: Mapping[str, Any], result: Grade) -> str:
    """The text that decided `result`, a grade of this response."""
    for choice in response["choices"]:
        if _grade_choice(choice) == result:
            message = _message(choice)
            if result.part == "reasoning":
                return _reasoning(message)
            return _plain(message.get("content"))
    return ""


# -----------------------------------------------------------------------------

_VERDICTS = {
    Label.OK: Verdict.PASS,
    Label.DEGENERATE: Verdict.FAIL,
    Label.EMPTY: Verdict.FAIL,
    Label.TRUNCATED_REASONING: Verdict.INCONCLUSIVE,
}
_SHOWN_BEFORE, _SHOWN_AFTER = 160, 240
_MAX_QUOTES = 20


@dataclass(frozen=True)
class GradedFile:
    """One file with its grade. `shown` is the field that decided, for the report to quote."""

    path: str
    grade: Grade
    shown: str
    reading: Reading


def grade_files(paths: Sequence[str]) -> Report:
    """Grade every file (`-` is stdin). What cannot be read becomes a finding; the others are still graded."""
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
    """Grade one file: raw text, or one completion response as JSON (JSON of another shape is itself the answer)."""
    reading = read_text(path)
    response = _response(path, reading.text)
    if response is None:
        return GradedFile(path, grade(reading.text), reading.text, reading)
    result = grade_completion(response)
    return GradedFile(path, result, graded_part(response, result), reading)


def _response(path: str, text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and value.get("choices") == [] and value.get("object") in RESPONSES:
        raise unreadable(path, "a response of a server without a choice in it")
    return value if is_completion(value) else None


def _row(file: GradedFile) -> dict[str, Any]:
    result = file.grade
    return {
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


def _findings(file: GradedFile) -> list[Finding]:
    found = []
    result, reading = file.grade, file.reading
    if result.label is not Label.OK:
        found.append(explain(file.path, result))
    if reading.truncated or result.examined_chars < result.total_chars:
        found.append(
            Finding(
                id="coherence.not_all_examined",
                severity=Severity.WARNING,
                title=f"{file.path}: only the first {result.examined_chars:,} characters were examined",
                evidence={"path": file.path, "examined_chars": result.examined_chars},
            )
        )
    if reading.invalid_bytes:
        found.append(
            Finding(
                id="coherence.invalid_utf8",
                severity=Severity.WARNING,
                title=f"{file.path}: not valid UTF-8, first at byte {reading.first_invalid}; read with U+FFFD there",
                evidence={
                    "path": file.path,
                    "count": reading.invalid_bytes,
                    "first_byte": reading.first_invalid,
                },
                remedies=("write the output as UTF-8",),
            )
        )
    return found


def _headline(graded: Sequence[GradedFile], unreadable: int) -> list[Metric]:
    counts = {label: sum(file.grade.label is label for file in graded) for label in Label}
    metrics = [Metric("files", str(len(graded)))]
    metrics += [
        Metric(label.value.replace("_", " "), str(n)) for label, n in counts.items() if n or label is Label.OK
    ]
    return metrics + ([Metric("unreadable", str(unreadable))] if unreadable else [])


def _blocks(graded: Sequence[GradedFile]) -> list[Block]:
    if not graded:
        return []
    rows = [
        (
            file.path,
            file.grade.label.value,
            file.grade.kind or "",
            _shown(file.grade.onset_char),
            f"{file.grade.coherent_chars:,}",
        )
        for file in graded
    ]
    columns = ("file", "label", "kind", "onset", "coherent characters")
    bad = [file for file in graded if file.grade.label in {Label.DEGENERATE, Label.TRUNCATED_REASONING}]
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
    return Quote(f"{file.path} ({file.grade.part})", text, status=file.grade.label.value, onset=onset - start)


def _shown(onset: int | None) -> str:
    return "" if onset is None else f"{onset:,}"
