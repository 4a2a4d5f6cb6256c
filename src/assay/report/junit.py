"""A report as JUnit XML, for the test views of CI systems.

| report | JUnit |
|---|---|
| finding of severity `error` | `failure`; `error` if the verdict is `error`, for then nothing was
  judged |
| finding of severity `warning` or `info` | a passed case with the finding in `system-out` |
| verdict `pass` | a passed case `verdict` |
| verdict `inconclusive` | `error` on the case `verdict`, as the exit code is not 0 either;
  `skipped` on request |
| a step that was skipped | a `skipped` case with its reason |
| a file that `grade` labels ok | a passed case with the file's name |
| a part of a `gate` that passed or is undecided | a case with its name, as a verdict |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal
from xml.etree import ElementTree as ET

from assay.report.text import evidence_items, one_line, sentence, shorten, subject_items, visible
from assay.verdict import Finding, Report, Severity, Verdict, jsonable

Inconclusive = Literal["error", "skipped"]

# What XML 1.0 cannot hold, not even as a character reference, and what `visible` leaves in place of
# it.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAX_TEXT = 20_000


def render(report: Report, inconclusive: Inconclusive = "error") -> str:
    """The JUnit document of `report`; `inconclusive` says whether such a verdict is red or yellow
    in CI.
    """
    command = one_line(report.command)
    suite = ET.Element("testsuite", name=_legal(f"assay {command}"))
    properties = ET.SubElement(suite, "properties")
    subject = subject_items(report.subject)
    taken = {key for key, _ in subject}
    for key, value in [
        *subject,
        *((f"{k} (count)" if k in taken else k, v) for k, v in _headline(report)),
    ]:
        ET.SubElement(properties, "property", name=_legal(key), value=_legal(value))
    classname = _legal(f"assay.{command}")
    if not _told_by_findings(report):
        _verdict_case(suite, classname, "verdict", report.verdict, sentence(report), inconclusive)
    for part in report.results.get("parts", ()) if command == "gate" else ():
        verdict = Verdict(part["verdict"])
        if verdict in (Verdict.PASS, Verdict.INCONCLUSIVE):  # the others are told by their findings
            _verdict_case(suite, classname, part["name"], verdict, part["says"], inconclusive)
    seen: Counter[str] = Counter()
    for finding in report.findings:
        seen[finding.id] += 1
        # The name stays the same from run to run, so that CI can follow it; the title may hold
        # figures.
        name = finding.id if seen[finding.id] == 1 else f"{finding.id} ({seen[finding.id]})"
        _finding_case(
            suite, finding, report.verdict, {"classname": classname, "name": _legal(name)}
        )
    for row in report.results.get("files", ()) if command == "grade" else ():
        if row.get("label") == "ok":  # the others are told by their findings
            ET.SubElement(
                suite, "testcase", classname=classname, name=_legal(one_line(str(row["path"])))
            )
    for name, reason in skipped(jsonable(report.results)):
        case = ET.SubElement(suite, "testcase", classname=classname, name=_legal(name))
        ET.SubElement(case, "skipped", message=_legal(reason))
    suites = ET.Element("testsuites", name="assay")
    suites.append(suite)
    for element in (suite, suites):
        for attribute, path in (
            ("tests", "."),
            ("failures", "failure"),
            ("errors", "error"),
            ("skipped", "skipped"),
        ):
            found = suite.iter("testcase") if path == "." else suite.iterfind(f"testcase/{path}")
            element.set(attribute, str(len(list(found))))
    ET.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(suites, encoding="unicode")}\n'


def _told_by_findings(report: Report) -> bool:
    """Whether error findings carry the verdict, so that a case of its own would count it twice."""
    judged = report.verdict in (Verdict.FAIL, Verdict.ERROR)
    return judged and any(f.severity is Severity.ERROR for f in report.findings)


def _headline(report: Report) -> Iterator[tuple[str, str]]:
    for metric in report.headline:
        invalid = "" if metric.valid else f" (invalid: {one_line(metric.note)})"
        yield one_line(metric.name), one_line(metric.text) + invalid


def _verdict_case(
    suite: ET.Element,
    classname: str,
    name: str,
    verdict: Verdict,
    says: str,
    inconclusive: Inconclusive,
) -> None:
    case = ET.SubElement(suite, "testcase", classname=classname, name=_legal(one_line(name)))
    message = _legal(says)
    match verdict:
        case Verdict.FAIL | Verdict.ERROR:
            ET.SubElement(case, "error", type="error", message=message)
        case Verdict.INCONCLUSIVE if inconclusive == "error":
            ET.SubElement(case, "error", type="inconclusive", message=message)
        case Verdict.INCONCLUSIVE:
            ET.SubElement(case, "skipped", message=f"inconclusive: {message}")
        case Verdict.PASS:
            ET.SubElement(case, "system-out").text = message


def _finding_case(
    suite: ET.Element, finding: Finding, verdict: Verdict, names: dict[str, str]
) -> None:
    title = _legal(one_line(finding.title))
    case = ET.SubElement(suite, "testcase", names)
    if finding.severity is Severity.ERROR:
        kind = "error" if verdict is Verdict.ERROR else "failure"
        ET.SubElement(case, kind, type=_legal(finding.id), message=title).text = _body(finding)
    else:
        ET.SubElement(
            case, "system-out"
        ).text = f"{finding.severity.value}: {title}\n{_body(finding)}".rstrip()


def _body(finding: Finding) -> str:
    """The finding in full, as plain text."""
    parts = [visible(finding.detail)]
    parts += [f"{key}: {value}" for key, value in evidence_items(finding.evidence)]
    for title, lines in (
        ("likely cause", finding.causes),
        ("to do", finding.remedies),
        ("see", finding.references),
    ):
        parts += [f"{title}: {one_line(line)}" for line in lines]
    return _legal(shorten("\n".join(filter(None, parts)), _MAX_TEXT))


def skipped(results: Any, path: str = "results") -> Iterator[tuple[str, str]]:
    """(name, reason) of every step in `results` whose status is `skipped`, at any depth."""
    if isinstance(results, Mapping):
        if results.get("status") == "skipped":
            named = next(
                (results[key] for key in ("name", "path", "title") if results.get(key)), path
            )
            given = next(
                (results[key] for key in ("reason", "detail", "note") if results.get(key)),
                "skipped",
            )
            yield one_line(str(named)), one_line(str(given))
        for key, value in results.items():
            yield from skipped(value, f"{path}.{key}")
    elif isinstance(results, Sequence) and not isinstance(results, str):
        for i, value in enumerate(results):
            yield from skipped(value, f"{path}[{i}]")


def _legal(text: str) -> str:
    return _ILLEGAL.sub("\ufffd", text)
