"""HTTP to a server, with limits: where it is, what can go wrong with it, and one pooled client.

Every answer has a deadline and a byte cap. Redirects are followed only within the origin, so that a
key never travels elsewhere; temporary refusals are retried; whatever fails becomes one of the
errors here, each with its own finding id.
"""

from __future__ import annotations

import html
import math
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from time import time as wall_clock
from typing import Any, ClassVar
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

import httpx

from assay.bounded_json import loads
from assay.engines.server.deadline import keep_deadlines, timeouts
from assay.environment import VERSION
from assay.errors import AssayError, InconclusiveError, UsageError
from assay.secrets import register_secret

# Where a server is: its root and its /v1, out of whatever URL the user gave.


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


# What can go wrong with a server, each with its own finding id.
#
# Exit code 2 (`AssayError`): nothing could be examined: unreachable, refused, not an
# OpenAI-compatible answer. Exit code 3 (`InconclusiveError`): it answers, but not enough came back:
# timeout, cut stream, rate limit.


class ServerError(AssayError):
    """A request to a server failed. Subclasses fix the finding id and the remedy."""

    id: ClassVar[str] = "server.unreachable"
    default_remedy: ClassVar[str] = (
        "check the URL, and that the server runs and is reachable from here"
    )

    def __init__(
        self, message: str, *, remedy: str | None = None, evidence: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(
            message,
            finding_id=self.id,
            remedy=self.default_remedy if remedy is None else remedy,
            evidence=evidence,
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

    def __init__(
        self, message: str, *, available: Sequence[str] = (), remedy: str | None = None
    ) -> None:
        super().__init__(message, remedy=remedy, evidence={"available": list(available)})
        self.available = tuple(available)


class NotJson(ServerError):
    """The answer is not the JSON that was asked for."""

    id = "server.not_json"
    default_remedy = (
        "give the root of an OpenAI-compatible server, or its /v1; a proxy or a web page may answer"
        " here"
    )


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

    def __init__(
        self, message: str, *, status: int, evidence: Mapping[str, Any] | None = None
    ) -> None:
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
            message,
            finding_id=self.id,
            remedy=self.default_remedy if remedy is None else remedy,
            evidence=evidence,
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
    default_remedy = (
        "look into the log of the server and of any proxy before it: the answer broke off"
    )


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


def error_for_failure(
    exc: Exception, url: str, *, answered: bool, seconds: float, total_s: float = math.inf
) -> AssayError:
    """The error for a request that httpx could not carry out.

    Args:
        exc: What httpx raised.
        url: Where the request went.
        answered: Whether the answer had begun.
        seconds: How long the attempt had taken.
        total_s: How long it was allowed to take in all.
    """
    where = without_credentials(url)
    evidence = {"url": where, "seconds": round(seconds, 3)}
    if isinstance(exc, httpx.TimeoutException) and seconds >= total_s:
        return TimedOut(
            f"{where} had not finished its answer after {total_s:g} s", evidence=evidence
        )
    if isinstance(exc, httpx.ConnectTimeout | httpx.PoolTimeout):
        return Unreachable(
            f"{where} did not accept a connection within {seconds:.1f} s", evidence=evidence
        )
    if isinstance(exc, httpx.TimeoutException):
        return TimedOut(f"{where} sent nothing more after {seconds:.1f} s", evidence=evidence)
    if isinstance(exc, httpx.InvalidURL | httpx.UnsupportedProtocol):
        return UsageError(f"the URL {where} is not valid", remedy="write it as http://host:port")
    if isinstance(exc, httpx.ProxyError):
        return Unreachable(f"the proxy for {where} refuses: {exc}", evidence=evidence)
    if isinstance(exc, httpx.ConnectError):
        return Unreachable(f"{where}: {_connect_reason(exc)}", evidence=evidence)
    if answered:
        return StreamCut(
            f"{where} closed the connection in the middle of its answer", evidence=evidence
        )
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
    """Seconds that a Retry-After header asks to wait (a number, or an HTTP date); None if it says
    nothing.
    """
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


# The client.


_ENCODINGS = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})
"""What an answer may be packed in although no packing was asked for. Each piece of the network (64
KiB) unpacks to a bounded size in these, at most a thousand times its own, so that a few bytes
cannot become gigabytes in memory."""
_ERROR_BODY = 1 << 16
_MAX_REDIRECTS = 3
_RESENDS = 2


@dataclass(frozen=True)
class Limits:
    """How long and how much.

    `total_s` bounds one attempt by the clock, from the first byte sent to the last received,
    however the bytes between them arrive. A generated answer in one piece is silent until it is
    complete, so for it `total_s` bounds the silence too.
    """

    connect_s: float = 10.0
    silence_s: float = 120.0
    total_s: float = 300.0
    max_bytes: int = 32 * 1024 * 1024
    retries: int = 3
    first_backoff_s: float = 0.25
    longest_wait_s: float = 30.0


class Pieces:
    """The body of an answer as it arrives: (monotonic time of arrival, bytes without packing)."""

    def __init__(self, response: httpx.Response, url: str, started: float, limits: Limits) -> None:
        self.url = url
        self.started = started
        """When this attempt was sent, without the waits before it."""
        self._response = response
        self._limits = limits

    def __iter__(self) -> Iterator[tuple[float, bytes]]:
        where, limit = without_credentials(self.url), self._limits.max_bytes
        declared = self._response.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise TooLarge(
                f"{where} announces an answer of {int(declared):,} bytes; the limit is {limit:,}"
            )
        received = 0
        try:
            for piece in _unpacked(self._response, where):
                now = time.monotonic()
                if now > self.started + self._limits.total_s:
                    raise TimedOut(
                        f"{where} had not finished its answer after {self._limits.total_s:g} s",
                        evidence={"url": where, "seconds": self._limits.total_s, "bytes": received},
                    )
                received += len(piece)
                if received > limit:
                    raise TooLarge(
                        f"{where} answered more than {limit:,} bytes; the rest was not read"
                    )
                yield now, piece
        except httpx.HTTPError as exc:
            waited = time.monotonic() - self.started
            raise error_for_failure(
                exc, self.url, answered=True, seconds=waited, total_s=self._limits.total_s
            ) from exc


def _unpacked(response: httpx.Response, where: str) -> Iterator[bytes]:
    encoding = response.headers.get("content-encoding", "")
    if encoding.strip().lower() not in _ENCODINGS:
        raise InvalidStream(
            f"{where} answers in the encoding {encoding!r}, which was not asked for"
        )
    try:
        yield from response.iter_bytes()
    except httpx.DecodingError as exc:
        raise InvalidStream(f"{where} sent a damaged compressed answer") from exc


@cache
def _trust() -> ssl.SSLContext:
    """The trusted certificates, read once: that takes longer than a request."""
    return httpx.create_ssl_context()


_LOCATION = "x-assay-location"


def _keep_location(response: httpx.Response) -> None:
    """Rename the header of a redirect: httpx reads the address in it even if it is not to follow
    it, and fails in its own way at a wrong one.
    """
    if "location" in response.headers:
        response.headers[_LOCATION] = response.headers.pop("location")


class Transport:
    """Requests to one server, from any number of threads."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        key: str | None = None,
        limits: Limits | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.limits = limits or Limits()
        self.endpoint = endpoint
        self._sleep = sleep
        self._origin = origin(endpoint.api)
        user, password = endpoint.credentials or ("", "")
        register_secret(key)
        register_secret(password, user)
        self._secrets = tuple(s for s in (key, password) if s)
        headers = {"User-Agent": f"assay/{VERSION}", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        auth = httpx.BasicAuth(*endpoint.credentials) if endpoint.credentials and not key else None
        direct: dict[str, httpx.BaseTransport | None] = {
            f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")
        }
        client = httpx.Client(
            headers=headers,
            auth=auth,
            follow_redirects=False,
            event_hooks={"response": [_keep_location]},
            mounts=direct,
            verify=_trust(),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=3.0
            ),
        )
        self._client = keep_deadlines(client)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, url: str, *, retry: bool = True) -> bytes:
        """The body of the answer to a GET."""
        return self._whole("GET", url, None, retry)[1]

    def get_json(self, url: str, *, retry: bool = True) -> Any:
        """The JSON answer to a GET."""
        return self._json(*self._whole("GET", url, None, retry))

    def post_json(self, url: str, body: Mapping[str, Any]) -> Any:
        """The JSON answer to a POST of JSON."""
        return self._json(*self._whole("POST", url, body, True))

    @contextmanager
    def stream(self, url: str, body: Mapping[str, Any]) -> Iterator[Pieces]:
        """The pieces of the answer to a POST of JSON; retried only as long as no answer has begun."""
        with self._open("POST", url, body, True, self.limits.silence_s) as pieces:
            yield pieces

    def said(self, body: bytes) -> str:
        """One safe line of a body, without secrets."""
        return describe_body(body, self._secrets)

    def _json(self, url: str, body: bytes) -> Any:
        try:
            return loads(body, numbers="null")
        except ValueError:
            pass
        text = body[:4096].decode("utf-8", "replace")
        kind = "a web page" if looks_like_html(text) else "something that is not JSON"
        raise NotJson(
            f"{without_credentials(url)} answered {kind}: {self.said(body[:_ERROR_BODY])}"
        )

    def _whole(
        self, method: str, url: str, body: Mapping[str, Any] | None, retry: bool
    ) -> tuple[str, bytes]:
        """The URL that answered in the end, and all that it answered."""
        silence = self.limits.total_s if method == "POST" else self.limits.silence_s
        with self._open(method, url, body, retry, silence) as pieces:
            return pieces.url, b"".join(piece for _, piece in pieces)

    @contextmanager
    def _open(
        self, method: str, url: str, body: Mapping[str, Any] | None, retry: bool, silence_s: float
    ) -> Iterator[Pieces]:
        """An answer with status 200, after redirects within the origin and retries."""
        attempts = 1 + (self.limits.retries if retry else 0)
        redirects = 0
        attempt = 0
        while True:
            started, response = self._send(method, url, body, silence_s)
            with closing(response):
                if response.status_code == 200:
                    yield Pieces(response, url, started, self.limits)
                    return
                if response.is_redirect:
                    url = self._redirect(method, url, response)
                    redirects += 1
                    if redirects > _MAX_REDIRECTS:
                        raise Redirected(f"{without_credentials(url)} redirects in circles")
                    continue
                said = self.said(self._error_body(response))
                wait = self._refused(url, response, said, attempt, last=attempt + 1 >= attempts)
            attempt += 1
            self._sleep(wait)

    def _send(
        self, method: str, url: str, body: Mapping[str, Any] | None, silence_s: float
    ) -> tuple[float, httpx.Response]:
        """Send, and return when that was and the response once its headers are here.

        A server may close a kept connection in the moment in which it is used again, so a
        connection that closes without an answer is no failure until it has happened on fresh ones
        too.
        """
        resent = 0
        total = self.limits.total_s
        while True:
            started = time.monotonic()
            waits = timeouts(silence_s, self.limits.connect_s, started + total)
            try:
                request = self._client.build_request(
                    method, url, json=body, extensions={"timeout": waits}
                )
                return started, self._client.send(request, stream=True)
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                waited = time.monotonic() - started
                error = error_for_failure(exc, url, answered=False, seconds=waited, total_s=total)
                if not isinstance(error, StreamCut) or resent == _RESENDS:
                    raise error from exc
                resent += 1

    def _refused(
        self, url: str, response: httpx.Response, said: str, attempt: int, last: bool
    ) -> float:
        """Seconds to wait before the next attempt; raises where there is none."""
        status = response.status_code
        asked = retry_after(response.headers.get("retry-after"))
        if asked is not None and asked > self.limits.longest_wait_s:
            error = error_for_status(
                status, url, f"{said}; it asks to wait {asked:,.0f} s, which is too long"
            )
            error.evidence["retry_after_s"] = asked
            raise error
        if last or status not in RETRIED:
            raise error_for_status(status, url, said)
        return self.limits.first_backoff_s * 2.0**attempt if asked is None else asked

    def _error_body(self, response: httpx.Response) -> bytes:
        """The first bytes of an error's body; what fails while reading them matters less than the
        status.
        """
        body = b""
        with suppress(httpx.HTTPError, InvalidStream):
            for piece in _unpacked(response, ""):
                body += piece
                if len(body) >= _ERROR_BODY:
                    break
        return body[:_ERROR_BODY]

    def _redirect(self, method: str, url: str, response: httpx.Response) -> str:
        """The URL to go on with; raises for another origin, or where following would change the
        method.
        """
        location: str = response.headers.get(_LOCATION, "")
        where = without_credentials(url)
        try:
            target = urljoin(url, location)
            same = origin(target) == self._origin
        except ValueError:
            said = one_line(location)
            raise Redirected(
                f"{where} redirects ({response.status_code}) to {said!r}, which is no address",
                evidence={"status": response.status_code, "url": where, "location": said},
            ) from None
        there = without_credentials(target)
        keeps_method = method == "GET" or response.status_code in (307, 308)
        if not same or not keeps_method:
            raise Redirected(
                f"{where} redirects ({response.status_code}) to {there}, which was not followed",
                evidence={"status": response.status_code, "url": where, "location": there},
            )
        return target
