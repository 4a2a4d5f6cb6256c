"""Servers that write a dialect of their own: Ollama, TGI, llama.cpp, SGLang,
text-generation-webui.
"""

from __future__ import annotations

from typing import Any

from assay.coherence.answers import Assembly, Value, finish, has, speech, string
from assay.coherence.api_formats.messages import message


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
    count_token(value.get("index"), out)
    out.answer("tokens", out.turn).content.append(
        "" if token.get("special") else string(token["text"])
    )
    return True


def count_token(number: Any, out: Assembly) -> None:
    """Tokens are numbered from 0 or 1 on: a number that does not follow belongs to
    another stream.
    """
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


def webui(value: Value, out: Assembly) -> bool:
    """text-generation-webui: the history of a chat as its API and its log files write it, and its
    streams.
    """
    event, listed = value.get("event"), value.get("results")
    if event == "text_stream" and "history" not in value and isinstance(value.get("text"), str):
        count_token(value.get("message_num"), out)
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
