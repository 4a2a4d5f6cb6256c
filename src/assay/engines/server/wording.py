"""What a server's unexpected answer says, as one safe line."""

from __future__ import annotations

import html
import re
from typing import Any

from assay.bounded_json import loads

_LIMIT = 160


_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)


_HTML = re.compile(
    r"^\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL
)


def looks_like_html(text: str) -> bool:
    """Whether the text is a web page rather than an API answer."""
    return bool(_HTML.match(text))


def one_line(text: str, limit: int = _LIMIT) -> str:
    """`text` on one line, with control characters escaped, cut to `limit` characters."""
    flat = " ".join(text.split())
    safe = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in flat[: limit + 1])
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def error_message(value: Any) -> str:
    """The message in a JSON error object, in the shapes that servers use; empty if
    there is none.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for key in ("error", "message", "detail", "msg"):
            if value.get(key):
                return error_message(value[key])
    if isinstance(value, list):
        return "; ".join(filter(None, (error_message(item) for item in value[:3])))
    return ""


def describe_body(body: bytes, secrets: tuple[str, ...] = ()) -> str:
    """What an unexpected answer says: its error message, the title of a web page, or its first
    characters.
    """
    text = body.decode("utf-8", "replace")
    for secret in secrets:
        text = text.replace(secret, "***")
    if not text.strip():
        return "empty answer"
    if looks_like_html(text):
        title = _TITLE.search(text)
        name = one_line(html.unescape(title.group(1))) if title else ""
        return f"a web page titled {name!r}" if name else "a web page"
    try:
        message = error_message(loads(text))
    except ValueError:
        message = ""
    return one_line(message or text)
