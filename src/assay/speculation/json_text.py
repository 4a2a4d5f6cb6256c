"""JSON values in text, nonsense of any depth or length included."""

from __future__ import annotations

from typing import Any

from assay import bounded_json


def embedded_json(text: str) -> Any:
    """The JSON value that makes up a line (a server-sent event's `data:` included); None if there
    is none.
    """
    stripped = text.strip()
    if stripped.startswith("data:"):
        stripped = stripped[5:].strip()
    # Anything else cannot carry counts; parsing every brace in a log would be slow.
    if (
        not stripped.startswith("{")
        or "accept" not in stripped.lower()
        or not stripped.endswith("}")
    ):
        return None
    return parsed_json(stripped)


def parsed_json(text: str | bytes) -> Any:
    """The JSON value that `text` is; None for anything else, nonsense of any depth or length
    included.
    """
    try:
        return bounded_json.loads(text, numbers="null")
    except ValueError:
        return None
