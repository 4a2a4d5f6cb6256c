"""All API formats by name, in the order in which a value is offered to them.

A format is a function that is offered one JSON value, adds what it understands to the answers of an
`Assembly`, and says whether it understood. A new API is one function in a file of its own and one
entry in `FORMATS`. Formats that hold other bodies (batches, archives) offer these in turn.
"""

from __future__ import annotations

from collections.abc import Callable

from assay.coherence.answers import Assembly, Value, has
from assay.coherence.api_formats.ai_sdk import ai_sdk, text_events
from assay.coherence.api_formats.anthropic import anthropic
from assay.coherence.api_formats.cohere import cohere
from assay.coherence.api_formats.errors import error
from assay.coherence.api_formats.gemini import gemini
from assay.coherence.api_formats.messages import lm_eval, message
from assay.coherence.api_formats.openai import openai
from assay.coherence.api_formats.own_dialects import llama_cpp, ollama, sglang, tgi, webui
from assay.coherence.api_formats.replicate import replicate
from assay.coherence.api_formats.responses import responses
from assay.coherence.api_formats.single_texts import plain, results
from assay.coherence.stream_decoder import json_values


def archive(value: Value, out: Assembly) -> bool:
    """A HAR file of a browser: the bodies of its requests."""
    entries = (value.get("log") or {}).get("entries") if has(value.get("log")) else None
    if not isinstance(entries, list):
        return False
    for entry in entries:
        content = ((entry.get("response") or {}).get("content") or {}) if has(entry) else {}
        parsed = json_values(str(content.get("text") or "").strip())
        for inner in parsed.values if parsed else ():
            _ = has(inner) and offer(inner, out)
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
    if inner is None or not offer(inner, out):
        return False
    for key in [key for key in out.answers if key not in seen]:
        answer = out.answers.pop(key)
        answer.name = f"{value.get('custom_id') or value.get('id') or ''} {answer.name}".strip()
        out.answers[str(len(out.answers)), *key] = answer
    return True


Format = Callable[[Value, Assembly], bool]
FORMATS: dict[str, Format] = {
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


def offer(value: Value, out: Assembly) -> bool:
    """Offer a value to all formats; whether one of them understood it."""
    name = next((name for name, format_ in FORMATS.items() if format_(value, out)), None)
    if name and name != "error":
        out.apis[name] = out.apis.get(name, 0) + 1
    return name is not None
