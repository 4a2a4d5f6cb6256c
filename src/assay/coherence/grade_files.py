"""`assay grade`: label each answer in files of finished model output, and report on all of them.

Bodies and streams of model servers are unpacked into the answers in them, so that `grade` takes
what `curl` saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from assay.bounded_json import join_halves
from assay.coherence.answers import Answer
from assay.coherence.causes import explain
from assay.coherence.decoding import MAX_BYTES, Reading, read_text
from assay.coherence.grading import Grade, Label, grade
from assay.coherence.stream_decoder import Parsed
from assay.coherence.unpacking import Unpacked, unpack, unpack_values
from assay.errors import AssayError
from assay.verdict import Block, Finding, Metric, Quote, Report, Severity, Table, Verdict, worst

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
    """Grade one file: the body or stream of a server (`unpacking`), or a text that is the answer
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
    shown = join_halves("".join(answer.reasoning if result.part == "reasoning" else answer.content))
    return GradedFile(path, result, shown, reading, choices, unpacked)


def grade_completion(response: Mapping[str, Any]) -> Grade:
    """The grade of a response as JSON, of any API that `unpacking` knows; of several choices the
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
    calls = [{k: join_halves(v) for k, v in call.items()} for call in answer.calls.values()]
    return grade(
        join_halves("".join(answer.content)),
        reasoning=join_halves("".join(answer.reasoning)),
        tool_calls=calls,
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
