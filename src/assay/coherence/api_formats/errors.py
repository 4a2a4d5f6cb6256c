"""A server's error, as a body or in the middle of a stream."""

from __future__ import annotations

import json
import re
from typing import Any

from assay.coherence.answers import Assembly, Value, has


def error(value: Value, out: Assembly) -> bool:
    """A server's error, as a body or in the middle of a stream."""
    said = value.get("error") or value.get("detail") or value.get("fault") or _refused(value)
    if not said or not set(value) <= _ERROR_KEYS:
        return False
    text = (said.get("message") or said.get("faultstring")) if has(said) else said
    out.errors.append(text if isinstance(text, str) else json.dumps(said, ensure_ascii=False))
    return True


def _refused(value: Value) -> Any:
    """What an object without the key `error` says of a failure: its status, `success`, or its words
    tell that it is one.
    """
    said = value.get("message") or value.get("title") or value.get("errors") or value.get("msg")
    status = next(
        (value[k] for k in ("status", "code", "statusCode", "status_code") if k in value), None
    )
    failed = (
        value.get("object") == "error"
        or value.get("success") is False
        or (isinstance(status, int) and status >= 400)
    )
    short = isinstance(said, str) and len(said) < 200 and len(value) == 1 and _FAILED.search(said)
    return said if failed or short else None


_FAILED = re.compile(
    r"\A(?:unauthori[sz]ed|forbidden|not found|bad (?:request|gateway)|missing |invalid |no"
    r" (?:route|such|healthy)|internal server"
    r"|too many requests|service unavailable|gateway time)|rate limit|quota|timed out|access"
    r" denied|authentication|api key",
    re.IGNORECASE,
)
_ERROR_KEYS = {
    "title",
    "fault",
    "result",
    "messages",
    "statusCode",
    "msg",
    "instance",
    "traceId",
    "error",
    "error_type",
    "errors",
    "detail",
    "message",
    "object",
    "type",
    "param",
    "code",
    "status",
    "status_code",
    "id",
    "request_id",
    "custom_id",
    "timestamp",
    "path",
    "success",
    "sequence_number",
    "event_id",
    "response",
    "model",
    "created",
}
