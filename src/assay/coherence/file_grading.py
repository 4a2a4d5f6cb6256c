"""`assay grade`: label files of finished model output and report on all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from assay.coherence.completion import RESPONSES, grade_completion, graded_part, is_completion
from assay.coherence.explain import explain
from assay.coherence.grading import Grade, Label, grade
from assay.coherence.reading import Reading, read_text, unreadable
from assay.errors import AssayError
from assay.verdict import Block, Finding, Metric, Quote, Report, Severity, Table, Verdict, worst

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
