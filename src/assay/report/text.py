"""Text that may come from anywhere, made safe to show and short enough to read.

Model output, server messages and file names reach every report. `visible` shows what a terminal or
a browser would obey instead of print; `excerpt` picks the parts of a quote worth showing.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from assay.secrets import scrub
from assay.verdict import Quote, Report, Severity, Verdict, jsonable

# Zero-width joiners and variation selectors build real letters and emoji. Every other format
# character (bidi overrides, tags, zero-width spaces, byte-order marks) can only mislead a reader.
_JOINERS = frozenset("\u200c\u200d")
_CONTROLS = (
    "NUL",
    "SOH",
    "STX",
    "ETX",
    "EOT",
    "ENQ",
    "ACK",
    "BEL",
    "BS",
    "HT",
    "LF",
    "VT",
    "FF",
    "CR",
    "SO",
    "SI",
    "DLE",
    "DC1",
    "DC2",
    "DC3",
    "DC4",
    "NAK",
    "SYN",
    "ETB",
    "CAN",
    "EM",
    "SUB",
    "ESC",
    "FS",
    "GS",
    "RS",
    "US",
)
_UNSEEN = re.compile(r"[^\n\t\x20-\x7e\xa0-\xac\xae-\u02ff]")
_COMMAND = re.compile(
    r"(?:[A-Z_]+=\S* )*(?:assay"
    r" (?:-|(?:check|grade|verify|spec|compare|reference|rerun|kv|gap|gate|card|demo)\b)|vllm"
    r" (?:serve|bench|complete|chat)|pip install |curl \S|"
    r"hf download|python3? -|llama-server -|docker run|transformers serve|export [A-Z_]+=)"
)
_CODE = re.compile(r"`([^`\n]+)`")


def visible(text: str) -> str:
    """`text` with control, format and surrogate characters written out; newlines and tabs stay."""
    return _UNSEEN.sub(lambda match: _shown(match.group()), text)


def _shown(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return f"⟨{_CONTROLS[code]}⟩"
    if unicodedata.category(char) == "Cs":
        return "\ufffd"
    hidden = unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cn") and char not in _JOINERS
    return f"⟨U+{code:04X}⟩" if hidden else char


def one_line(text: str) -> str:
    """`text` made visible on one line, without the secrets of the run: every run of white space is
    one space.
    """
    return visible(" ".join(scrub(text).split()))


def cut_middle(text: str, limit: int) -> str:
    """A path of more than `limit` characters with its middle left out; any other text as it is."""
    if len(text) <= limit or " " in text or not ("/" in text or "\\" in text):
        return text
    tail = max(limit * 2 // 3, 1)
    return f"{text[: limit - tail - 1]}…{text[-tail:]}"


def shorten(text: str, limit: int) -> str:
    """`text` cut to `limit` code points, and how many were left out."""
    return (
        text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"
    )


@dataclass(frozen=True)
class Piece:
    """A part of a quote: good text, text after the onset, the onset itself, or a note on what is
    left out.
    """

    kind: Literal["text", "after", "onset", "gap"]
    text: str


def excerpt(quote: Quote, head: int, around: int) -> list[Piece]:
    """The first `head` code points of a quote and, further on, `around` of them on each side of its
    onset.
    """
    text, onset = quote.text, quote.onset
    if not text:
        return []
    spans = [(0, min(head, len(text)))]
    if onset is not None:
        onset = min(max(onset, 0), len(text))
        start, stop = max(onset - around, 0), min(onset + around, len(text))
        spans = [(0, max(head, stop))] if start <= head else [*spans, (start, stop)]
    return list(_pieces(text, onset, [(start, min(stop, len(text))) for start, stop in spans]))


def _pieces(text: str, onset: int | None, spans: Sequence[tuple[int, int]]) -> Iterator[Piece]:
    at = 0
    for start, stop in spans:
        if start > at:
            yield _gap(start - at)
        if onset is not None and start <= onset <= stop:
            if onset > start:
                yield Piece("text", visible(text[start:onset]))
            yield Piece("onset", f"goes wrong at character {onset:,}")
            if stop > onset:
                yield Piece("after", visible(text[onset:stop]))
        elif stop > start:
            yield Piece(
                "after" if onset is not None and start > onset else "text",
                visible(text[start:stop]),
            )
        at = stop
    if at < len(text):
        yield _gap(len(text) - at)


def _gap(count: int) -> Piece:
    return Piece("gap", f"{count:,} characters not shown")


def split_code(text: str) -> list[tuple[bool, str]]:
    """`text` as (is code, part) pairs: backticks mark code, and a text that is a command as a whole
    is code.
    """
    text = one_line(text)
    if "`" not in text and is_command(text):
        return [(True, text)]
    return [(bool(i % 2), part) for i, part in enumerate(_CODE.split(text)) if part]


_FENCE = re.compile(r"```[\w+.-]*[ \t]*\n(.*?)\n?```", re.DOTALL)


def split_fences(text: str) -> list[tuple[bool, str]]:
    """`text` as (is fenced, part) pairs: what stands between code fences keeps its lines.

    >>> split_fences("run\\n```sh\\nls\\n```")
    [(False, 'run\\n'), (True, 'ls')]
    """
    parts = _FENCE.split(text)
    return [
        (bool(i % 2), visible(scrub(part)) if i % 2 else part)
        for i, part in enumerate(parts)
        if part.strip()
    ]


def is_command(code: str) -> bool:
    """Whether a code part is a command line to copy, and not just a name in a sentence."""
    return _COMMAND.match(code) is not None


def evidence_items(evidence: Mapping[str, Any], limit: int = 400) -> list[tuple[str, str]]:
    """Evidence as (name, value) lines: nested names are joined with dots, intervals put together,
    long values cut.
    """
    items: list[tuple[str, str]] = []
    for key, value in jsonable(evidence).items():
        name = one_line(key)
        if isinstance(value, dict) and value.keys() == {"value", "lo", "hi"}:
            number, lo, hi = (scalar_text(value[part]) for part in ("value", "lo", "hi"))
            items.append((name, f"{number} [{lo}, {hi}]"))
        elif isinstance(value, dict) and value:
            items += [(f"{name}.{inner}", text) for inner, text in evidence_items(value, limit)]
        else:
            items.append((name, shorten(scalar_text(value), limit)))
    return items


def scalar_text(value: Any) -> str:
    """One JSON value on one line, as a person would write it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return one_line(value)
    if not value:
        return "none"
    if isinstance(value, list) and not any(isinstance(v, list | dict) for v in value):
        return ", ".join(scalar_text(v) for v in value)
    return visible(json.dumps(value, ensure_ascii=False))


def size_text(count: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def subject_items(subject: Mapping[str, Any], limit: int = 200) -> list[tuple[str, str]]:
    """What a person would call the subject by: its values that are set, without the settings nested
    in it.
    """
    return evidence_items(
        {k: v for k, v in subject.items() if v is not None and not isinstance(v, Mapping)}, limit
    )


def safe_json(value: Any) -> str:
    """`value` as indented JSON that any file can hold: what `visible` would rewrite is a JSON
    escape instead.
    """
    text = json.dumps(jsonable(value), ensure_ascii=False, indent=2, allow_nan=False)
    return _UNSEEN.sub(
        lambda match: (
            match.group() if _shown(match.group()) == match.group() else _escape(match.group())
        ),
        text,
    )


def _escape(char: str) -> str:
    return json.dumps(char)[1:-1] if ord(char) != 0x7F else "\\u007f"


# How a verdict, a severity and a status word look and read, the same in every format.

Tone = Literal["good", "bad", "warn", "error", "info", ""]


@dataclass(frozen=True)
class Look:
    """A glyph, a word and a tone. The word says it all, so that no meaning rests on
    colour alone.
    """

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
    "bad": (
        "degenerate empty fail failed mismatch missing broken reject invalid dead corrupt error nan"
    ),
    "warn": (
        "truncated_reasoning truncated inconclusive skipped unverified degraded marginal warning"
        " partial insufficient extra interrupted unreachable"
    ),
}
_STATUS: dict[str, Tone] = {word: tone for tone, words in _WORDS.items() for word in words.split()}


def status_tone(status: str) -> Tone:
    """The tone of a status word (`ok`, `mismatch`, `REJECT`); neutral for a word that is
    not one.
    """
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
    """`text` with a capital at its beginning, unless it begins with a name (a file, a URL, an
    option).
    """
    first = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first.rstrip(",;").isalpha() and first.islower() else text


def plural(number: int, noun: str) -> str:
    """A count with its noun: `1 warning`, `3 warnings`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
