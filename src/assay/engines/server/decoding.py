"""Content-Encoding undone in bounded steps, so that a few compressed bytes cannot become gigabytes in memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

_STEP = 1 << 16
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS


class Decoder(Protocol):
    """Undoes one content encoding, piece by piece."""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The decoded bytes of `piece`, in steps of bounded size."""
        ...


class Identity:
    """No encoding."""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """`piece` itself."""
        yield piece


class Inflate:
    """gzip and deflate."""

    def __init__(self) -> None:
        self._inflater = zlib.decompressobj(_GZIP_OR_ZLIB)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The inflated bytes, at most 64 KiB a step; `zlib.error` if they are not what they claim to be."""
        rest = piece
        while rest:
            out = self._inflater.decompress(rest, _STEP)
            rest = self._inflater.unconsumed_tail
            if out:
                yield out
            elif not rest:
                return


def decoder_for(encoding: str) -> Decoder | None:
    """The decoder for a Content-Encoding header; None for one that assay never asks for."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return Identity()
    if name in ("gzip", "x-gzip", "deflate"):
        return Inflate()
    return None
