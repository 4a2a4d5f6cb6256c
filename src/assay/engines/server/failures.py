"""Which error a status or a broken connection is."""

from __future__ import annotations

import math
import re
import socket
import ssl
from email.utils import parsedate_to_datetime
from time import time as wall_clock

import httpx

from assay.engines.server.endpoint import without_credentials
from assay.engines.server.errors import (
    Failing,
    ModelUnknown,
    NotFound,
    RateLimited,
    RequestRefused,
    StreamCut,
    TimedOut,
    Unauthorized,
    Unreachable,
)
from assay.errors import AssayError, UsageError

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
