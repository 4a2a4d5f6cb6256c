"""JSON messages to a webhook, posted from a thread of their own."""

from __future__ import annotations

import threading
import time
from queue import Empty, Full, Queue
from typing import Any

import httpx

from assay.environment import VERSION
from assay.errors import UsageError
from assay.secrets import scrubbed


class Webhook:
    """Posts messages as JSON from a thread of its own: a webhook that hangs delays no round. The
    last 100 wait.

    The URL may hold a secret, so it is never shown.
    """

    TRIES = 3

    def __init__(self, url: str, *, pause: float = 2.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError("--webhook is no http(s) URL", remedy="write it as https://HOST/PATH")
        self._url, self._pause = url, pause
        self._queue: Queue[dict[str, Any]] = Queue(maxsize=100)
        self.failures = 0
        threading.Thread(target=self._run, name="assay-watch-webhook", daemon=True).start()

    def post(self, message: dict[str, Any]) -> None:
        """Queue a message; the oldest goes where too many wait."""
        while True:
            try:
                self._queue.put_nowait(scrubbed(message))
                return
            except Full:
                try:
                    self._queue.get_nowait()
                    self._queue.task_done()
                    self.failures += 1
                except Empty:
                    pass

    def flush(self, seconds: float) -> None:
        """Wait until everything is sent, at most so long."""
        end = time.monotonic() + seconds
        while self._queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.05)

    def _run(self) -> None:
        while True:
            message = self._queue.get()
            if not any(self._sent(message, attempt) for attempt in range(self.TRIES)):
                self.failures += 1
            self._queue.task_done()

    def _sent(self, message: dict[str, Any], attempt: int) -> bool:
        if attempt:
            time.sleep(self._pause * 4 ** (attempt - 1))
        try:
            answer = httpx.post(
                self._url, json=message, timeout=10.0, headers={"User-Agent": f"assay/{VERSION}"}
            )
        except (httpx.HTTPError, httpx.InvalidURL):
            return False
        return answer.is_success
