"""How a verdict, a severity and a status word look and read, the same in every format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from assay.report.text import one_line
from assay.verdict import Report, Severity, Verdict

Tone = Literal["good", "bad", "warn", "error", "info", ""]


@dataclass(frozen=True)
class Look:
    """A glyph, a word and a tone. The word says it all, so that no meaning rests on colour alone."""

    glyph: str
    word: str
    tone: Tone


VERDICTS = {
    Verdict.PASS: Look("✓", "PASS", "good"),
    Verdict.FAIL: Look("✗", "FAIL", "bad"),
    Verdict.INCONCLUSIVE: Look("?", "INCONCLUSIVE", "warn"),
    Verdict.ERROR: Look("!", "ERROR", "error"),
}

SEVERITIES = {
    Severity.ERROR: Look("✗", "error", "bad"),
    Severity.WARNING: Look("!", "warning", "warn"),
    Severity.INFO: Look("i", "info", "info"),
}

_WORDS: dict[Tone, str] = {
    "good": "ok pass passed healthy verified accept valid coherent run yes complete",
    "bad": "degenerate empty fail failed mismatch missing broken reject invalid dead corrupt error nan",
    "warn": "truncated_reasoning truncated inconclusive skipped unverified degraded marginal warning partial "
    "insufficient extra interrupted unreachable",
}
_STATUS: dict[str, Tone] = {word: tone for tone, words in _WORDS.items() for word in words.split()}


def status_tone(status: str) -> Tone:
    """The tone of a status word (`ok`, `mismatch`, `REJECT`); neutral for a word that is not one."""
    return _STATUS.get(status.strip().lower().replace(" ", "_"), "")


def sentence(report: Report) -> str:
    """The one sentence under the verdict: the report's own summary, else its gravest finding."""
    text = one_line(report.summary) or _derived(report)
    return f"Interrupted: {text}" if report.interrupted else text


def _derived(report: Report) -> str:
    errors = [f for f in report.findings if f.severity is Severity.ERROR]
    warnings = [f for f in report.findings if f.severity is Severity.WARNING]
    if report.verdict is Verdict.PASS:
        held = "What was examined holds"
        return f"{held}, with {plural(len(warnings), 'warning')}." if warnings else f"{held}."
    gravest = [*errors, *warnings, *report.findings]
    if not gravest:
        return {
            Verdict.INCONCLUSIVE: "The evidence is too thin to judge.",
            Verdict.ERROR: "It could not be examined.",
        }.get(report.verdict, "It does not hold.")
    title = _capital(one_line(gravest[0].title)).rstrip(".")
    more = len(errors) - 1
    return f"{title}, and {plural(more, 'more error')}." if more > 0 else f"{title}."


def _capital(text: str) -> str:
    """`text` with a capital at its beginning, unless it begins with a name (a file, a URL, an option)."""
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first.rstrip(",;").isalpha() and first.islower() else text


def plural(number: int, noun: str) -> str:
    """A count with its noun: `1 warning`, `3 warnings`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
