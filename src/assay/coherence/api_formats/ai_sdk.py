"""The AI SDK's data stream and typed events, and server-sent events that carry plain text."""

from __future__ import annotations

from typing import Any

from assay.coherence.answers import Assembly, Value, finish, has, speech, string


def ai_sdk(value: Value, out: Assembly) -> bool:
    """The AI SDK's data stream (`0:"text"`, `d:{…}`, cut into parts by `reading`) and the typed
    events that followed it.
    """
    inner: Any = value.get("value")
    part, kind = value.get("ai_sdk"), value.get("type")
    if part is None:
        return isinstance(kind, str) and kind in _AI_SDK_EVENTS and _ai_sdk_event(kind, value, out)
    if part == "f" and has(inner):
        if out.is_open("message"):
            out.begin()
        out.open, _ = max(out.open, 1), out.in_turn("message")
    elif part == "3":
        out.errors.append(str(inner))
    elif part in "de":
        if (
            out.is_open("message") or not out.answers
        ):  # a step ends, or all of them, of which the last has ended
            going_on = part == "e" and inner.get("isContinued")
            finish(
                out.in_turn("message"), None if going_on else inner.get("finishReason") or "stop"
            )
        out.open -= part == "e" and out.open > 0
    elif part in "0g":
        answer = out.in_turn("message")
        (answer.content if part == "0" else answer.reasoning).append(str(inner))
    elif part in "9bc":
        out.in_turn("message").call(
            inner.get("toolCallId"),
            inner.get("toolName"),
            inner.get("args", inner.get("argsTextDelta")),
        )
    elif part == "4":
        speech(inner, out.in_turn("message"))
    return True


def _ai_sdk_event(kind: str, value: Value, out: Assembly) -> bool:
    if kind == "start":
        if out.is_open("message"):
            out.begin()
        out.open, _ = max(out.open, 1), out.in_turn("message")
    elif kind in ("error", "abort"):
        out.errors.append(str(value.get("errorText") or value.get("error") or kind))
    elif kind == "finish":
        finish(out.in_turn("message"), value.get("finishReason") or "stop")
        out.open -= out.open > 0
    elif kind.startswith("tool-input"):
        inner = value.get(
            "inputTextDelta", value.get("input") if kind == "tool-input-available" else None
        )
        answer = out.in_turn("message")
        if kind != "tool-input-available" or str(value.get("toolCallId")) not in answer.calls:
            answer.call(value.get("toolCallId"), value.get("toolName"), inner)
    elif kind.endswith("-delta"):
        answer, text = (
            out.in_turn("message"),
            value.get("delta", value.get("text", value.get("textDelta"))),
        )
        (answer.reasoning if kind.startswith("reasoning") else answer.content).append(string(text))
    return True


_AI_SDK_EVENTS = {
    "start",
    "start-step",
    "text-start",
    "text-delta",
    "text-end",
    "reasoning-start",
    "reasoning-delta",
    "reasoning-end",
    "tool-input-start",
    "tool-input-delta",
    "tool-input-available",
    "tool-output-available",
    "finish-step",
    "finish",
    "abort",
    "message-metadata",
    "step-start",
    "step-finish",
}


def text_events(value: Value, out: Assembly) -> bool:
    """Server-sent events that carry plain text, as Replicate and many small servers send them (cut
    out by `reading`).
    """
    if set(value) != {"sse", "data"}:
        return False
    if value["sse"] == "error":
        out.errors.append(value["data"] or "error")
    elif value["sse"] in ("done", "end", "close", "complete"):
        finish(out.in_turn("stream"), "stop")
    else:
        out.in_turn("stream").content.append(value["data"])
    return True
