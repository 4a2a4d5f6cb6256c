"""OpenAI's chat completions and completions, of every server that speaks this dialect."""

from __future__ import annotations

from assay.coherence.answers import Assembly, Value, finish, has, speech


def openai(value: Value, out: Assembly) -> bool:
    """Chat completions and completions, bodies and chunks, of every server that speaks this
    dialect.
    """
    choices = value.get("choices")
    if (
        choices == []
        and set(value) <= _OPENAI_KEYS
        and value.get("object") in (None, *_OPENAI_OBJECTS)
    ):
        return True  # the chunk that carries the usage
    fields = ("message", "delta", "text", "finish_reason")
    if not isinstance(choices, list) or not choices or not all(has(c, fields) for c in choices):
        return False
    for place, choice in enumerate(choices):
        where = out.answer if value.get("id") else out.in_turn
        key = (value.get("id"), f"choice {choice.get('index', place)}")
        answer = where(*key)
        if answer.whole and "delta" not in choice and "object" in value:
            answer = out.in_turn(*key)  # another body under the same id
        message = choice.get("message") or choice.get("delta")
        out.disorder |= answer.whole and has(message) and bool(message.get("content"))
        if (
            not value.get("id")
            and has(message)
            and not any(message[k] for k in message if k != "role")
        ):
            # A stream begins; servers that name the role again in every event send text beside it.
            begun = ("begun", *map(str, key), str(out.turns.get(tuple(map(str, key)))))
            out.overlapping |= (
                begun in out.turns and not choice.get("finish_reason") and "role" in message
            )
            out.turns[begun] = 1
        speech(message if has(message) else {"content": choice.get("text")}, answer)
        finish(answer, choice.get("finish_reason"))
    return True


_OPENAI_OBJECTS = (
    "chat.completion",
    "chat.completion.chunk",
    "text_completion",
    "text_completion.chunk",
)
_OPENAI_KEYS = {
    "id",
    "object",
    "created",
    "model",
    "choices",
    "usage",
    "system_fingerprint",
    "service_tier",
    "error",
    "provider",
    "prompt_logprobs",
    "prompt_token_ids",
    "kv_transfer_params",
    "metadata",
    "timings",
    "prompt_filter_results",
}
