"""What can go wrong with a server, each with its own finding id.

Exit code 2 (`AssayError`): nothing could be examined: unreachable, refused, not an OpenAI-compatible answer.
Exit code 3 (`InconclusiveError`): it answers, but not enough came back: timeout, cut stream, rate limit.
"""

from __future__ import annotations

import html
import json
import re
import socket
import ssl
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from time import time as wall_clock
from typing import Any, ClassVar

import httpx

from assay.engines.server.endpoint import without_credentials
from assay.errors import AssayError, InconclusiveError, UsageError


class ServerError(AssayError):
    """A request to a server failed. Subclasses fix the finding id and the remedy."""

    id: ClassVar[str] = "server.unreachable"
    default_remedy: ClassVar[str] = "check the URL, and that the server runs and is reachable from here"

    def __init__(self, message: str, *, remedy: str | None = None, evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(
            message, finding_id=self.id, remedy=self.default_remedy if remedy is None else remedy, evidence=evidence
        )


class Unreachable(ServerError):
    """No connection: refused, no such host, TLS failure, or closed without an answer."""


class Unauthorized(ServerError):
    """401 or 403."""

    id = "server.unauthorized"
    default_remedy = "put the key into an environment variable and name it with --api-key-env"


class NotFound(ServerError):
    """404: nothing at that path."""

    id = "server.not_found"
    default_remedy = "give the root of an OpenAI-compatible server, or its /v1"


class ModelUnknown(ServerError):
    """The server does not have the model that was named, or has none."""

    id = "server.model_unknown"
    default_remedy = "name one of the server's models with --model"

    def __init__(self, message: str, *, available: Sequence[str] = (), remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy, evidence={"available": list(available)})
        self.available = tuple(available)


class NotJson(ServerError):
    """The answer is not the JSON that was asked for."""

    id = "server.not_json"
    default_remedy = "give the root of an OpenAI-compatible server, or its /v1; a proxy or a web page may answer here"


class Failing(ServerError):
    """5xx, again and again."""

    id = "server.failing"
    default_remedy = "look into the server's log: it accepts the request and then fails"


class Redirected(ServerError):
    """A redirect to another origin, which is not followed."""

    id = "server.redirected"
    default_remedy = "give the URL it points to, if you trust it"


class TooLarge(ServerError):
    """The answer is larger than any sane one."""

    id = "server.too_large"
    default_remedy = "this is no answer of a language model; check what listens at this URL"


class InvalidStream(ServerError):
    """The stream is not made of server-sent events that hold JSON."""

    id = "server.invalid_stream"
    default_remedy = "check for a proxy that rewrites the stream, and look into the server's log"


class NotStreamed(InvalidStream):
    """The answer is whole and came in one piece, though a stream was asked for."""


class RequestRefused(ServerError):
    """The server understood the request and refuses it (400, 413, 422, ...)."""

    id = "server.request_refused"
    default_remedy = "the server's message says what it does not accept"

    def __init__(self, message: str, *, status: int, evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(message, evidence=evidence)
        self.status = status


class BadScores(ServerError):
    """Log-probabilities that cannot be those of the tokens that were sent."""

    id = "server.bad_scores"
    default_remedy = "do not trust scores of this server; score with another engine"


class ServerInconclusive(InconclusiveError):
    """The server answered too little to judge. Subclasses fix the finding id and the remedy."""

    id: ClassVar[str] = "server.timeout"
    default_remedy: ClassVar[str] = "raise --timeout, or look whether the server is overloaded"

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        evidence: Mapping[str, Any] | None = None,
        partial_text: str = "",
    ) -> None:
        super().__init__(
            message, finding_id=self.id, remedy=self.default_remedy if remedy is None else remedy, evidence=evidence
        )
        self.partial_text = partial_text
        """What had arrived of a streamed text before it ended."""


class TimedOut(ServerInconclusive):
    """Nothing came for too long, or the whole answer took too long."""


class RateLimited(ServerInconclusive):
    """429, also after waiting as long as the server asked for."""

    id = "server.rate_limited"
    default_remedy = "lower --concurrency, or try again when the limit has reset"


class StreamCut(ServerInconclusive):
    """The connection closed before the answer was complete."""

    id = "server.stream_cut"
    default_remedy = "look into the log of the server and of any proxy before it: the answer broke off"


class StreamFailed(ServerInconclusive):
    """The server reported an error inside a stream that it had begun."""

    id = "server.stream_error"
    default_remedy = "look into the server's log: it began to answer and then failed"


RETRIED = frozenset({429, 500, 502, 503, 504})


def error_for_status(status: int, url: str, said: str) -> AssayError:
    """The error for an answer with `status`; `said` is one line of what the server wrote."""
    where = without_credentials(url)
    message = f"{where} answered {status}: {said}"
    evidence = {"status": status, "url": where, "said": said}
    if status in (401, 403):
        return Unauthorized(message, evidence=evidence)
    # A path such as /v1/models in the message is not a word about the model.
    if status == 404 and re.search(r"\bmodel\b", said, re.IGNORECASE):
        return ModelUnknown(message)
    if status == 404:
        return NotFound(message, evidence=evidence)
    if status == 429:
        return RateLimited(message, evidence=evidence)
    if status >= 500 and status != 501:  # 501 is a plain no, not a failure
        return Failing(message, evidence=evidence)
    return RequestRefused(message, status=status, evidence=evidence)


def error_for_failure(exc: Exception, url: str, *, answered: bool, seconds: float) -> AssayError:
    """The error for a request that httpx could not carry out.

    `answered` says whether the answer had begun; `seconds` is how long it was waited for.
    """
    where = without_credentials(url)
    evidence = {"url": where, "seconds": round(seconds, 3)}
    if isinstance(exc, httpx.ConnectTimeout | httpx.PoolTimeout):
        return Unreachable(f"{where} did not accept a connection within {seconds:.1f} s", evidence=evidence)
    if isinstance(exc, httpx.TimeoutException):
        return TimedOut(f"{where} sent nothing more after {seconds:.1f} s", evidence=evidence)
    if isinstance(exc, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return UsageError(f"the URL {where} is not valid", remedy="write it as http://host:port")
    if isinstance(exc, httpx.ProxyError):
        return Unreachable(f"the proxy for {where} refuses: {exc}", evidence=evidence)
    if isinstance(exc, httpx.ConnectError):
        return Unreachable(f"{where}: {_connect_reason(exc)}", evidence=evidence)
    if answered:
        return StreamCut(f"{where} closed the connection in the middle of its answer", evidence=evidence)
    return StreamCut(f"{where} closed the connection without an answer", evidence=evidence)


def _connect_reason(exc: BaseException) -> str:
    """Why a connection failed, out of the chain of causes."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its TLS certificate is not trusted ({cause.verify_message})"
        if isinstance(cause, ssl.SSLError):
            return f"TLS failed ({cause.reason or 'no TLS spoken there'})"
        if isinstance(cause, socket.gaierror):
            return "no such host"
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused, nothing listens there"
        cause = cause.__cause__ or cause.__context__
    text = str(exc).lower()
    # httpx keeps only the text of errors it has mapped twice.
    if "refused" in text:
        return "connection refused, nothing listens there"
    if "name or service not known" in text or "getaddrinfo" in text or "nodename" in text:
        return "no such host"
    return f"no connection ({exc})"


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header asks to wait (a number, or an HTTP date); None if it says nothing."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - wall_clock())
    except (TypeError, ValueError, OverflowError):
        return None


_LIMIT = 160
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_HTML = re.compile(r"^\s*(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html|head|body)\b", re.IGNORECASE | re.DOTALL)


def looks_like_html(text: str) -> bool:
    """Whether the text is a web page rather than an API answer."""
    return bool(_HTML.match(text))


def one_line(text: str, limit: int = _LIMIT) -> str:
    """`text` on one line, with control characters escaped, cut to `limit` characters."""
    flat = " ".join(text.split())
    safe = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in flat[: limit + 1])
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def error_message(value: Any) -> str:
    """The message in a JSON error object, in the shapes that servers use; empty if there is none."""
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
    """What an unexpected answer says: its error message, the title of a web page, or its first characters."""
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
        message = error_message(json.loads(text))
    except (ValueError, RecursionError):
        message = ""
    return one_line(message or text)
