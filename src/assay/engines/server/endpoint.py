"""Where a server is: its root and its /v1, from any URL that the user gave."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit, urlunsplit

from assay.errors import UsageError

_ROUTE = re.compile(r"/(?:chat/completions|completions|models)$")


_VERSION = re.compile(r"/v\d+$")


@dataclass(frozen=True)
class Endpoint:
    """The addresses of one server. Neither holds credentials, so both can be printed."""

    root: str
    """Where `/metrics`, `/version`, `/tokenize` live; no trailing slash."""
    api: str
    """Where `/models`, `/chat/completions` live; no trailing slash."""
    credentials: tuple[str, str] | None = field(default=None, repr=False)
    """User and password that stood in the URL, for HTTP basic authentication."""


def parse_url(url: str) -> Endpoint:
    """The endpoint that `url` names: a server root or its /v1, with or without scheme, path prefix
    or slash.
    """
    text = url.strip()
    if "://" not in text:
        text = "http://" + text
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise UsageError(
            f"the URL is not valid: {exc}", remedy="write it as http://host:port"
        ) from None
    if parts.scheme not in ("http", "https"):
        raise UsageError(
            f"the URL scheme {parts.scheme!r} is not http or https",
            remedy="write it as http://host:port",
        )
    if not host or re.search(r"[\s\x00-\x1f\x7f]", text):
        raise UsageError("the URL names no host", remedy="write it as http://host:port")
    if parts.query or parts.fragment:
        raise UsageError(
            "the URL has a query or a fragment, which an API root cannot have",
            remedy=(
                "give the part before ? and #; a key belongs into an environment variable"
                " (--api-key-env)"
            ),
        )
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    path = _ROUTE.sub("", parts.path.rstrip("/")).rstrip("/")
    root_path = _VERSION.sub("", path)
    api_path = path if path != root_path else path + "/v1"
    credentials = None
    if parts.username is not None:
        credentials = (unquote(parts.username), unquote(parts.password or ""))
    return Endpoint(
        root=urlunsplit((parts.scheme, netloc, root_path, "", "")),
        api=urlunsplit((parts.scheme, netloc, api_path, "", "")),
        credentials=credentials,
    )


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what a key may be sent to."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, (parts.hostname or "").lower(), port


def without_credentials(url: str) -> str:
    """`url` fit to be printed: no user, password, query or fragment."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "an invalid URL"
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port is not None else "")
    return urlunsplit((parts.scheme, netloc, parts.path, "", ""))
