"""Bounds on time and tries around huggingface_hub's own retries, which wait as long as a server asks them to."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from assay.checkpoint.hub import limits
from assay.checkpoint.hub.errors import late, unreadable

_RESET = re.compile(r"\bt=(\d+)")


@contextmanager
def bounded(repo: str) -> Iterator[None]:
    """Within this block every request through huggingface_hub's session is bounded, and its warnings are kept quiet."""
    from huggingface_hub.utils import get_session

    session = get_session()
    logger = logging.getLogger("huggingface_hub")
    level, kept = logger.level, {name: list(hooks) for name, hooks in session.event_hooks.items()}
    before, after = _hooks(repo, time.monotonic() + limits.BUDGET_S)
    session.event_hooks = {
        "request": [*kept.get("request", []), before], "response": [*kept.get("response", []), after]
    }  # fmt: skip
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
        if left <= 0 or tries[where] > limits.TRIES:
            raise late(repo, "the Hub answers too slowly")
        given = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = {
            key: min(given.get(key) or limits.REQUEST_S, left) for key in ("connect", "read", "write", "pool")
        }

    def after(response: Any) -> None:
        status = response.status_code
        if status != 429 and status < 500:
            return
        where = str(response.url)
        failures[where] += 1
        wait = asked_wait(response.headers)
        if failures[where] < limits.TRIES and wait <= min(limits.PATIENCE_S, deadline - time.monotonic()):
            return
        if status == 429:
            raise late(repo, "the Hub limits the rate of requests (429)")
        raise unreadable(repo, f"the Hub answers with status {status}")

    return before, after


def asked_wait(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait (`Retry-After`, or `t=` of `RateLimit`); a date counts as long."""
    after = headers.get("retry-after", "").strip()
    if after:
        return float(after) if re.fullmatch(r"\d+(\.\d+)?", after) else float("inf")
    reset = _RESET.search(headers.get("ratelimit", ""))
    return float(reset[1]) if reset else 0.0
