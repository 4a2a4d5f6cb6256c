"""OpenAI's Responses: the body, and the typed events of its stream."""

from __future__ import annotations

from assay.coherence.answers import Assembly, Value, finish, has, speech, string


def responses(value: Value, out: Assembly) -> bool:
    """OpenAI's Responses: the body, and the typed events of its stream. A completed response
    replaces its events.
    """
    kind = value.get("type")
    if isinstance(kind, str) and kind.startswith("response."):
        return _response_event(kind, value, out)
    items = value.get("output")
    if not isinstance(items, list) or (
        value.get("object") != "response" and "model_instance_id" not in value
    ):
        return False  # the second is LM Studio's own
    answer = out.answer("response", value.get("id"))
    for place, item in enumerate(i for i in items if has(i)):
        if item.get("type") == "message":
            speech(item, answer)
        elif item.get("type") == "reasoning":
            answer.reasoning.append(string(item.get("content") or item.get("summary")))
        elif "name" in item:
            answer.call(place, item["name"], item.get("arguments", item.get("input")))
    cut, failed = value.get("incomplete_details"), value.get("error")
    status = value.get("status", "completed" if "model_instance_id" in value else None)
    finish(answer, cut.get("reason") if has(cut) else status)
    if has(failed):
        out.errors.append(str(failed.get("message")))
    return True


def _response_event(kind: str, value: Value, out: Assembly) -> bool:
    whole, piece, item = value.get("response"), value.get("delta"), value.get("item")
    if kind == "response.created":
        out.begin()
    if has(whole):
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            out.open -= 1
            responses({**whole, "object": "response", "output": whole.get("output") or []}, out)
            if out.open <= 0:  # every response that began is there as a whole
                streams = [key for key in out.answers if key[0] == "response stream"]
                if all(out.answers[key].blank for key in streams) or any(
                    not a.blank for key, a in out.answers.items() if key not in streams
                ):
                    out.answers = {key: a for key, a in out.answers.items() if key not in streams}
                    out.overlapping = False
        return True
    answer = out.answer("response stream", out.turn)
    if "function_call_arguments" in kind or "custom_tool_call" in kind:
        answer.call(value.get("item_id"), None, piece)
    elif has(item) and "name" in item:
        answer.call(item.get("id"), item["name"], None)
    elif isinstance(piece, str):
        (answer.reasoning if "reasoning" in kind else answer.content).append(piece)
    return True
