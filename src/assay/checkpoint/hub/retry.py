"""Ask again after a hiccup. Releases of huggingface_hub differ in what they retry by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from assay.checkpoint.hub import limits
from assay.checkpoint.hub.errors import http_errors, status_of

T = TypeVar("T")

_TRANSIENT = {429, 500, 502, 503, 504}
_FINAL = ("Timeout", "Connect", "Offline", "InvalidURL")
"""Parts of the names of exceptions after which a second try would only take longer."""


def retried(question: Callable[[], T]) -> T:
    """The answer to `question`, asked up to `limits.TRIES` times. Raises its last error."""
    for attempt in range(limits.TRIES - 1):
        try:
            return question()
        except http_errors() as error:
            if not _transient(error):
                raise
        time.sleep(limits.PAUSE_S * 2**attempt)
    return question()


def _transient(error: Exception) -> bool:
    status = status_of(error)
    if status is not None:
        return status in _TRANSIENT
    return not any(part in type(error).__name__ for part in _FINAL)
