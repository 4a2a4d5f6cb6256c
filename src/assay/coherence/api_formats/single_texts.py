"""APIs with one text, or a list of texts, under a key of their own."""

from __future__ import annotations

from assay.coherence.answers import Assembly, Value, finish, has, string


def plain(value: Value, out: Assembly) -> bool:
    """APIs with one text under a key of their own: Triton, Bedrock, the older ones of Anthropic and
    Cohere, LMDeploy.
    """
    key = next(
        (k for k, beside in _PLAIN.items() if isinstance(value.get(k), str) and has(value, beside)),
        None,
    )
    if key is None:
        return False
    reasons = [value[name] for name in _REASON_KEYS if name in value]
    answer = out.in_turn("text") if reasons else out.answer("text")
    answer.content.append(value[key])
    finish(answer, reasons[0] if reasons else "stop")
    return True


_PLAIN = {
    "text_output": ("model_name", "model_version"),
    "generation": ("generation_token_count", "prompt_token_count"),
    "completion": ("stop_reason", "log_id"),
    "text": ("generation_id", "history_tokens", "finish_reason", "finishReason"),
    "token": ("finish_reason",),
    "response": ("p", "usage"),
    "result": ("is_truncated", "need_clear_history"),
}
"""The key of the text, and keys of which one stands beside it."""
_REASON_KEYS = ("finish_reason", "stop_reason", "completionReason", "finishReason")


def results(value: Value, out: Assembly) -> bool:
    """Lists of texts: KoboldCpp, Bedrock, KServe, Vertex, Cog."""
    name = next(
        (
            k
            for k in ("results", "outputs", "predictions", "output", "generated_text")
            if k in value
        ),
        None,
    )
    items = value.get(name) if name else None
    if (
        name is None
        or set(value) - {name} - _RESULT_KEYS
        or not isinstance(items, list | str | None)
    ):
        return False
    if not items and not isinstance(items, str):
        out.textless += 1
        return True
    items = [items] if isinstance(items, str) else items
    if all(isinstance(item, str) for item in items):
        if len(value) == 1 and name == "results":
            return False  # any list
        items = ["".join(items)] if name == "output" else items
    if not all(
        isinstance(item, str) or (has(item, RESULT_TEXTS) and set(item) <= _RESULT_KEYS)
        for item in items
    ):
        return False
    for number, item in enumerate(items):
        answer = (
            out.answer("result", number + 1)
            if len(items) > 1
            else out.answer("result", len(out.answers))
        )
        text = item if isinstance(item, str) else next(item[k] for k in RESULT_TEXTS if k in item)
        answer.content.append(string(text))
        reasons = [] if isinstance(item, str) else [item[k] for k in _REASON_KEYS if item.get(k)]
        finish(answer, reasons[0] if reasons else "stop")
    return True


RESULT_TEXTS = ("text", "outputText", "generated_text", "content", "data")
_RESULT_KEYS = {
    *RESULT_TEXTS,
    *_REASON_KEYS,
    "logprobs",
    "prompt_tokens",
    "completion_tokens",
    "tokenCount",
    "inputTextTokenCount",
    "name",
    "datatype",
    "shape",
    "parameters",
    "citationMetadata",
    "safetyAttributes",
    "metadata",
    "id",
    "model",
    "version",
    "model_name",
    "model_version",
    "deployedModelId",
    "modelDisplayName",
    "modelVersionId",
    "status",
    "error",
    "metrics",
    "logs",
    "urls",
    "input",
    "model_id",
    "generated_token_count",
    "input_token_count",
    "system",
    "created_at",
    "started_at",
    "completed_at",
    "data_removed",
    "stream",
    "webhook",
}
