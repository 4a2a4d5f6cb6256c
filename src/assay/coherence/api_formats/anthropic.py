"""Anthropic's messages: the body and the events of its stream."""

from __future__ import annotations

from assay.coherence.answers import Assembly, Value, finish, has, speech, string


def anthropic(value: Value, out: Assembly) -> bool:
    """Anthropic's messages: the body and the events of its stream."""
    kind = value.get("type")
    if kind == "message" and isinstance(value.get("content"), list):
        answer = out.answer("message", value.get("id"))
        speech(value, answer)
        finish(answer, value.get("stop_reason"))
        return True
    if not isinstance(kind, str) or kind not in _ANTHROPIC_EVENTS:
        return False
    if kind == "message_start":
        out.begin()
    answer = out.answer("message", out.turn)
    piece, block = value.get("delta"), value.get("content_block")
    if kind == "content_block_start" and has(block):
        if str(block.get("type")).endswith("tool_use"):
            answer.call(value.get("index"), block.get("name"), block.get("input") or None)
        else:
            speech({"content": [block]}, answer)
    elif has(piece):
        answer.content.append(string(piece.get("text")))
        answer.reasoning.append(string(piece.get("thinking")))
        if "partial_json" in piece:
            answer.call(value.get("index"), None, piece["partial_json"])
        finish(answer, piece.get("stop_reason"))
    out.open -= kind == "message_stop"
    return True


_ANTHROPIC_EVENTS = {
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "ping",
}
