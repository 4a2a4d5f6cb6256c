"""What each API's bodies and events say, added to the answers under construction: one function for
each API.

A reader is offered one JSON value, adds what it understands to the answers of an `Assembly`, and
says whether it understood. A new API is one function and one entry in `READERS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from assay.coherence.reading import Assembly, Value, finish, has, json_values, speech, string


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


def ollama(value: Value, out: Assembly) -> bool:
    """Ollama's chat and generate, whole and streamed."""
    if "done" not in value or not has(value, ("message", "response")):
        return False
    answer = out.in_turn(value.get("model"))
    message = value.get(
        "message", {"content": value.get("response"), "thinking": value.get("thinking")}
    )
    speech(message if has(message) else {}, answer)
    finish(answer, value["done"] and (value.get("done_reason") or "stop"))
    out.notice_second_end(value.get("model"))
    return True


def tgi(value: Value, out: Assembly) -> bool:
    """Text Generation Inference and transformers' pipelines. The last event of a stream holds the
    whole text.
    """
    whole, token, details = (
        value.get("generated_text"),
        value.get("token"),
        value.get("details") or {},
    )
    if isinstance(whole, list):  # a pipeline that was given a conversation
        return all(message(said, out) for said in whole if has(said))
    if isinstance(whole, str):
        out.answers.pop(("tokens", str(out.turn)), None)
        if out.overlapping:  # the last event of each stream tells all of it
            for key in [key for key in out.answers if key[0] == "tokens"]:
                del out.answers[key]
            out.overlapping = False
        for best in [
            {"generated_text": whole, **details},
            *(details.get("best_of_sequences") or ()),
        ]:
            answer = out.answer("text", len(out.answers) + 1)
            answer.content.append(string(best.get("generated_text")))
            finish(answer, best.get("finish_reason"))
            answer.whole = True
        return True
    if not has(token, ("text",)):
        return False
    _count_token(value.get("index"), out)
    out.answer("tokens", out.turn).content.append(
        "" if token.get("special") else string(token["text"])
    )
    return True


def _count_token(number: Any, out: Assembly) -> None:
    """Tokens are numbered from 0 or 1 on: a number that does not follow belongs to another stream."""
    last = out.turns.get(("token",))
    if not isinstance(number, int):
        return
    if last is not None and number != last + 1:
        begins = number in (0, 1) and number < last
        out.turn += begins
        out.overlapping |= number == last or (not begins and (number < last or out.turn > 0))
    out.turns["token",] = number


def llama_cpp(value: Value, out: Assembly) -> bool:
    """llama.cpp's own `/completion`."""
    if not isinstance(value.get("content"), str) or not isinstance(value.get("stop"), bool):
        return False
    slot = value.get("id_slot", value.get("slot_id"))
    if value["stop"] and not out.is_open("slot", slot, value.get("index")):
        slot = -1  # events of a stream do not know their slot, and its last one does
    answer = out.in_turn("slot", slot, value.get("index"))
    answer.content.append(value["content"])
    if value["stop"]:
        finish(answer, "length" if value.get("stopped_limit") else value.get("stop_type") or "stop")
    return True


def sglang(value: Value, out: Assembly) -> bool:
    """SGLang's own `/generate`, where each event of a stream repeats what came before."""
    about, text = value.get("meta_info"), value.get("text")
    if not has(about) or not isinstance(text, str):
        return False
    answer = out.answer("text", about.get("id") or value.get("index", len(out.answers) + 1))
    answer.grow(text)
    reason = about.get("finish_reason")
    finish(answer, reason.get("type") if has(reason) else reason)
    return True


def gemini(value: Value, out: Assembly) -> bool:
    """Gemini's generateContent."""
    candidates, feedback = value.get("candidates"), value.get("promptFeedback")
    if candidates is None and has(feedback, ("blockReason",)):
        out.errors.append(f"the prompt was blocked: {feedback['blockReason']}")
        return True
    if not isinstance(candidates, list) or not all(
        has(c, ("content", "finishReason")) for c in candidates
    ):
        return False
    for place, candidate in enumerate(candidates):
        answer = out.answer(value.get("responseId"), f"candidate {candidate.get('index', place)}")
        content = candidate.get("content")
        speech({"content": content.get("parts")} if has(content) else {}, answer)
        finish(answer, candidate.get("finishReason"))
    return True


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
        isinstance(item, str) or (has(item, _RESULT_TEXTS) and set(item) <= _RESULT_KEYS)
        for item in items
    ):
        return False
    for number, item in enumerate(items):
        answer = (
            out.answer("result", number + 1)
            if len(items) > 1
            else out.answer("result", len(out.answers))
        )
        text = item if isinstance(item, str) else next(item[k] for k in _RESULT_TEXTS if k in item)
        answer.content.append(string(text))
        reasons = [] if isinstance(item, str) else [item[k] for k in _REASON_KEYS if item.get(k)]
        finish(answer, reasons[0] if reasons else "stop")
    return True


_RESULT_TEXTS = ("text", "outputText", "generated_text", "content", "data")
_RESULT_KEYS = {
    *_RESULT_TEXTS,
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


def replicate(value: Value, out: Assembly) -> bool:
    """A prediction of Replicate or of a Cog container, alone, in a list of them, or as their
    webhook sends it.
    """
    listed = value.get("results")
    if (
        isinstance(listed, list)
        and listed
        and all(has(v, ("status",)) for v in listed)
        and "next" in value
    ):
        return all(replicate(prediction, out) for prediction in listed)
    status, output = value.get("status"), value.get("output")
    if status not in _PREDICTION or not set(value) <= _PREDICTION_KEYS:
        return False
    if status in ("starting", "processing"):
        out.errors.append(f"the prediction is {status}")
    elif status != "succeeded":
        out.errors.append(str(value.get("error") or f"the prediction is {status}"))
    pieces = output if isinstance(output, list) else [output]
    if not all(
        piece is None or isinstance(piece, str) or has(piece, _RESULT_TEXTS) for piece in pieces
    ):
        out.textless += 1
    elif output or status == "succeeded":
        answer = out.answer("prediction", value.get("id") or len(out.answers) + 1)
        answer.content.append(string(pieces))
        finish(answer, "stop" if status == "succeeded" else None)
    return True


_PREDICTION = ("starting", "processing", "succeeded", "failed", "canceled", "aborted")
_PREDICTION_KEYS = {
    "id",
    "model",
    "version",
    "input",
    "output",
    "status",
    "error",
    "logs",
    "metrics",
    "urls",
    "created_at",
    "started_at",
    "completed_at",
    "data_removed",
    "source",
    "webhook",
    "webhook_events_filter",
    "stream",
    "deployment",
    "deadline",
    "output_file_prefix",
}


def webui(value: Value, out: Assembly) -> bool:
    """text-generation-webui: the history of a chat as its API and its log files write it, and its
    streams.
    """
    event, listed = value.get("event"), value.get("results")
    if event == "text_stream" and "history" not in value and isinstance(value.get("text"), str):
        _count_token(value.get("message_num"), out)
        out.in_turn("stream", out.turn).content.append(value["text"])
        return True
    if event == "stream_end":
        finish(out.in_turn("stream", out.turn), "stop")
        return True
    if isinstance(listed, list) and listed and all(has(v, ("history",)) for v in listed):
        return all(webui(chat, out) for chat in listed)
    history = value["history"] if has(value.get("history")) else value
    pairs = history.get("internal", history.get("visible"))
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 for p in pairs):
        return False
    replies = [string(pair[1]) for pair in pairs]
    if event == "text_stream":  # each event repeats what came before
        out.in_turn("stream", out.turn).content[:] = replies[-1:]
        return True
    for reply in replies:
        answer = out.answer("message", len(out.answers) + 1)
        answer.content.append(reply)
        answer.whole = True
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
    """The texts in nested lists; the score of a given answer, a pair of number and truth, is none."""
    if isinstance(value, list) and not (len(value) == 2 and str(value[1]) in ("True", "False")):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def archive(value: Value, out: Assembly) -> bool:
    """A HAR file of a browser: the bodies of its requests."""
    entries = (value.get("log") or {}).get("entries") if has(value.get("log")) else None
    if not isinstance(entries, list):
        return False
    for entry in entries:
        content = ((entry.get("response") or {}).get("content") or {}) if has(entry) else {}
        parsed = json_values(str(content.get("text") or "").strip())
        for inner in parsed.values if parsed else ():
            _ = has(inner) and read(inner, out)
    return bool(out.answers or out.errors)


def wrapped(value: Value, out: Assembly) -> bool:
    """A line of a batch or of a log of requests, with the body inside."""
    inner = next(
        (value[k] for k in ("response", "body", "result", "output") if has(value.get(k))), None
    )
    seen = set(out.answers)
    if (
        inner is not None
        and value.get("success") is True
        and isinstance(inner.get("response"), str)
    ):
        inner = {"usage": None, **inner}  # Cloudflare's
    if inner is None or not read(inner, out):
        return False
    for key in [key for key in out.answers if key not in seen]:
        answer = out.answers.pop(key)
        answer.name = f"{value.get('custom_id') or value.get('id') or ''} {answer.name}".strip()
        out.answers[str(len(out.answers)), *key] = answer
    return True


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

Reader = Callable[[Value, Assembly], bool]
READERS: dict[str, Reader] = {
    "error": error,
    "openai": openai,
    "openai responses": responses,
    "anthropic": anthropic,
    "ollama": ollama,
    "tgi": tgi,
    "llama.cpp": llama_cpp,
    "sglang": sglang,
    "gemini": gemini,
    "cohere": cohere,
    "ai sdk": ai_sdk,
    "text events": text_events,
    "replicate": replicate,
    "text-generation-webui": webui,
    "lm-eval": lm_eval,
    "plain": plain,
    "results": results,
    "message": message,
    "batch": wrapped,
    "archive": archive,
}
"""By name, in the order in which they are asked."""


def read(value: Value, out: Assembly) -> bool:
    """Offer a value to all readers."""
    name = next((name for name, reader in READERS.items() if reader(value, out)), None)
    if name and name != "error":
        out.apis[name] = out.apis.get(name, 0) + 1
    return name is not None
