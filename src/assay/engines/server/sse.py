"""Server-sent events, parsed from bytes that may be cut anywhere (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import codecs
from collections.abc import Iterator


class SseParser:
    """Turns pieces of a byte stream into the `data` of its events.

    Lines end in LF, CRLF or CR; several `data:` lines of one event are joined by LF; comments and other fields are
    skipped. The specification drops an event that the end of the stream cuts off; `close` returns it nevertheless,
    since many servers leave out the last empty line.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._data: list[str] = []
        self._first = True

    def feed(self, piece: bytes) -> Iterator[str]:
        """The events that `piece` completes."""
        self._text += self._decoder.decode(piece)
        if self._first and self._text:
            self._text = self._text.removeprefix("\ufeff")
            self._first = False
        yield from self._take_lines(final=False)

    def close(self) -> Iterator[str]:
        """The event, if any, that the end of the stream leaves open."""
        self._text += self._decoder.decode(b"", final=True)
        yield from self._take_lines(final=True)
        yield from self._dispatch()

    def _take_lines(self, final: bool) -> Iterator[str]:
        text, start = self._text, 0
        while True:
            end, after = _line_end(text, start, final)
            if end < 0:
                break
            yield from self._line(text[start:end])
            start = after
        self._text = text[start:]
        if final and self._text:
            rest, self._text = self._text, ""
            yield from self._line(rest)

    def _line(self, line: str) -> Iterator[str]:
        if not line:
            yield from self._dispatch()
            return
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))

    def _dispatch(self) -> Iterator[str]:
        if self._data:
            data, self._data = "\n".join(self._data), []
            yield data


def _line_end(text: str, start: int, final: bool) -> tuple[int, int]:
    """Where the line that begins at `start` ends, and where the next begins; (-1, start) if it is not complete.

    A CR at the very end may be half of a CRLF, so it ends a line only when no more text can come.
    """
    lf, cr = text.find("\n", start), text.find("\r", start)
    if cr >= 0 and (lf < 0 or cr < lf):
        if cr + 1 < len(text):
            return cr, cr + (2 if text[cr + 1] == "\n" else 1)
        return (cr, cr + 1) if final else (-1, start)
    return (lf, lf + 1) if lf >= 0 else (-1, start)
