"""One log line, freed of what terminals, containers and supervisors put around it."""

from __future__ import annotations

import json
import re
from typing import Any

from assay.speculation.parsers.base import Line

_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
_PROCESS = re.compile(r"\(([A-Za-z]\w*?)(?:_(DP\d+))?(?:_TP\d+)? pid=(\d+)\)")
_COMPOSE = re.compile(r"^([\w.-]+)\s*\|\s")
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?)|\b(?:INFO|WARNING|ERROR|DEBUG) (\d\d-\d\d \d\d:\d\d:\d\d)|\b(\d{1,2}\.\d\d\.\d{3}\.\d{3}) [A-Z] "
)

# The usual prefix of vLLM, of which a log may hold tens of thousands.
_USUAL = re.compile(
    r"(?:\(([A-Za-z][A-Za-z]*) pid=(\d+)\) )?(?:INFO|WARNING) (\d\d-\d\d \d\d:\d\d:\d\d) \[[\w.]+:\d+\] (?!\()"
)
_PREFIX = 160
"""Characters in which a prefix is looked for."""


def clean(raw: bytes) -> Line:
    """The line without colours and wrappers, with the process, engine and time that its prefix names."""
    text = raw.decode("utf-8", "replace")
    usual = _USUAL.match(text)
    if usual and "\x1b" not in text:
        return Line(text, f"/{usual[1]}:{usual[2]}" if usual[1] else "", None, usual[3])
    container = ""
    if text.startswith('{"log":'):
        text, container = _docker_json(text)
    if "\x1b" in text:
        text = _ANSI.sub("", text)
    text = text.rstrip("\r\n")
    start = text[:_PREFIX]
    if "|" in start and (compose := _COMPOSE.match(start)):
        container = compose[1]
    processes = _PROCESS.findall(start) if "pid=" in start else []
    replica = next((dp for _, dp, _ in reversed(processes) if dp), None)
    process = "/".join([container, *(f"{name}{dp}:{pid}" for name, dp, pid in processes[:1])])
    time = _TIME.search(start)
    return Line(
        text=text,
        process=process,
        replica=f"{container}/{replica}" if container and replica else replica or container or None,
        time=next((t for t in time.groups() if t), None) if time else None,
    )


def embedded_json(text: str) -> Any:
    """The JSON value that makes up a line (a server-sent event's `data:` included); None if there is none."""
    stripped = text.strip()
    if stripped.startswith("data:"):
        stripped = stripped[5:].strip()
    # Anything else cannot carry counts; parsing every brace in a log would be slow.
    if not stripped.startswith("{") or "accept" not in stripped.lower() or not stripped.endswith("}"):
        return None
    try:
        return json.loads(stripped)
    except ValueError:
        return None


def _docker_json(text: str) -> tuple[str, str]:
    """The message and the container of a line of Docker's json-file driver."""
    try:
        entry = json.loads(text)
    except ValueError:
        return text, ""
    if not isinstance(entry, dict) or not isinstance(entry.get("log"), str):
        return text, ""
    return entry["log"].rstrip("\n"), ""
