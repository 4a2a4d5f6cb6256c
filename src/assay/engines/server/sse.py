"""Server-sent events, put together from the pieces of a byte stream."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator


class SseParser:
    """Turns pieces of a byte stream into the `data` of its server-sent events (WHATWG HTML, section
    9.2.6).

    The bytes may be cut anywhere. Lines end in LF, CRLF or CR; several `data:` lines of one event
    are joined by LF; comments and other fields are skipped. The specification drops an event that
    the end of the stream cuts off; `close` returns it nevertheless, since many servers leave out
    the last empty line.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[str]:
        """The events that `piece` completes."""
        new = self._decoder.decode(piece)
        whole = (
            "\n" in new or "\r" in self._text[-1:] + new
        )  # else a long line would be searched again with every piece
        self._text += new
        if whole:
            # A CR at the very end may be half of a CRLF.
            *lines, self._text = re.split(r"\r\n|\n|\r(?!\Z)", self._text)
            yield from self._events(lines)

    def close(self) -> Iterator[str]:
        """The event, if any, that the end of the stream leaves open."""
        text, self._text = self._text + self._decoder.decode(b"", final=True), ""
        yield from self._events([*re.split(r"\r\n|\n|\r", text), ""])

    def _events(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            name, _, value = line.partition(":")
            if name == "data":
                self._data.append(value.removeprefix(" "))
            elif not line and self._data:
                data, self._data = "\n".join(self._data), []
                yield data
