"""The events of Cohere's stream, of both versions."""

from __future__ import annotations

from assay.coherence.answers import Assembly, Value, finish, has, string


def cohere(value: Value, out: Assembly) -> bool:
    """The events of Cohere's stream, of both versions."""
    kind, piece = value.get("type"), value.get("delta")
    if value.get("event_type") in ("stream-start", "text-generation", "stream-end"):
        answer = out.in_turn("message")
        if value["event_type"] == "text-generation":
            answer.content.append(string(value.get("text")))
        finish(answer, value.get("finish_reason"))
        return True
    if (
        not isinstance(kind, str)
        or kind not in _COHERE_EVENTS
        or ("delta" not in value and not kind.endswith("-end"))
    ):
        return False
    answer = out.in_turn("message")
    if has(piece):
        content = (piece.get("message") or {}).get("content")
        if has(content):
            (answer.reasoning if content.get("thinking") else answer.content).append(
                string(content.get("thinking") or content)
            )
        finish(answer, piece.get("finish_reason"))
    return True


_COHERE_EVENTS = {
    "message-start",
    "content-start",
    "content-delta",
    "content-end",
    "message-end",
    "tool-plan-delta",
    "tool-call-start",
    "tool-call-delta",
    "tool-call-end",
    "citation-start",
    "citation-end",
}
