"""Start-up messages that bear on speculation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from assay.speculation.parsers.base import StartUp
from assay.speculation.parsers.registry import all_parsers


@dataclass(frozen=True)
class Clue:
    """One kind of message, how often it came, and the first of them."""

    id: str
    text: str
    count: int = 1


LONGEST = 8192
"""Characters of a line that are looked at; configurations are printed on lines of a few thousand.
"""


def start_up(text: str) -> tuple[list[Clue], list[float]]:
    """Clues in the start of a log, and the speeds of intervals in which requests ran."""
    first: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for line in _candidates(text):
        for name, messages in _by_kind().items():
            quote = next((q for m in messages if (q := _quote(m, line)) is not None), None)
            if quote is not None:
                seen[name] += 1
                if name == "depth" and quote not in first.get(name, quote).split(", "):
                    quote = f"{first.pop(name)}, {quote}"  # two runs, or two roles
                first.setdefault(name, quote)
    answered = [m for p in all_parsers() if p.replies and (m := p.replies.search(text))]
    if answered:
        first["replies"] = " ".join(min(answered, key=lambda m: m.start())[0].split())[:300]
    speeds = [
        float(speed)
        for parser in all_parsers()
        if parser.speed
        for speed, running in parser.speed.findall(text)
        if _positive(speed) and int(running[:9])
    ]
    return [Clue(name, quote, max(1, seen[name])) for name, quote in first.items()], speeds


@cache
def _by_kind() -> dict[str, list[StartUp]]:
    """The start-up messages that all parsers declare, by what they tell."""
    found: dict[str, list[StartUp]] = {}
    for parser in all_parsers():
        for message in parser.start_up:
            found.setdefault(message.id, []).append(message)
    return found


def _quote(message: StartUp, line: str) -> str | None:
    """What a message says in a line; None if the line is another."""
    match = message.pattern.search(line)
    if match is None:
        return None
    shown = match[match.lastindex or 0] if message.pattern.groups else line
    return " ".join(shown.split())[:300]


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < 1e9
    except ValueError:
        return False


def _candidates(text: str) -> list[str]:
    """Lines that hold a needle, in order and each once; found with `find`, since the start of a log
    is megabytes.
    """
    lowered = text.lower()
    if len(lowered) != len(text):  # a letter whose lower case is longer would shift the offsets
        lowered = text
    spans: set[tuple[int, int]] = set()
    for needle in {n for kind in _by_kind().values() for m in kind for n in m.needles}:
        at = lowered.find(needle)
        while at >= 0:
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            spans.add((text.rfind("\n", 0, at) + 1, end))
            at = lowered.find(needle, end)
    return [text[start : min(end, start + LONGEST)] for start, end in sorted(spans)]
