"""Bodies and streams of model servers, unpacked into the answers in them, so that `grade` takes what `curl` saved.

The JSON values of a file are offered one by one to `READERS`, one for each API. A reader adds what it understands to
the answers of an `Assembly` and says whether it understood. A new API is one function and one entry there.

What was lost (a stream that breaks off, events that are no JSON, an error in the middle) is a note beside the answers.
A file that is clearly an envelope and from which no answer can be read has a `reason` instead of answers. One that
shows no sign of an envelope is the answer itself: `unpack` returns None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from assay.coherence.reading import Parsed, http_head, json_values, python_fields, without_noise

Value = Mapping[str, Any]
TOKEN = 12
"""Code points of one token, at most: what is longer and comes again is all that came before."""


@dataclass
class Answer:
    """One answer: the text of each field in pieces, and the tool calls by their place in the message."""

    name: str = ""
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[str, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    whole: bool = False
    """Whether the server said that this was all."""

    def call(self, key: Any, name: Any, arguments: Any) -> None:
        """Add a piece of a tool call; arguments that are no string are written as JSON."""
        call = self.calls.setdefault(str(key), {"name": "", "arguments": ""})
        call["name"] = name if isinstance(name, str) and name else call["name"]
        if arguments is not None:
            call["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)

    def grow(self, text: str) -> None:
        """Add content from a stream whose events may each repeat all that came before."""
        before = self.content[0] if len(self.content) == 1 else None
        if before and text.startswith(before) and (len(text) > len(before) or len(text) > TOKEN):
            self.content.clear()
        self.content.append(text)

    @property
    def blank(self) -> bool:
        """Whether nothing at all arrived."""
        return not (any(self.content) or any(self.reasoning) or self.calls)


@dataclass(frozen=True)
class Unpacked:
    """The answers of a file, what was lost on the way, and, where no answer can be read, why."""

    api: str
    answers: Sequence[Answer] = ()
    notes: Sequence[str] = ()
    partial: bool = False
    """Something is missing: the stream breaks off, or some of it could not be read."""
    reason: str | None = None
    """`error_body`, `unknown_envelope`, `stream_cut`, `interleaved_streams` or `no_answer`."""


@dataclass
class Assembly:
    """Answers under construction. Streams whose events carry no id are told apart by their order, by `turn`."""

    answers: dict[tuple[str, ...], Answer] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    apis: dict[str, int] = field(default_factory=dict)
    turns: dict[tuple[str, ...], int] = field(default_factory=dict)
    turn: int = 0
    open: int = 0
    overlapping: bool = False
    """A stream without ids began before the last one had ended."""
    disorder: bool = False
    """Text came after the event that ended its answer."""

    def answer(self, *key: Any) -> Answer:
        """The answer under `key`, begun where there is none."""
        key = tuple(map(str, key))
        return self.answers.setdefault(
            key, Answer(" ".join(k for k in key if k not in ("None", "", "turn 1")))
        )

    def in_turn(self, *key: Any) -> Answer:
        """The answer under `key` that is still open; one that was finished is followed by a new one."""
        name = tuple(map(str, key))
        found = self.answers.get((*name, f"turn {self.turns.get(name)}"))
        if found is None or found.whole:
            self.turns[name] = self.turns.get(name, 0) + 1
        return self.answer(*name, f"turn {self.turns[name]}")

    def is_open(self, *key: Any) -> bool:
        """Whether `in_turn` would go on with an answer that has begun."""
        name = tuple(map(str, key))
        found = self.answers.get((*name, f"turn {self.turns.get(name)}"))
        return found is not None and not found.whole

    def begin(self) -> None:
        """A stream without ids begins."""
        self.overlapping |= self.open > 0
        self.open += 1
        self.turn += 1


def finish(answer: Answer, reason: Any) -> None:
    """An answer came to its end, for a reason in the words of its API."""
    if reason:
        answer.finish_reason, answer.whole = _REASONS.get(str(reason), str(reason)), True


_REASONS = {
    "max_tokens": "length", "MAX_TOKENS": "length", "max_output_tokens": "length", "limit": "length",
    "model_context_window_exceeded": "length", "eos_token": "stop", "stop_sequence": "stop", "end_turn": "stop",
    "eos": "stop", "word": "stop", "STOP": "stop", "COMPLETE": "stop", "completed": "stop", "tool_use": "tool_calls"
}  # fmt: skip


def openai(value: Value, out: Assembly) -> bool:
    """Chat completions and completions, bodies and chunks, of every server that speaks this dialect."""
    choices = value.get("choices")
    if choices == [] and set(value) <= _OPENAI_KEYS and value.get("object") in (None, *_OPENAI_OBJECTS):
        return True  # the chunk that carries the usage
    fields = ("message", "delta", "text", "finish_reason")
    if not isinstance(choices, list) or not choices or not all(_has(c, fields) for c in choices):
        return False
    for place, choice in enumerate(choices):
        where = out.answer if value.get("id") else out.in_turn
        key = (value.get("id"), f"choice {choice.get('index', place)}")
        answer = where(*key)
        if answer.whole and "delta" not in choice and "object" in value:
            answer = out.in_turn(*key)  # another body under the same id
        message = choice.get("message") or choice.get("delta")
        out.disorder |= answer.whole and _has(message) and bool(message.get("content"))
        _speech(message if isinstance(message, Mapping) else {"content": choice.get("text")}, answer)
        finish(answer, choice.get("finish_reason"))
    return True


_OPENAI_OBJECTS = ("chat.completion", "chat.completion.chunk", "text_completion", "text_completion.chunk")
_OPENAI_KEYS = {
    "id", "object", "created", "model", "choices", "usage", "system_fingerprint", "service_tier", "error", "provider",
    "prompt_logprobs", "prompt_token_ids", "kv_transfer_params", "metadata", "timings", "prompt_filter_results"
}  # fmt: skip


def responses(value: Value, out: Assembly) -> bool:
    """OpenAI's Responses: the body, and the typed events of its stream. A completed response replaces its events."""
    kind = value.get("type")
    if isinstance(kind, str) and kind.startswith("response."):
        return _response_event(kind, value, out)
    items = value.get("output")
    if not isinstance(items, list) or (
        value.get("object") != "response" and "model_instance_id" not in value
    ):
        return False  # the second is LM Studio's own
    answer = out.answer("response", value.get("id"))
    for place, item in enumerate(i for i in items if isinstance(i, Mapping)):
        if item.get("type") == "message":
            _speech(item, answer)
        elif item.get("type") == "reasoning":
            answer.reasoning.append(_string(item.get("content") or item.get("summary")))
        elif "name" in item:
            answer.call(place, item["name"], item.get("arguments", item.get("input")))
    cut, failed = value.get("incomplete_details"), value.get("error")
    status = value.get("status", "completed" if "model_instance_id" in value else None)
    finish(answer, cut.get("reason") if isinstance(cut, Mapping) else status)
    if isinstance(failed, Mapping):
        out.errors.append(str(failed.get("message")))
    return True


def _response_event(kind: str, value: Value, out: Assembly) -> bool:
    whole, piece, item = value.get("response"), value.get("delta"), value.get("item")
    if kind == "response.created":
        out.begin()
    if isinstance(whole, Mapping):
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
    elif isinstance(item, Mapping) and "name" in item:
        answer.call(item.get("id"), item["name"], None)
    elif isinstance(piece, str):
        (answer.reasoning if "reasoning" in kind else answer.content).append(piece)
    return True


def anthropic(value: Value, out: Assembly) -> bool:
    """Anthropic's messages: the body and the events of its stream."""
    kind = value.get("type")
    if kind == "message" and isinstance(value.get("content"), list):
        answer = out.answer("message", value.get("id"))
        _speech(value, answer)
        finish(answer, value.get("stop_reason"))
        return True
    if not isinstance(kind, str) or kind not in _ANTHROPIC_EVENTS:
        return False
    if kind == "message_start":
        out.begin()
    answer = out.answer("message", out.turn)
    piece, block = value.get("delta"), value.get("content_block")
    if kind == "content_block_start" and isinstance(block, Mapping):
        if str(block.get("type")).endswith("tool_use"):
            answer.call(value.get("index"), block.get("name"), block.get("input") or None)
        else:
            _speech({"content": [block]}, answer)
    elif isinstance(piece, Mapping):
        answer.content.append(_string(piece.get("text")))
        answer.reasoning.append(_string(piece.get("thinking")))
        if "partial_json" in piece:
            answer.call(value.get("index"), None, piece["partial_json"])
        finish(answer, piece.get("stop_reason"))
    out.open -= kind == "message_stop"
    return True


_ANTHROPIC_EVENTS = {
    "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
    "message_stop", "ping"
}  # fmt: skip


def ollama(value: Value, out: Assembly) -> bool:
    """Ollama's chat and generate, whole and streamed."""
    if "done" not in value or not _has(value, ("message", "response")):
        return False
    answer = out.in_turn(value.get("model"))
    message = value.get("message", {"content": value.get("response"), "thinking": value.get("thinking")})
    _speech(message if isinstance(message, Mapping) else {}, answer)
    finish(answer, value["done"] and (value.get("done_reason") or "stop"))
    return True


def tgi(value: Value, out: Assembly) -> bool:
    """Text Generation Inference and transformers' pipelines. The last event of a stream holds the whole text."""
    whole, token, details = value.get("generated_text"), value.get("token"), value.get("details") or {}
    if isinstance(whole, list):  # a pipeline that was given a conversation
        return all(message(said, out) for said in whole if _has(said))
    if isinstance(whole, str):
        out.answers.pop(("tokens", str(out.turn)), None)
        if out.overlapping:  # the last event of each stream tells all of it
            for key in [key for key in out.answers if key[0] == "tokens"]:
                del out.answers[key]
            out.overlapping = False
        for best in [{"generated_text": whole, **details}, *(details.get("best_of_sequences") or ())]:
            answer = out.answer("text", len(out.answers) + 1)
            answer.content.append(_string(best.get("generated_text")))
            finish(answer, best.get("finish_reason"))
            answer.whole = True
        return True
    if not _has(token, ("text",)):
        return False
    _count_token(value.get("index"), out)
    out.answer("tokens", out.turn).content.append("" if token.get("special") else _string(token["text"]))
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
    if not isinstance(about, Mapping) or not isinstance(text, str):
        return False
    answer = out.answer("text", about.get("id") or value.get("index", len(out.answers) + 1))
    answer.grow(text)
    reason = about.get("finish_reason")
    finish(answer, reason.get("type") if isinstance(reason, Mapping) else reason)
    return True


def gemini(value: Value, out: Assembly) -> bool:
    """Gemini's generateContent."""
    candidates, feedback = value.get("candidates"), value.get("promptFeedback")
    if candidates is None and _has(feedback, ("blockReason",)):
        out.errors.append(f"the prompt was blocked: {feedback['blockReason']}")
        return True
    if not isinstance(candidates, list) or not all(_has(c, ("content", "finishReason")) for c in candidates):
        return False
    for place, candidate in enumerate(candidates):
        answer = out.answer(value.get("responseId"), f"candidate {candidate.get('index', place)}")
        content = candidate.get("content")
        _speech({"content": content.get("parts")} if isinstance(content, Mapping) else {}, answer)
        finish(answer, candidate.get("finishReason"))
    return True


def message(value: Value, out: Assembly) -> bool:
    """A message by itself, or a conversation of which the assistant's messages are the answers."""
    inner = value.get("messages") or value.get("conversations")
    if isinstance(value.get("kwargs"), Mapping):
        value = value["kwargs"]  # LangChain's
    if "role" not in value and _has(value, ("from",)):
        value = {
            "role": {"gpt": "assistant", "model": "assistant"}.get(str(value["from"]), "user"),
            "content": value.get("value"),
        }
    elif value.get("type") == "ai" and "role" not in value:
        value = {"role": "assistant", **value}
    if isinstance(inner, list) and inner and all(_has(m, ("role", "from")) for m in inner):
        return all(message(m, out) for m in inner)
    speech = value["message"] if isinstance(value.get("message"), Mapping) else value
    if not isinstance(speech.get("role"), str) or not _has(speech, ("content", "tool_calls")):
        return False
    if speech["role"] in ("assistant", "model"):
        answer = out.answer("message", len(out.answers) + 1)
        _speech(speech, answer)
        finish(answer, value.get("finish_reason") or value.get("stopReason"))
    return True


def cohere(value: Value, out: Assembly) -> bool:
    """The events of Cohere's stream, of both versions."""
    kind, piece = value.get("type"), value.get("delta")
    if value.get("event_type") in ("stream-start", "text-generation", "stream-end"):
        answer = out.in_turn("message")
        if value["event_type"] == "text-generation":
            answer.content.append(_string(value.get("text")))
        finish(answer, value.get("finish_reason"))
        return True
    if (
        not isinstance(kind, str)
        or kind not in _COHERE_EVENTS
        or ("delta" not in value and not kind.endswith("-end"))
    ):
        return False
    answer = out.in_turn("message")
    if isinstance(piece, Mapping):
        content = (piece.get("message") or {}).get("content")
        if _has(content):
            (answer.reasoning if content.get("thinking") else answer.content).append(
                _string(content.get("thinking") or content)
            )
        finish(answer, piece.get("finish_reason"))
    return True


_COHERE_EVENTS = {
    "message-start", "content-start", "content-delta", "content-end", "message-end", "tool-plan-delta", "tool-call-start",
    "tool-call-delta", "tool-call-end", "citation-start", "citation-end"
}  # fmt: skip


def plain(value: Value, out: Assembly) -> bool:
    """APIs with one text under a key of their own: Triton, Bedrock, the older ones of Anthropic and Cohere, LMDeploy."""
    key = next(
        (k for k, beside in _PLAIN.items() if isinstance(value.get(k), str) and _has(value, beside)), None
    )
    if key is None:
        return False
    reasons = [value[name] for name in _REASON_KEYS if name in value]
    answer = out.in_turn("text") if reasons else out.answer("text")
    answer.content.append(value[key])
    finish(answer, reasons[0] if reasons else "stop")
    return True


_PLAIN = {
    "text_output": ("model_name", "model_version"), "generation": ("generation_token_count", "prompt_token_count"),
    "completion": ("stop_reason", "log_id"), "text": ("generation_id", "history_tokens", "finish_reason"),
    "token": ("finish_reason",), "response": ("p", "usage"), "result": ("is_truncated", "need_clear_history")
}  # fmt: skip
"""The key of the text, and keys of which one stands beside it."""
_REASON_KEYS = ("finish_reason", "stop_reason", "completionReason")


def results(value: Value, out: Assembly) -> bool:
    """Lists of texts: KoboldCpp, Bedrock, KServe, Vertex, Replicate."""
    name = next((k for k in ("results", "outputs", "predictions", "output") if value.get(k)), None)
    items = value.get(name) if name else None
    if value.get("status") == "succeeded" and value.get("output", "") in (None, []):
        items = [""]
    if not isinstance(items, list) or set(value) - {name} - _RESULT_KEYS:
        return False
    if all(isinstance(item, str) for item in items):
        if len(value) == 1:
            return False  # any list
        items = ["".join(items)] if name == "output" else items
    if not all(
        isinstance(item, str) or (_has(item, _RESULT_TEXTS) and set(item) <= _RESULT_KEYS) for item in items
    ):
        return False
    for number, item in enumerate(items):
        answer = (
            out.answer("result", number + 1) if len(items) > 1 else out.answer("result", len(out.answers))
        )
        text = item if isinstance(item, str) else next(item[k] for k in _RESULT_TEXTS if k in item)
        answer.content.append(_string(text))
        reasons = [] if isinstance(item, str) else [item[k] for k in _REASON_KEYS if item.get(k)]
        finish(answer, reasons[0] if reasons else "stop")
    return True


_RESULT_TEXTS = ("text", "outputText", "generated_text", "content", "data")
_RESULT_KEYS = {
    *_RESULT_TEXTS, *_REASON_KEYS, "logprobs", "prompt_tokens", "completion_tokens", "tokenCount", "inputTextTokenCount",
    "name", "datatype", "shape", "parameters", "citationMetadata", "safetyAttributes", "metadata", "id", "model", "version",
    "model_name", "model_version", "deployedModelId", "modelDisplayName", "modelVersionId", "status", "error", "metrics",
    "logs", "urls", "input", "model_id", "generated_token_count", "input_token_count", "system", "created_at", "started_at", "completed_at", "data_removed", "stream", "webhook"
}  # fmt: skip


def archive(value: Value, out: Assembly) -> bool:
    """A HAR file of a browser: the bodies of its requests."""
    entries = (value.get("log") or {}).get("entries") if isinstance(value.get("log"), Mapping) else None
    if not isinstance(entries, list):
        return False
    for entry in entries:
        content = ((entry.get("response") or {}).get("content") or {}) if isinstance(entry, Mapping) else {}
        parsed = json_values(str(content.get("text") or "").strip())
        for inner in parsed.values if parsed else ():
            _ = _has(inner) and _read(inner, out)
    return bool(out.answers or out.errors)


def wrapped(value: Value, out: Assembly) -> bool:
    """A line of a batch or of a log of requests, with the body inside."""
    inner = next((value[k] for k in ("response", "body", "result", "output") if _has(value.get(k))), None)
    seen = set(out.answers)
    if inner is not None and value.get("success") is True and isinstance(inner.get("response"), str):
        inner = {"usage": None, **inner}  # Cloudflare's
    if inner is None or not _read(inner, out):
        return False
    for key in [key for key in out.answers if key not in seen]:
        answer = out.answers.pop(key)
        answer.name = f"{value.get('custom_id') or value.get('id') or ''} {answer.name}".strip()
        out.answers[str(len(out.answers)), *key] = answer
    return True


def error(value: Value, out: Assembly) -> bool:
    """A server's error, as a body or in the middle of a stream."""
    said = (
        value.get("error") or value.get("detail") or (value.get("object") == "error" and value.get("message"))
    )
    if not said or not set(value) <= _ERROR_KEYS:
        return False
    text = said.get("message") if isinstance(said, Mapping) else said
    out.errors.append(text if isinstance(text, str) else json.dumps(said, ensure_ascii=False))
    return True


_ERROR_KEYS = {
    "error", "error_type", "errors", "detail", "message", "object", "type", "param", "code", "status", "status_code", "id",
    "request_id", "custom_id", "timestamp", "path", "success", "sequence_number", "event_id", "response", "model", "created"
}  # fmt: skip

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
    "plain": plain,
    "results": results,
    "message": message,
    "batch": wrapped,
    "archive": archive,
}
"""By name, in the order in which they are asked."""

_SIGNS = re.compile(
    r'"(choices|finish_reason|stop_reason|done_reason|eval_count|meta_info|tokens_predicted|usageMetadata|candidates|usage'
    r'|system_fingerprint|completion_tokens|prompt_tokens|output_tokens|generated_text|output_ids|logprobs)"\s*:'
    r'|"object"\s*:\s*"(chat\.completion|text_completion|response|list|model|embedding)'
)
_PLAIN_ERROR = re.compile(
    r"(?:<(?:html|!doctype).{0,400}?<title>\s*[45]\d\d\b.*|(?:\d{3} )?(?:Internal Server Error|Bad Gateway|Service Unavailable"
    r"|Gateway Time-?out|Not Found|page not found|Unauthorized|Forbidden|Too Many Requests|Method Not Allowed"
    r"|no healthy upstream|upstream (?:connect error|request timeout)[^\n]*)\.?|curl: \(\d+\) [^\n]*"
    r"|Error: (?:model \S+ not found|llama runner|connect E|could not connect|POST predict)[^\n]*)\Z",
    re.IGNORECASE | re.DOTALL,
)
_TEXT_KEYS = ("text", "content", "completion", "response", "output", "answer", "token", "delta")


def unpack(text: str) -> Unpacked | None:
    """The answers in the text of a file, or None if it is no envelope but an answer itself."""
    status, body = http_head(text)
    if (len(body) < 20_000 and _PLAIN_ERROR.match(body)) or (status >= 400 and body[:1] not in ("{", "[")):
        title = re.search(r"<title>\s*(.*?)\s*</title>", body, re.IGNORECASE | re.DOTALL)
        said = title[1] if title else body or f"status {status} and no body"
        return Unpacked("http", notes=(_said(said),), reason="error_body")
    for candidate in dict.fromkeys((body, without_noise(body))):
        parsed = json_values(candidate)
        found = None if parsed is None else unpack_values(parsed)
        if found is not None:
            return found
    if (fields := python_fields(body)) is not None:
        return _from_python(fields)
    parsed = json_values(body)
    if parsed and (parsed.stream or len(set(_SIGNS.findall(body[:100_000]))) > 1):
        return Unpacked(
            "unknown", notes=("no API that is known here writes it so",), reason="unknown_envelope"
        )
    return Unpacked("http", [Answer(content=[body], whole=True)]) if status else None


def _from_python(fields: Sequence[Mapping[str, str]]) -> Unpacked:
    """The answers in objects of a client library as Python prints them."""
    answers = []
    for said in fields:
        answer = Answer(content=[said.get("content", "")], reasoning=[said.get("reasoning", "")], whole=True)
        if "arguments" in said:
            answer.call(0, said.get("name"), said["arguments"])
        finish(answer, said.get("reason"))
        answers.append(answer)
    if not answers:
        return Unpacked("python", notes=("the printed object shows no text",), reason="unknown_envelope")
    return Unpacked("python", answers)


def unpack_values(parsed: Parsed) -> Unpacked | None:
    """The answers in JSON values, or None if no reader understands any of them."""
    out = Assembly()
    objects = [v for v in _flat(parsed.values, 2) if _has(v)]
    numbers = [v.get("sequence_number") for v in objects]
    if parsed.stream and all(isinstance(n, int) for n in numbers) and len(set(numbers)) == len(numbers):
        objects = sorted(objects, key=lambda v: int(v["sequence_number"]))
    unknown = [value for value in objects if not _read(value, out)]
    if unknown and not (out.answers or out.errors) and _records(unknown, out, parsed.stream):
        unknown = []
    return _finished(out, parsed, len(objects), len(unknown)) if out.apis or out.errors else None


def _flat(values: Iterable[Any], depth: int) -> list[Any]:
    """Values, with those of lists in their place, `depth` lists deep."""
    return [
        v
        for value in values
        for v in (_flat(value, depth - 1) if depth and isinstance(value, list) else (value,))
    ]


def _finished(out: Assembly, parsed: Parsed, objects: int, unknown: int) -> Unpacked:
    api = max(out.apis, key=lambda name: out.apis[name], default="error")
    notes = [_said(message) for message in out.errors[:3]]
    answers = list(out.answers.values())
    if out.overlapping and out.open <= 0:
        notes.append("two streams are interleaved, and their events carry no id that tells them apart")
        return Unpacked(api, notes=notes, reason="interleaved_streams")
    if out.disorder:
        notes.append("events stand out of order: text follows the end of its answer")
    if unknown:
        notes.append(f"{unknown} of {objects} JSON values are of no form that is known here")
    if parsed.lost:
        notes.append(f"{parsed.lost} {'events' if parsed.stream else 'pieces'} are no whole JSON")
    open_ended = [answer for answer in answers if not answer.whole]
    streamed = api != "records" and (parsed.stream or objects > len(answers)) and not parsed.ended
    cut = bool(open_ended) and (streamed or parsed.breaks_off or out.open > 0)
    if cut:
        notes.append("it breaks off before its end")
    partial = bool(cut or unknown or parsed.lost or out.errors or out.disorder)
    if all(answer.blank for answer in answers) and (out.errors or (cut and answers)):
        return Unpacked(api, notes=notes, reason="error_body" if out.errors else "stream_cut")
    if not answers and api == "message":
        return Unpacked(api, notes=("it holds no message of the assistant",), reason="no_answer")
    return Unpacked(api, [a for a in answers if not (a.blank and out.errors)], notes, partial)


def _read(value: Value, out: Assembly) -> bool:
    """Offer a value to all readers."""
    name = next((name for name, reader in READERS.items() if reader(value, out)), None)
    if name and name != "error":
        out.apis[name] = out.apis.get(name, 0) + 1
    return name is not None


def _records(values: Sequence[Value], out: Assembly, stream: bool) -> bool:
    """Records, or events of a stream, that keep their text under one well-known key."""
    if all(set(v) == {"text"} and isinstance(v["text"], list) for v in values):
        stream = stream or len(values) > 1
        values = [{"text": text} for v in values for text in v["text"]]  # vLLM's demonstration server
    elif len(values) == 1 and not stream:
        return False
    named = next((k for k in ("type", "event") if all(isinstance(v.get(k), str) for v in values)), None)
    if named:  # events, of which the most tell the text
        told = [v for v in values if any(isinstance(v.get(k), str) for k in _TEXT_KEYS)]
        stream, values = True, told if len(told) > 1 else values
    key = next((k for k in _TEXT_KEYS if all(isinstance(v.get(k), str) for v in values)), None)
    if key is None:
        return False
    for number, value in enumerate(values):
        out.answer("text" if stream else f"record {number + 1}").grow(value[key])
    out.apis["records"] = len(values)
    return True


def _speech(message: Value, answer: Answer) -> None:
    """Add what a message, or a piece of one, says: content, refusal, reasoning and tool calls."""
    content = message.get("content")
    for place, part in enumerate(content if isinstance(content, list) else (content,)):
        _part(place, part, answer)
    answer.content.append(_string(message.get("refusal")))
    names = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
    answer.reasoning.append(next((text for n in names if (text := _string(message.get(n)))), ""))
    calls, old = message.get("tool_calls"), message.get("function_call")
    for place, call in enumerate(calls if isinstance(calls, list) else [old]):
        if _has(call):
            inner = call["function"] if _has(call.get("function")) else call
            answer.call(call.get("index", place), inner.get("name"), inner.get("arguments"))


def _part(place: int, part: Any, answer: Answer) -> None:
    """Add one part of a message's content, of any API."""
    if not isinstance(part, Mapping):
        answer.content.append(_string(part))
        return
    kind = str(part.get("type") or "")
    tool = part if kind.endswith("tool_use") else part.get("functionCall") or part.get("toolUse")
    thinks = part.get("thinking") or part.get("reasoningContent")
    if isinstance(tool, Mapping):
        answer.call(place, tool.get("name"), tool.get("input", tool.get("args")))
    elif thinks or part.get("thought") or "reasoning" in kind:
        answer.reasoning.append(_string(thinks or part))
    else:
        answer.content.append(_string(part))


def _string(part: Any) -> str:
    """The text of a part, wherever it keeps it."""
    if isinstance(part, list):
        return "".join(map(_string, part))
    if isinstance(part, Mapping):
        return _string(
            next(
                (
                    part[n]
                    for n in ("text", "refusal", "reasoningText", "transcript", "summary")
                    if part.get(n)
                ),
                "",
            )
        )
    return part if isinstance(part, str) else ""


def _has(value: Any, keys: Iterable[str] = ()) -> TypeGuard[Value]:
    """Whether a value is an object, and holds one of `keys` where any are given."""
    return isinstance(value, Mapping) and (not keys or any(key in value for key in keys))


def _said(message: str) -> str:
    return f"the server says: {' '.join(message.split())[:300]}"
