"""Messages by themselves, conversations, and the samples that an evaluation harness logs."""

from __future__ import annotations

from typing import Any

from assay.coherence.answers import Assembly, Value, finish, has, speech


def message(value: Value, out: Assembly) -> bool:
    """A message by itself, or a conversation of which the assistant's messages are the answers."""
    inner = value.get("messages") or value.get("conversations")
    if has(value.get("kwargs")):
        value = value["kwargs"]  # LangChain's
    if "role" not in value and has(value, ("from",)):
        value = {
            "role": {"gpt": "assistant", "model": "assistant"}.get(str(value["from"]), "user"),
            "content": value.get("value"),
        }
    elif value.get("type") == "ai" and "role" not in value:
        value = {"role": "assistant", **value}
    if isinstance(inner, list) and inner and all(has(m, ("role", "from")) for m in inner):
        return all(message(m, out) for m in inner)
    said = value["message"] if has(value.get("message")) else value
    if not isinstance(said.get("role"), str) or not has(said, ("content", "tool_calls")):
        return False
    if said["role"] in ("assistant", "model"):
        answer = out.answer("message", len(out.answers) + 1)
        speech(said, answer)
        finish(answer, value.get("finish_reason") or value.get("stopReason"))
    return True


def lm_eval(value: Value, out: Assembly) -> bool:
    """A line of the samples that lm-evaluation-harness logs. Scores of given answers are no text of
    the model's.
    """
    if has(value.get("results")) and has(value.get("configs")):
        out.textless += 1  # its table of scores
        return True
    if not has(value, ("resps", "filtered_resps")) or not has(
        value, ("doc_id", "doc", "target", "arguments")
    ):
        return False
    said = value.get("resps", value.get("filtered_resps"))
    texts = [
        t for request in (said if isinstance(said, list) else [said]) for t in _leaves(request)
    ]
    if not texts or not all(isinstance(text, str) for text in texts):
        out.textless += 1
        return True
    name = f"doc {value.get('doc_id', len(out.answers))}"
    for number, text in enumerate(texts):
        answer = out.answer(name if len(texts) == 1 else f"{name}, answer {number + 1}")
        answer.content[:], answer.whole = [text], True  # each filter logs the same answers again
    return True


def _leaves(value: Any) -> list[Any]:
    """The texts in nested lists; the score of a given answer, a pair of number and truth,
    is none.
    """
    if isinstance(value, list) and not (len(value) == 2 and str(value[1]) in ("True", "False")):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]
