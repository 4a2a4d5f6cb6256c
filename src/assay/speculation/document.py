"""The JSON document that a source is."""

from __future__ import annotations

from typing import Any

from assay import bounded_json
from assay.errors import AssayError
from assay.speculation.json_text import parsed_json
from assay.speculation.sources import Source

MAX_DOCUMENT = 32 << 20
"""Largest JSON document that is read whole, in bytes: brackets alone take twenty times as much."""
MAX_PAGE = 128 << 20
"""Largest metrics page that is read whole, in bytes."""


def json_document(source: Source, text: str) -> Any:
    """The JSON document that a source is; None if it is something else."""
    start = text.lstrip("\ufeff \t\r\n")
    if not start.startswith(("{", "[")) or start.startswith('{"log":'):
        return None
    first_line = start.splitlines()[0]
    if not source.complete and _json_row(first_line) is not None:
        return None  # a large log of JSON lines
    if start.startswith("[") and not _opens_json_array(start):
        return None  # a log whose lines start with a bracket
    if start.startswith("{") and not start.startswith(('{"', "{\n", "{\r", "{ ", "{}")):
        return None
    body = start
    if not source.complete:
        body = read_whole(source, MAX_DOCUMENT).decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    try:
        return bounded_json.loads(body, numbers="null")
    except bounded_json.BoundsError as error:
        raise _broken(source, str(error)) from None
    except ValueError as error:
        rows = [row for row in body.splitlines() if row.strip()]
        values = [v for row in rows if (v := _json_row(row)) is not None]
        # Server-sent events have lines without JSON; a log that begins with JSON has lines of every
        # kind.
        others = sum(not row.startswith(("data:", "event:", "id:", ":")) for row in rows) - len(
            values
        )
        if values:
            return values if others <= 0 else None
        raise _broken(source, f"the JSON ends early or is broken: {error}") from error


def _broken(source: Source, why: str) -> AssayError:
    return AssayError(
        f"{source.name}: {why}",
        finding_id="speculation.source_truncated",
        remedy="save the response again, whole",
    )


def read_whole(source: Source, most: int) -> bytes:
    """All bytes of a source; AssayError where there are more than `most`."""
    data = bytearray()
    while part := source.read(1 << 20):
        data += part
        if len(data) > most:
            raise AssayError(
                f"{source.name}: more than {most >> 20} MB of JSON or metrics",
                finding_id="speculation.source_too_large",
                remedy="give one page or one file of JSON lines",
            )
    return bytes(data)


def _json_row(text: str) -> Any:
    """The JSON value on a line, a server-sent event's `data:` included."""
    stripped = text.strip().removeprefix("data:").strip()
    return parsed_json(stripped) if stripped.startswith(("{", "[")) else None


def _opens_json_array(text: str) -> bool:
    """Whether '[' opens a JSON array of objects, not a `[2026-…]` or `[metrics.py]` prefix."""
    return text[1:64].lstrip()[:1] in ("{", "[", "]")
