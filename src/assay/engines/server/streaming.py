"""One streamed answer, from the bytes to the `Reply`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from assay.engines.base import OnText, Reply
from assay.engines.server.endpoint import without_credentials
from assay.engines.server.errors import InvalidStream, NotJson, NotStreamed, ServerInconclusive
from assay.engines.server.excerpt import looks_like_html, one_line
from assay.engines.server.reply import StreamAssembler
from assay.engines.server.sse import SseParser
from assay.engines.server.transport import Transport

_HEAD = 4096
_END = "[DONE]"


def stream_reply(
    transport: Transport, url: str, body: Mapping[str, Any], on_text: OnText | None = None
) -> tuple[Reply, StreamAssembler]:
    """POST `body` and put the stream that answers together; the assembler tells how the server counts."""
    parser = SseParser()
    head = b""
    where = without_credentials(url)
    with transport.stream(url, body) as pieces:
        assembler = StreamAssembler(where, pieces.started, on_text)
        try:
            for at, piece in pieces:
                if len(head) < _HEAD:
                    head += piece[:_HEAD]
                for data in parser.feed(piece):
                    _take(data, at, assembler, where)
        except ServerInconclusive as exc:
            # After its end mark a stream has told everything, however it closes.
            if not assembler.is_done:
                exc.partial_text = assembler.text
                raise
    for data in parser.close():
        _take(data, time.monotonic(), assembler, where)
    if assembler.chunks == 0 and not assembler.is_done:
        raise _no_events(transport, head, where)
    return assembler.reply(time.monotonic()), assembler


def _take(data: str, at: float, assembler: StreamAssembler, where: str) -> None:
    text = data.strip()
    if not text:
        return
    if text == _END:
        assembler.done()
        return
    try:
        chunk = json.loads(text)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        raise InvalidStream(f"{where} streams an event that is not a JSON object: {one_line(text, 80)}")
    assembler.feed(chunk, at)


def _no_events(transport: Transport, head: bytes, where: str) -> InvalidStream | NotJson:
    """The error for an answer without a single event."""
    said = transport.said(head)
    if looks_like_html(head.decode("utf-8", "replace")):
        return NotJson(f"{where} answered a web page instead of a stream: {said}")
    if head.lstrip().startswith(b"{"):
        return NotStreamed(f"{where} answered in one piece, though a stream was asked for: {said}")
    return InvalidStream(f"{where} answered no server-sent events: {said}")
