"""One wall clock for a request: every read and write of its connection ends at the same time.

A read timeout alone bounds a silence. A server that sends a header byte by byte, a chunk extension
without end, or one informational answer after another is never silent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

_PIECE = 1 << 16
"""Bytes written between two looks at the clock."""


class Until(float):
    """Seconds of silence that a request allows, with the time at which the whole attempt ends.

    httpcore hands the timeouts of a request to every read and write, so the end travels with the
    request itself, whichever thread or connection serves it.
    """

    end: float

    def __new__(cls, silence_s: float, end: float) -> Until:
        """`silence_s` seconds for each operation, none of which goes on after monotonic `end`."""
        made = super().__new__(cls, silence_s)
        made.end = end
        return made


def _left(timeout: float | None, late: type[Exception]) -> float | None:
    """Seconds that an operation may take; raises `late` where the attempt has no time left."""
    if not isinstance(timeout, Until):
        return timeout
    left = timeout.end - time.monotonic()
    if left <= 0:
        raise late("the attempt ran out of time")
    return min(float(timeout), left)


class _Stream(httpcore.NetworkStream):
    """A connection whose operations end with the attempt that they belong to."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), _PIECE):
            piece = buffer[at : at + _PIECE]
            self._inner.write(piece, _left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, left))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    """Opens connections that keep the deadlines of their requests."""

    def __init__(self, inner: httpcore.NetworkBackend) -> None:
        self._inner = inner

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.connect_tcp(host, port, left, local_address, socket_options))

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        left = _left(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.connect_unix_socket(path, left, socket_options))

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


def keep_deadlines(client: httpx.Client) -> httpx.Client:
    """Make every connection of `client`, through a proxy or not, keep deadlines; returns it.

    httpx takes no network backend of the caller's, so this sets the one of its connection pools.
    """
    for transport in (client._transport, *client._mounts.values()):
        pool = getattr(transport, "_pool", None)
        if pool is not None:
            pool._network_backend = _Backend(pool._network_backend)
    return client


def timeouts(silence_s: float, connect_s: float, end: float) -> dict[str, float | None]:
    """The timeouts of a request that ends at monotonic `end`, as httpx hands them to httpcore."""
    silence = Until(silence_s, end)
    return {"connect": Until(connect_s, end), "read": silence, "write": silence, "pool": None}
