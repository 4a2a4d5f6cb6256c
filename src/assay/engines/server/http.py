"""HTTP to one server with limits: time, bytes, redirects, retries.

Every answer has a deadline and a byte cap. Redirects are followed only within the origin, so that a
key never travels elsewhere; temporary refusals are retried; each failure becomes one of the errors
of `errors`.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urljoin

import httpx

from assay.bounded_json import loads
from assay.engines.server.deadline import keep_deadlines, timeouts
from assay.engines.server.endpoint import Endpoint, origin, without_credentials
from assay.engines.server.errors import (
    InvalidStream,
    NotJson,
    Redirected,
    StreamCut,
    TimedOut,
    TooLarge,
)
from assay.engines.server.failures import RETRIED, error_for_failure, error_for_status, retry_after
from assay.engines.server.wording import describe_body, looks_like_html, one_line
from assay.environment import VERSION
from assay.secrets import register_secret

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
        """The pieces of the answer to a POST of JSON; retried only as long as no answer
        has begun.
        """
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
