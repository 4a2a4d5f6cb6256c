"""`assay card`: what is published beside a model: a section of its card, results in the Hub's
format, and a badge.

Each figure comes with its interval, its sizes and the command that measures it again. Folders of
this machine are left out.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from assay.bounded_json import loads
from assay.coherence.options import CheckOptions
from assay.environment import VERSION
from assay.errors import AssayError
from assay.fidelity.names import label_of
from assay.fidelity.plan import Plan
from assay.files import MOST_JSON_BYTES, read_bounded
from assay.gates.figures import Figure, figures, short
from assay.gates.limits import BOUNDED
from assay.options import Options, declared_options, option
from assay.plugins import get, names
from assay.report.markdown import code, prose
from assay.report.svg import CHAR, label, tag
from assay.report.text import VERDICTS, cut_middle, one_line
from assay.verdict import (
    EXITS_INTERRUPTED,
    SCHEMA,
    Finding,
    Report,
    Severity,
    Table,
    Verdict,
    worst,
)

UNREGISTERED = "your-name/fidelity"
"""The data set that results name where the user names none: the Hub shows a result only once its
benchmark is registered.
"""
BEGIN, END = "<!-- assay card: begin -->", "<!-- assay card: end -->"
OWN_COMMANDS = ("compare", "rerun", "check", "spec", "verify", "grade", "gate")


def card_name(command: str) -> str:
    """The name of a command in the group `assay.cards`: `kv-eval` for `kv eval`."""
    return command.replace(" ", "-")


def known_commands() -> tuple[str, ...]:
    """The commands whose reports a card can show."""
    return (*OWN_COMMANDS, *(name.replace("-", " ") for name in names("assay.cards")))


@dataclass(frozen=True)
class CardOptions(Options):
    """Where the card goes, and what it says beside the figures."""

    VERB, AREA = "card", "fidelity"

    out: Path = option(Path("assay-card"), "Folder to write to.", metavar="FOLDER")
    readme: Path | None = option(
        None, "Put the section into this file as well, between two comments."
    )
    name: str | None = option(None, "Name of the model in the card.")
    candidate: str | None = option(None, "Candidate to show, where a report has several.")
    dataset: str | None = option(
        None, "Benchmark on the Hub that the results belong to.", metavar="ORG/NAME"
    )
    source: str | None = option(None, "Where the reports can be read.", metavar="URL")


@dataclass(frozen=True)
class Measured:
    """One result that a card shows."""

    command: str
    verdict: Verdict
    label: str
    results: Mapping[str, Any]
    subject: Mapping[str, Any]
    findings: Sequence[Mapping[str, Any]]
    repeat: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    """What a contract asks for, by figure and in its unit."""

    @property
    def figures(self) -> list[Figure]:
        """Its numbers."""
        return figures(self.command, self.results)

    @property
    def grade(self) -> str:
        """ACCEPT, MARGINAL, REJECT or INCONCLUSIVE of a comparison, else the verdict."""
        if self.results.get("self_test") and self.verdict is Verdict.PASS:
            return "SELF-TEST"
        grade = self.results.get("grade")
        agrees = self.verdict in _MAY_BE.get(grade, ()) if isinstance(grade, str) else False
        return str(grade) if agrees else VERDICTS[self.verdict].word


_MAY_BE = {
    "ACCEPT": (Verdict.PASS,),
    "MARGINAL": (Verdict.PASS, Verdict.FAIL),
    "REJECT": (Verdict.FAIL,),
    "INCONCLUSIVE": (Verdict.INCONCLUSIVE, Verdict.FAIL),
}
"""The verdicts with which a grade is told: an interrupted run, or one with tokens that are not
finite, is no ACCEPT.
"""


def run_card(reports: Sequence[Path | Report], options: CardOptions | None = None) -> Report:
    """Write the card of one or more reports. UsageError for a file that is no report, before
    anything is written.
    """
    options = options or CardOptions()
    if not reports:
        raise CardOptions.usage("a card needs at least one report", "assay card REPORT.json")
    found = [m for report in reports for m in read_report(report, options.candidate)]
    readme = _with_section(options.readme) if options.readme else None
    badge_text = badge_of(found)
    files = {
        Path("badge.svg"): badge(*badge_text),
        Path("card.md"): card(found, options, "badge.svg"),
    }
    counts: dict[str, int] = {}
    for measured in found:
        if measured.figures:
            number = counts[measured.command] = counts.get(measured.command, 0) + 1
            name = measured.command.replace(" ", "-") + (f"-{number}" if number > 1 else "")
            files[Path(".eval_results") / f"assay-{name}.yaml"] = eval_results(measured, options)
    try:
        for path, text in files.items():
            target = options.out / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        if options.readme and readme is not None:
            where = os.path.relpath(options.out / "badge.svg", options.readme.parent)
            section = card(found, options, Path(where).as_posix())
            with options.readme.open("w", encoding="utf-8", newline="") as file:
                file.write(readme.replace("\0", section))
    except OSError as error:
        raise AssayError(
            f"cannot write {error.filename or options.out}: {error.strerror}",
            finding_id="fidelity.card",
            remedy="name another folder with --out",
        ) from error
    written = [str(path) for path in files] + ([str(options.readme)] if options.readme else [])
    return _report(found, options, badge_text, written)


def _report(
    found: Sequence[Measured],
    options: CardOptions,
    badge_text: tuple[str, str],
    written: Sequence[str],
) -> Report:
    rows = [(m.command, f.title, f.text(), f.sizes) for m in found for f in m.figures]
    notes = []
    if options.dataset is None and rows:
        notes.append(
            Finding(
                "fidelity.benchmark",
                Severity.INFO,
                f"the results name the data set {UNREGISTERED}: the Hub shows those of registered"
                " benchmarks only",
                remedies=("name one: --dataset ORG/NAME",),
                references=("https://huggingface.co/docs/hub/eval-results",),
            )
        )
    grade, margin = badge_text
    return Report(
        command="card",
        verdict=Verdict.PASS,
        subject={"folder": str(options.out)},
        findings=notes,
        results={
            "files": list(written),
            "grade": grade,
            "badge": f"{grade} {margin}".strip(),
            "reports": [
                {"command": m.command, "verdict": m.verdict, "grade": m.grade} for m in found
            ],
        },
        blocks=(
            Table("On the card", ("from", "figure", "value", "rests on"), rows),
            Table("Written", ("file",), [(name,) for name in written], detail=True),
        ),
        summary=f"The card is written; it says {grade}{f' ({margin})' if margin else ''}.",
    )


# Reports as they are stored.


def read_report(report: Path | Report, candidate: str | None = None) -> list[Measured]:
    """What a report holds: one result, or one of each part of a gate. UsageError where it is none
    of assay's.
    """
    name = report.command if isinstance(report, Report) else str(report)
    try:
        data = (
            report.to_json()
            if isinstance(report, Report)
            else loads(read_bounded(report, MOST_JSON_BYTES, what="a report"))
        )
        if data["schema"] != SCHEMA or data["command"] not in known_commands():
            raise ValueError("no report that a card can show")
        found = list(_measured(data, candidate, name))
        for measured in found:  # a fault shows here, not half-way through writing
            card([measured], CardOptions(), "badge.svg")
            badge_of([measured])
        return found
    except AssayError as error:
        raise CardOptions.usage(f"cannot read the report {error.message}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CardOptions.usage(
            f"{name} is no report that a card can show",
            f"give the --json of {', '.join(known_commands())}",
        ) from error


def _measured(data: Mapping[str, Any], candidate: str | None, name: str) -> Iterator[Measured]:
    verdict = Verdict(data["verdict"])
    if data["exit_code"] in EXITS_INTERRUPTED:
        verdict = worst((verdict, Verdict.INCONCLUSIVE))
    results, subject, command = data["results"], data["subject"], data["command"]
    environment = data.get("environment") or {}
    if command == "gate":
        if not results["parts"]:
            raise CardOptions.usage(f"{name} examined nothing: a card needs a gate that was run")
        sha = str(results["contract"]["sha256"])[:12]
        repeat = f"assay gate --contract {shlex.quote(one_line(str(results['contract']['file'])))}"
        yield Measured(
            "gate", verdict, f"contract {sha}", {}, subject, data["findings"], repeat, environment
        )
        for part in results["parts"]:
            limits = {
                BOUNDED[limit["name"]][0]: float(limit["limit"]) for limit in part.get("limits", ())
            }
            yield Measured(
                str(part["name"]),
                Verdict(part["verdict"]),
                _label(part["subject"], part["results"]),
                part["results"],
                part["subject"],
                (),
                _repeat(str(part["name"]), part["subject"], part["results"]),
                environment,
                limits,
            )
        return
    if several := results.get("candidates"):
        named = {str(one["candidate"]): one for one in several}
        if candidate not in named:
            raise CardOptions.usage(
                f"{name} has several candidates, and a card is of one model",
                f"give --candidate, one of {', '.join(map(one_line, named))}",
            )
        results = {**results, **named[candidate]}
        verdict = _VERDICT.get(results["grade"], verdict)
    yield Measured(
        command,
        verdict,
        _label(subject, results),
        results,
        subject,
        data["findings"],
        _repeat(command, subject, results),
        environment,
    )


_VERDICT = {"ACCEPT": Verdict.PASS, "REJECT": Verdict.FAIL, "INCONCLUSIVE": Verdict.INCONCLUSIVE}


def _label(subject: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """What was measured, without folders of this machine."""
    if "reference" in subject:
        candidate = results.get("candidate") or (subject.get("candidates") or [""])[0]
        return f"{label_of(str(candidate))} against {public(str(subject['reference']))}"
    codec = f" with {results['codec']}" if results.get("codec") else ""
    for name in ("model", "checkpoint", "repo"):
        if isinstance(subject.get(name), str):
            return Path(subject[name]).name + codec
    return ", ".join(Path(str(source)).name for source in subject.get("sources") or ())


def public(spec: str) -> str:
    """An engine without folders of this machine; a name on the Hub stays whole."""
    path = spec.partition("?")[0].rpartition(":")[2]
    on_hub = (
        path.count("/") == 1 and not path.startswith((".", "~", "/")) and not Path(path).exists()
    )
    return spec if on_hub else label_of(spec)


# The options that lead to other numbers, as they are written on the command line.


def _repeat(command: str, subject: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    if command in ("compare", "rerun"):
        plan = subject["plan"]
        candidate = next(iter(plan["candidates"]), "")
        engines = [public(str(plan["reference"])), public(str(candidate))]
        return shlex.join(["assay", "compare", *engines, *flags_of(Plan, plan)])
    if command in ("identity", "determinism"):
        return f"assay check URL --{command}" + (" FILE" if command == "identity" else "")
    if command in ("check", "tools"):
        return shlex.join(
            ["assay", "check", "URL", *flags_of(CheckOptions, results.get("plan") or {})]
        )
    if (written := get("assay.cards", card_name(command))) is not None:
        return shlex.join(written(subject, results))
    repo = subject.get("repo")
    more = ["--repo", str(repo), "--revision", str(subject.get("revision"))] if repo else []
    what = {"verify": "CHECKPOINT", "spec": "LOG", "grade": "FILE"}[command]
    return shlex.join(["assay", command, what, *more])


def flags_of(options: type[Options], given: Mapping[str, Any]) -> Iterator[str]:
    """The options that differ from their defaults, as words of a command line."""
    for declared in declared_options(options).values():
        value = given.get(declared.name, declared.default)
        if (
            not declared.listed
            or declared.required
            or declared.apart
            or value in (None, declared.default)
        ):
            continue
        if declared.many and not declared.form:
            if list(value) != list(declared.default):
                for one in value:
                    yield from (f"--{declared.flag}", public(str(one)))
        elif declared.kind is bool:
            yield f"--{declared.flag}"
        else:
            yield from (f"--{declared.flag}", str(replace(declared, default=value).shown_default))


# The section of the model card.


def card(found: Sequence[Measured], options: CardOptions, badge_path: str) -> str:
    """The section: a badge, and for each result its grade, its figures, its findings and the
    command that repeats it.
    """
    grade, margin = badge_of(found)
    alt = f"assay: {grade} {margin}".strip()
    named = f" of {prose(options.name)}" if options.name else ""
    parts = [
        f"## Measured with assay{named}",
        f"![{prose(alt)}](<{badge_path.replace('>', '')}>)",
        (
            "*ACCEPT* means the same distribution within the margins on the text that was scored."
            " It says nothing of other text, and nothing of tasks."
        ),
    ]
    for measured in found:
        parts += _section(measured)
    packages = (found[0].environment.get("packages") or {}) if found else {}
    versions = [
        f"{name} {packages[name]}"
        for name in ("torch", "transformers", "vllm")
        if packages.get(name)
    ]
    parts.append(prose(", ".join([f"Written by assay {VERSION}", *versions])) + ".")
    return "\n\n".join(parts) + "\n"


def _section(measured: Measured) -> Iterator[str]:
    yield f"### {prose(measured.command)}: {prose(measured.grade)}"
    if measured.label:
        yield prose(measured.label)
    if rows := [_row(measured, figure) for figure in measured.figures]:
        yield "\n".join(
            ("| figure | value | interval | margin | rests on |", "|---|--:|--:|--:|---|", *rows)
        )
    told = [f for f in measured.findings if f.get("severity") in ("error", "warning")]
    if told:
        yield "\n".join(f"- {prose(str(f['severity']))}: {prose(str(f['title']))}" for f in told)
    yield f"Repeat it: {code(measured.repeat)}"


def _row(measured: Measured, figure: Figure) -> str:
    margin = _margins(measured).get(figure.key)
    bound = (
        f"{'≥' if figure.better == 'higher' else '±' if figure.better == 'zero' else '≤'}"
        f" {short(margin)}"
    )
    unit = f" {figure.unit}" if figure.unit else ""
    interval = (
        "unknown"
        if figure.lo is None or figure.hi is None
        else f"{short(figure.lo)} to {short(figure.hi)} ({figure.level})"
    )
    cells = (
        figure.title,
        f"{short(figure.value)}{unit}",
        interval,
        "" if margin is None else f"{bound}{unit}",
        figure.sizes,
    )
    return "| " + " | ".join(prose(cell) or " " for cell in cells) + " |"


def _margins(measured: Measured, grade: str = "ACCEPT") -> dict[str, float]:
    """The margins of a comparison by figure, in the units of the figure."""
    tests = measured.results.get("margins") or ()
    return {str(t["metric"]): float(t["bound"]) for t in tests if t["grade"] == grade} | dict(
        measured.limits
    )


def _with_section(path: Path) -> str:
    """The text of a file with a NUL where the section goes between its comments; UsageError where
    they do not match.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        text = ""
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise CardOptions.usage(f"cannot read {path}: {said}") from error
    text = text.replace("\0", "")
    if BEGIN not in text and END not in text:
        before, after = (f"{text.rstrip()}\n\n" if text.strip() else ""), "\n"
    elif text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END):
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    else:
        raise CardOptions.usage(
            f"{path} has no single pair of comments for the card",
            f"leave one {BEGIN} before one {END}, or none",
        )
    return f"{before}{BEGIN}\n\0{END}{after}"


# The Hub's results: https://huggingface.co/docs/hub/eval-results, specification eval_results.yaml
# in huggingface/hub-docs.


def eval_results(measured: Measured, options: CardOptions) -> str:
    """One entry a figure. Texts are written as JSON strings, which YAML reads alike."""
    lines = [f"# Written by assay {VERSION}."]
    for figure in measured.figures:
        interval = (
            ""
            if figure.lo is None or figure.hi is None
            else f" [{short(figure.lo)}, {short(figure.hi)}] ({figure.level})"
        )
        unit = f" {figure.unit}" if figure.unit else ""
        notes = (
            f"{figure.title}: {short(figure.value)}{unit}{interval}; {figure.sizes or 'one run'}; "
            f"{measured.label}; {measured.grade}; repeat: {measured.repeat}"
        )
        lines += [
            "- dataset:",
            f"    id: {_text(options.dataset or UNREGISTERED)}",
            f"    task_id: {_text(figure.key)}",
            f"  value: {_number(figure.value)}",
        ]
        if options.source:
            lines += ["  source:", f"    url: {_text(options.source)}", '    name: "assay reports"']
        lines.append(f"  notes: {_text(notes)}")
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    return json.dumps(one_line(text), ensure_ascii=False)


def _number(value: float) -> str:
    """A number that YAML 1.1 and 1.2 read as one: with an exponent it needs a point."""
    text = repr(float(value))
    head, mark, exponent = text.partition("e")
    return f"{head}.0e{exponent}" if mark and "." not in head else text


# The badge.


def badge_of(found: Sequence[Measured]) -> tuple[str, str]:
    """What the badge says: the grade, and the figure that decides with its margin. The worst result
    is the one that is told.
    """
    verdict = worst(m.verdict for m in found)
    graded = [m for m in found if "grade" in m.results]
    telling = [m for m in found if m.verdict is verdict and m.command != "gate"]
    told = next((m for m in telling if m in graded), telling[0] if telling else found[0])
    if verdict is Verdict.PASS and graded:
        told = max(
            graded, key=lambda m: _GRADES.index(m.grade) if m.grade in _GRADES else len(_GRADES)
        )
    if told in graded and told.grade in (*_GRADES, "SELF-TEST"):
        return told.grade, _deciding(told)
    many = "" if len(found) == 1 or verdict is not Verdict.PASS else f"{len(found)} reports"
    return VERDICTS[verdict].word, many or told.command


_GRADES = ("ACCEPT", "MARGINAL", "INCONCLUSIVE", "REJECT")


def _deciding(measured: Measured) -> str:
    """The figure nearest to, or furthest beyond, its margin: `KL ≤ 0.0042 of 0.010`."""
    rejects = measured.grade == "REJECT"
    margins = _margins(measured, "ACCEPT" if measured.grade == "ACCEPT" else "MARGINAL")
    best: tuple[float, str] | None = None
    for figure in measured.figures:
        margin = margins.get(figure.key)
        if margin is None or figure.lo is None or figure.hi is None:
            continue
        if figure.better == "higher":
            bound, room = (figure.hi if rejects else figure.lo), 100 - margin
            used, sign = 100 - bound, "≤" if rejects else "≥"
        elif figure.better == "zero":
            ends = abs(figure.lo), abs(figure.hi)
            inside = 0.0 if figure.lo <= 0 <= figure.hi else min(ends)
            bound, sign = (inside, "≥") if rejects else (max(ends), "within ±")
            used, room = bound, margin
        else:
            bound, sign = (figure.lo, "≥") if rejects else (figure.hi, "≤")
            used, room = bound, margin
        share = used / room if room else float("inf") if used else 0.0
        gap = "" if sign.endswith("±") else " "
        of = "margin" if figure.better == "higher" else "of"
        says = (
            f"{_BADGE[figure.key]} {sign}{gap}{short(bound)} {of}"
            f" {short(margin)}{_UNIT[figure.key]}"
        )
        if best is None or share > best[0]:
            best = (share, says)
    return best[1] if best else ""


_BADGE = {"kld": "KL", "dppl_pct": "Δppl", "top1_pct": "top-1"}
_UNIT = {"kld": "", "dppl_pct": " %", "top1_pct": " %"}
_COLOURS = {
    "ACCEPT": "#2e7d32",
    "PASS": "#2e7d32",
    "MARGINAL": "#9a6700",
    "REJECT": "#b3261e",
    "FAIL": "#b3261e",
    "ERROR": "#6e3b8a",
}
_PAD, _HEIGHT = 7.0, 20.0


def badge(grade: str, margin: str) -> str:
    """The badge as a self-contained SVG: `assay | ACCEPT KL ≤ 0.0042 of 0.010`."""
    says = cut_middle(f"{grade} {margin}".strip(), 90)
    texts = ("assay", says)
    left, right = (len(one_line(text)) * CHAR + 2 * _PAD for text in texts)
    colour = _COLOURS.get(grade, "#5f6368")
    parts = [
        tag("title", label(f"assay: {says}")),
        tag("rect", width=left, height=_HEIGHT, fill="#3c4043"),
        tag("rect", x=left, width=right, height=_HEIGHT, fill=colour),
    ]
    for text, x, width in ((texts[0], 0.0, left), (texts[1], left, right)):
        parts.append(
            tag(
                "text",
                label(text),
                x=x + width / 2,
                y=14,
                fill="#ffffff",
                text_anchor="middle",
                textLength=width - 2 * _PAD,
                lengthAdjust="spacingAndGlyphs",
            )
        )
    return (
        tag(
            "svg",
            "".join(parts),
            xmlns="http://www.w3.org/2000/svg",
            width=left + right,
            height=_HEIGHT,
            role="img",
            aria_label=f"assay: {one_line(says)}",
            font_family="Verdana,DejaVu Sans,sans-serif",
            font_size="11",
        )
        + "\n"
    )
