"""Requests to the Hub within bounds on time and tries.

huggingface_hub's own retries wait as long as a server asks them to, and its releases differ in what
they retry.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from assay.errors import AssayError, InconclusiveError

REQUEST_S = 10.0
"""Seconds that one request may wait for the next bytes."""

BUDGET_S = 60.0
"""Seconds that all requests of one question may take together."""

PATIENCE_S = 10.0
"""A server that asks to wait longer than this is taken at its word: not now."""

TRIES = 3
"""How often one thing is asked for."""

PAUSE_S = 0.5
"""Seconds before the second try; doubled for the third."""


def http_errors() -> tuple[type[Exception], ...]:
    """What a request through huggingface_hub may raise; its HTTP library differs between
    versions.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session

    library = __import__(type(get_session()).__module__.partition(".")[0])
    return (
        library.HTTPError,
        library.InvalidURL,
        library.StreamError,
        OfflineModeIsEnabled,
        OSError,
    )


def status_of(error: BaseException) -> int | None:
    """Status of the answer that an exception is about, if there was one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def translated(error: BaseException, repo: str, revision: str) -> AssayError:
    """The error that the user sees. Slow or limited is inconclusive, everything else could not be
    examined.
    """
    status, name = status_of(error), type(error).__name__
    if isinstance(error, AssayError):
        return error
    if "Timeout" in name:
        return late(repo, f"the Hub did not answer within {REQUEST_S:g} s")
    if status == 429:
        return late(repo, "the Hub limits the rate of requests (429)")
    if name == "RevisionNotFoundError":
        return unreadable(repo, f"it has no revision {revision}")
    if status in {401, 403}:
        reason = f"the Hub denies access ({status}): private, gated, or no such repository"
        return unreadable(repo, reason, "log in with `hf auth login`")
    if status == 404:
        return unreadable(
            repo, "the Hub knows no such repository or file (404)", "check the id and your access"
        )
    if status is not None:
        return unreadable(repo, f"the Hub answers with status {status}")
    if name == "OfflineModeIsEnabled":
        return unreadable(repo, "HF_HUB_OFFLINE is set", "use --manifest instead, or unset it")
    return unreadable(
        repo, f"the Hub cannot be reached ({name})", "use --manifest to verify without a network"
    )


def unreadable(repo: str, reason: str, remedy: str = "") -> AssayError:
    """The repository could not be examined (exit code 2)."""
    return AssayError(
        f"cannot read {repo}: {reason}", finding_id="checkpoint.not_examined", remedy=remedy
    )


def late(repo: str, reason: str) -> InconclusiveError:
    """The Hub is there, but not now (exit code 3)."""
    return InconclusiveError(
        f"cannot read {repo}: {reason}",
        finding_id="checkpoint.not_examined",
        remedy="try again later",
    )


_RESET = re.compile(r"\bt=(\d+)")


@contextmanager
def bounded(repo: str) -> Iterator[None]:
    """Within this block every request through huggingface_hub's session is bounded, and its
    warnings are kept quiet.
    """
    from huggingface_hub.utils import get_session

    session = get_session()
    logger = logging.getLogger("huggingface_hub")
    level, kept = logger.level, {name: list(hooks) for name, hooks in session.event_hooks.items()}
    before, after = _hooks(repo, time.monotonic() + BUDGET_S)
    session.event_hooks = {
        "request": [*kept.get("request", []), before],
        "response": [*kept.get("response", []), after],
    }
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        session.event_hooks = kept


def _hooks(repo: str, deadline: float) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    tries: Counter[str] = Counter()
    failures: Counter[str] = Counter()

    def before(request: Any) -> None:
        where = f"{request.method} {request.url} {request.headers.get('range', '')}"
        tries[where] += 1
        left = deadline - time.monotonic()
        if left <= 0 or tries[where] > TRIES:
            raise late(repo, "the Hub answers too slowly")
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            key: min(given.get(key) or REQUEST_S, left)
            for key in ("connect", "read", "write", "pool")
        }

    def after(response: Any) -> None:
        status = response.status_code
        if status != 429 and status < 500:
            return
        where = str(response.url)
        failures[where] += 1
        wait = asked_wait(response.headers)
        if failures[where] < TRIES and wait <= min(PATIENCE_S, deadline - time.monotonic()):
            return
        if status == 429:
            raise late(repo, "the Hub limits the rate of requests (429)")
        raise unreadable(repo, f"the Hub answers with status {status}")

    return before, after


def asked_wait(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait (`Retry-After`, or `t=` of `RateLimit`); a date counts as
    long.
    """
    after = headers.get("retry-after", "").strip()
    if after:
        return float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else float("inf")
    reset = _RESET.search(headers.get("ratelimit", ""))
    return float(reset[1]) if reset else 0.0


T = TypeVar("T")

_TRANSIENT = {429, 500, 502, 503, 504}

_FINAL = ("Timeout", "Connect", "Offline", "InvalidURL")
"""Parts of the names of exceptions after which a second try would only take longer."""


def retried(question: Callable[[], T]) -> T:
    """The answer to `question`, asked up to `TRIES` times. Raises its last error."""
    for attempt in range(TRIES - 1):
        try:
            return question()
        except http_errors() as error:
            if not _transient(error):
                raise
        time.sleep(PAUSE_S * 2**attempt)
    return question()


def _transient(error: Exception) -> bool:
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT
    return not any(part in type(error).__name__ for part in _FINAL)
