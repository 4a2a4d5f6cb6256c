"""Free a log line of what terminals, containers and supervisors put around it."""

from __future__ import annotations

import re
from itertools import pairwise

from assay.speculation.json_text import parsed_json
from assay.speculation.parsers.base import Line
from assay.speculation.parsers.registry import record_heads

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")

_PROCESS = re.compile(r"\(([A-Za-z]\w*?)(?:_(DP\d+))?(?:_TP\d+)? pid=(\d+)\)")

_COMPOSE = re.compile(r"^([\w.-]+)\s*\|\s")

_PORT = re.compile(
    r"(?:^|\| )\[(\d{3,5})\] (?=\s|\d+\.\d\d\.|slot|srv|draft|prompt|statistics|eval|total)"
)

_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?)|\b(?:INFO|WARNING|ERROR|DEBUG) (\d\d-\d\d"
    r" \d\d:\d\d:\d\d)|\b(\d{1,2}\.\d\d\.\d{3}\.\d{3}) [A-Z] "
)

# The usual prefix of vLLM, of which a log may hold tens of thousands.
_USUAL = re.compile(
    r"(?:\(([A-Za-z][A-Za-z]*) pid=(\d+)\) )?(?:INFO|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d)"
    r" \[[\w.]+:\d+\] (?!\()"
)

_PREFIX = 160
"""Characters in which a prefix is looked for."""


def clean(raw: bytes) -> Line:
    """The line without colours and wrappers, with the process, engine and time that its prefix
    names.
    """
    text = raw.decode("utf-8", "replace")
    usual = _USUAL.match(text)
    if usual and "\x1b" not in text:
        return Line(text, f"/{usual[1]}:{usual[2]}" if usual[1] else "", None, usual[3])
    if text.startswith('{"log":'):
        text = _docker_json(text)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.replace("\0", "").rstrip("\r\n")
    start = text[:_PREFIX]
    compose = _COMPOSE.match(start) if "|" in start else None
    container = compose[1] if compose else ""
    processes = _PROCESS.findall(start) if "pid=" in start else []
    replica = next((dp for _, dp, _ in reversed(processes) if dp), None)
    port = _PORT.search(start) if "[" in start else None
    time = _TIME.search(start)
    return Line(
        text=text,
        process="/".join(
            [
                container,
                *(f"{name}{dp}:{pid}" for name, dp, pid in processes[:1]),
                *([port[1]] if port else []),
            ]
        ),
        replica=f"{container}/{replica}" if container and replica else replica or container or None,
        time=next((t for t in time.groups() if t), None) if time else None,
        port=port[1] if port else None,
    )


def _docker_json(text: str) -> str:
    """The message in a line of Docker's json-file driver."""
    entry = parsed_json(text)
    return (
        entry["log"].rstrip("\n")
        if isinstance(entry, dict) and isinstance(entry.get("log"), str)
        else text
    )


_BETWEEN = re.compile(
    r"\r|['\"], ['\"]|(?=\((?:APIServer|EngineCore)\w* pid=\d+\) )|(?=\b(?:INFO|WARNING)"
    r" \d\d-\d\d )"
)


def records(text: str) -> list[str]:
    """The log lines in a line: one as a rule, several where a log was escaped, or its lines were
    printed as a list.
    """
    head = next((head for head in record_heads() if text.count(head) > 1), None)
    if head is None:
        return [text]
    if "\\n" in text:
        return re.split(r"(?:\\r)?\\n", text)
    cuts = [0]
    heads = [m.start() for m in re.finditer(re.escape(head), text)]
    for before, after in pairwise(heads):
        between = list(_BETWEEN.finditer(text, before, after))
        cut = next((m.end() for m in between if m[0]), None)
        cuts.append(cut or (between[0].start() if between else after))
    pieces = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    return [re.sub(r"['\"](?:, ['\"]|\])?\s*$", "", piece) for piece in pieces]
