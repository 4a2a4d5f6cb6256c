"""Every API's body and stream is unpacked; what breaks is said, what is not understood is
never ok.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.cli.main import invoke
from assay.coherence.api_formats.registry import FORMATS
from assay.coherence.grade_files import grade_file
from assay.coherence.unpacking import unpack

GOOD = "The mill by the river grinds rye until noon, and then the miller sleeps."
FLOOD = "Well" + "!" * 90
WORDS = [w + " " for w in GOOD.split()]


def sse(*events: Any, done: bool = True) -> str:
    return "".join(f"data: {json.dumps(e)}\n\n" for e in events) + (
        "data: [DONE]\n\n" if done else ""
    )


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def parts(*pairs: tuple[str, Any]) -> str:
    """The AI SDK's data stream."""
    return "".join(f"{code}:{json.dumps(value)}\n" for code, value in pairs)


def chunk(
    delta: dict[str, Any], finish: str | None = None, index: int = 0, id: str = "a"
) -> dict[str, Any]:
    return {
        "id": id,
        "object": "chat.completion.chunk",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish}],
    }


def chat_stream(
    text: str, field: str = "content", finish: str = "stop", id: str = "a"
) -> list[dict[str, Any]]:
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    return [
        chunk({"role": "assistant"}, id=id),
        *(chunk({field: p}, id=id) for p in pieces),
        chunk({}, finish, id=id),
    ]


def anthropic_stream(text: str) -> str:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m", "type": "message", "content": []}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": ""},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "thinking_delta", "thinking": "Hm."},
        },
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *(
            {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": c}}
            for c in text
        ),
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn"},
            "usage": {"output_tokens": 9},
        },
        {"type": "message_stop"},
    ]
    return "".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events)


def responses_stream(text: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "response.created",
            "response": {"id": "r", "status": "in_progress", "output": []},
        },
        {
            "type": "response.output_item.added",
            "item": {"id": "i", "type": "message", "content": []},
        },
        *({"type": "response.output_text.delta", "item_id": "i", "delta": c} for c in text),
    ]


# fmt: off
def forms(text: str) -> dict[str, tuple[str, str]]:
    """The same answer as each API writes it: name, reader, file."""
    body = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    whole = {"id": "r", "object": "response", "status": "completed",
             "output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}]}
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    hm = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    pieces = {"content": [hm, {"type": "text", "text": text}]}
    said = {"role": "assistant", "content": text}
    asked = {"role": "user", "content": "Hi" + "!" * 99}
    tokens = [{"index": i, "token": {"text": c, "special": False}, "generated_text": None} for i, c in enumerate(text)]  # noqa: E501
    slot = {"id_slot": 0, "index": 0}
    about = {"id": "x", "finish_reason": None}
    stopped = {"id": "x", "finish_reason": {"type": "stop"}}
    thought = {"role": "model", "parts": [{"text": "Hm.", "thought": True}, {"text": text}]}
    prediction = {"id": "p1", "model": "a/b", "version": "5c", "input": {"prompt": "Hi" + "!" * 99}, "status": "succeeded", "error": None, "logs": "", "urls": {}, "metrics": {"predict_time": 1.2}}  # noqa: E501
    sample = {"doc_id": 0, "doc": {"question": "How many?"}, "target": "7", "arguments": {"gen_args_0": {"arg_0": "How" + "!" * 99, "arg_1": {"until": ["\n"]}}}}  # noqa: E501
    return {
        "chat": ("openai", json.dumps({"id": "a", "choices": [body], "usage": {}})),
        "chat, indented": ("openai", json.dumps({"id": "a", "choices": [body]}, indent=2)),
        "chat with headers": ("openai", head + json.dumps({"choices": [body]})),
        "completion": ("openai", json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]})),  # noqa: E501
        "chat stream": ("openai", sse(*chat_stream(text))),
        "chat stream without blank lines": ("openai", sse(*chat_stream(text)).replace("\n\n", "\n")),  # noqa: E501
        "chat stream with comments": ("openai", ": PROCESSING\n\n" + sse(*chat_stream(text))),
        "content parts": ("openai", json.dumps({"choices": [{"message": pieces}]})),
        "responses": ("openai responses", json.dumps(whole)),
        "responses stream": ("openai responses", sse(*responses_stream(text), {"type": "response.completed", "response": whole})),  # noqa: E501
        "anthropic": ("anthropic", json.dumps({"id": "m", "type": "message", **said, "content": [{"type": "text", "text": text}], "stop_reason": "end_turn"})),  # noqa: E501
        "anthropic stream": ("anthropic", anthropic_stream(text)),
        "ollama chat": ("ollama", json.dumps({"model": "m", "message": said, "done": True})),
        "ollama stream": ("ollama", lines(*({"model": "m", "response": c, "done": False} for c in text), {"model": "m", "response": "", "done": True, "done_reason": "stop"})),  # noqa: E501
        "tgi": ("tgi", json.dumps({"generated_text": text, "details": {"finish_reason": "eos_token"}})),  # noqa: E501
        "tgi list": ("tgi", json.dumps([{"generated_text": text}])),
        "tgi stream": ("tgi", sse(*tokens, {"token": {"text": "</s>", "special": True}, "generated_text": text}, done=False)),  # noqa: E501
        "pipeline": ("tgi", json.dumps([{"generated_text": [asked, said]}])),
        "llama.cpp": ("llama.cpp", json.dumps({"content": text, "stop": True, "stop_type": "eos"})),
        "llama.cpp stream": ("llama.cpp", sse(*({"content": c, "stop": False, "index": 0, "id_slot": -1} for c in text), {"content": "", "stop": True, "stop_type": "eos", **slot}, done=False)),  # noqa: E501
        "sglang": ("sglang", json.dumps({"text": text, "meta_info": stopped})),
        "sglang stream": ("sglang", sse(*({"text": text[: i + 1], "meta_info": about} for i in range(len(text))), {"text": text, "meta_info": stopped})),  # noqa: E501
        "gemini": ("gemini", json.dumps({"candidates": [{"content": thought, "finishReason": "STOP"}]})),  # noqa: E501
        "message": ("message", json.dumps(said)),
        "conversation": ("message", json.dumps({"messages": [asked, said]})),
        "batch": ("batch", lines({"id": "b1", "custom_id": "q1", "response": {"status_code": 200, "body": {"choices": [body]}}, "error": None})),  # noqa: E501
        "triton stream": ("plain", sse(*({"model_name": "ensemble", "text_output": c} for c in text or " "), done=False) if text else json.dumps({"model_name": "e", "text_output": ""})),  # noqa: E501
        "bedrock": ("plain", json.dumps({"generation": text, "prompt_token_count": 3, "stop_reason": "stop"})),  # noqa: E501
        "watsonx": ("results", json.dumps({"model_id": "m", "results": [{"generated_text": text, "generated_token_count": 3}]})),  # noqa: E501
        "sharegpt": ("message", json.dumps({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": text}]})),  # noqa: E501
        "kserve": ("results", json.dumps({"model_name": "m", "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [text]}]})),  # noqa: E501
        "koboldcpp": ("results", json.dumps({"results": [{"text": text, "finish_reason": "stop", "prompt_tokens": 3}]})),  # noqa: E501
        "titan": ("results", json.dumps({"inputTextTokenCount": 3, "results": [{"outputText": text, "completionReason": "FINISH"}]})),  # noqa: E501
        "cohere stream": ("cohere", sse({"type": "message-start", "delta": {"message": {"content": []}}}, *({"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": c}}}} for c in text), {"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}, done=False)),  # noqa: E501
        "converse": ("message", json.dumps({"output": {"message": {"role": "assistant", "content": [{"text": text}]}}, "stopReason": "end_turn"})),  # noqa: E501
        "har": ("openai", json.dumps({"log": {"entries": [{"response": {"content": {"text": json.dumps({"choices": [body]})}}}]}})),  # noqa: E501
        "after a command": ("openai", "$ curl localhost/v1/chat/completions \\\n  -d '{\n \"model\": \"m\"\n}'\n" + json.dumps({"choices": [body]})),  # noqa: E501
        "after a meter": ("openai", "  % Total    % Received\n     Dload  Upload   Total\n100   412  100   300  100   112   120 0:00:02 --:--:--  165\n" + json.dumps({"choices": [body]})),  # noqa: E501
        "in a fence": ("openai", "Response:\n```json\n" + json.dumps({"choices": [body]}, indent=2) + "\n```\n"),  # noqa: E501
        "with times": ("openai", "".join(f"[10:00:01.123] data: {json.dumps(e)}\n" for e in chat_stream(text)) + "data: [DONE]\n"),  # noqa: E501
        "printed bytes": ("openai", "".join(f"{f'data: {json.dumps(e)}'.encode()!r}\n" for e in chat_stream(text)) + "b'data: [DONE]'\n"),  # noqa: E501
        "printed dict": ("openai", repr({"id": "a", "choices": [{**body, "logprobs": None}]})),
        "printed object": ("python", f"ChatCompletion(id='a', choices=[Choice(finish_reason='stop', message=ChatCompletionMessage(content={text!r}, role='assistant'))])"),  # noqa: E501
        "printed output": ("python", f"RequestOutput(prompt='Hi' , outputs=[CompletionOutput(index=0, text={text!r}, finish_reason=stop)])"),  # noqa: E501
        "vllm demo": ("records", json.dumps({"text": [text]})),
        "records": ("records", lines({"id": 1, "completion": text}, {"id": 2, "completion": GOOD})),
        "ai sdk data stream": ("ai sdk", parts(("f", {"messageId": "m"}), ("g", "Hm."), *(("0", c) for c in text), ("e", {"finishReason": "stop", "usage": {}, "isContinued": False}), ("d", {"finishReason": "stop"}))),  # noqa: E501
        "ai sdk, older": ("ai sdk", parts(*(("0", c) for c in text), ("2", [{"n": 1}]), ("d", {"finishReason": "stop", "usage": {"completionTokens": 9}}))),  # noqa: E501
        "ai sdk events": ("ai sdk", sse({"type": "start", "messageId": "m"}, {"type": "start-step"}, {"type": "reasoning-start", "id": "r"}, {"type": "reasoning-delta", "id": "r", "delta": "Hm."}, *({"type": "text-delta", "id": "t", "delta": c} for c in text), {"type": "text-end", "id": "t"}, {"type": "finish-step"}, {"type": "finish"})),  # noqa: E501
        "replicate": ("replicate", json.dumps({**prediction, "output": list(text)})),
        "replicate, a string": ("replicate", json.dumps({**prediction, "output": text})),
        "replicate, list": ("replicate", json.dumps({**prediction, "output": None} if not text else {"previous": None, "next": None, "results": [{**prediction, "output": [text]}]})),  # noqa: E501
        "cog": ("replicate", json.dumps({"status": "succeeded", "output": text})),
        "predictions": ("results", json.dumps({"predictions": [text]})),
        "output": ("results", json.dumps({"output": text})),
        "replicate stream": ("text events", "".join(f"event: output\nid: {i}:0\ndata: {c}\n\n" for i, c in enumerate(text)) + "event: done\ndata: {}\n"),  # noqa: E501
        "ai sdk result": ("plain", json.dumps({"text": text, "finishReason": "stop", "usage": {}, "steps": []})),  # noqa: E501
        "replicate stream with ids first": ("text events", f"id: 1:0\nevent: output\ndata: {text}\n\nid: 2:0\nevent: done\ndata: {{}}\n"),  # noqa: E501
        "text events": ("text events", ("".join(f"data: {w}\n\n" for w in re.findall(r".\S*|\s", text)) or "data: \n\ndata: \n\n") + "data: [DONE]\n\n"),  # noqa: E501
        "webui": ("results", json.dumps({"results": [{"text": text}]})),
        "webui chat": ("text-generation-webui", json.dumps({"results": [{"history": {"internal": [["Hi", text]], "visible": [["Hi", text]]}}]})),  # noqa: E501
        "webui log": ("text-generation-webui", json.dumps({"internal": [["Hi", text]], "visible": [["Hi", text]]}, indent=4)),  # noqa: E501
        "webui stream": ("text-generation-webui", lines(*({"event": "text_stream", "message_num": i, "text": c} for i, c in enumerate(text)), {"event": "stream_end", "message_num": len(text)})),  # noqa: E501
        "webui chat stream": ("text-generation-webui", lines(*({"event": "text_stream", "message_num": i, "history": {"internal": [["Hi", text[: i + 1]]]}} for i in range(len(text))), {"event": "stream_end", "message_num": len(text)})),  # noqa: E501
        "lm-eval": ("lm-eval", lines({**sample, "resps": [[text]], "filtered_resps": ["7"], "filter": "strict"}, {**sample, "resps": [[text]], "filtered_resps": ["8"], "filter": "loose"})),  # noqa: E501
        "lm-eval, filtered": ("lm-eval", lines({**sample, "filtered_resps": [text]})),
        "plain stream": ("records", sse({"token": ""}, *({"token": c} for c in text))),
    }
# fmt: on


@pytest.mark.parametrize("form", forms(""))
def test_every_form_is_unpacked_and_graded(tmp_path: Path, form: str) -> None:
    for text, label in ((GOOD, "ok"), (FLOOD, "degenerate"), ("", "empty")):
        api, written = forms(text)[form]
        found = unpack(written)
        assert found is not None and (found.api, found.reason, found.partial) == (
            api,
            None,
            False,
        ), found
        assert "".join(found.answers[0].content) == text
        path = tmp_path / "out"
        path.write_text(written)
        result = grade_file(str(path)).grade
        assert result.label == label or (label == "empty" and result.kind == "reasoning_cut")
        if label == "degenerate":
            assert (result.kind, result.onset_char) == ("single_char_flood", 4)


@pytest.mark.parametrize("written", [
    '{"object": "list", "data": [{"id": "m", "object": "model"}]}',
    "curl: (7) Failed to connect to localhost port 8000",
    "HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n",
    '{"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {}}',
    "ChatCompletion(id='a', choices=[])",
    '{"id": "p", "status": "processing", "output": null, "urls": {"get": "https://x"}}',
    '{"id": "p", "status": "failed", "output": null, "error": "CUDA out of memory"}',
    '{"id": "p", "status": "succeeded", "output": [{"image": "a.png"}], "urls": {}}',
    '{"results": []}', '{"predictions": []}', '{"output": null, "model": "m"}',
    '{"doc_id": 3, "target": "1", "resps": [[["-1.5", "False"]], [["-0.5", "True"]]], "filtered_resps": [["-1.5", "False"]]}',  # noqa: E501
    '{"doc_id": 3, "doc": {}, "resps": [], "filtered_resps": []}',
    '{"results": {"gsm8k": {"exact_match": 0.5}}, "configs": {"gsm8k": {}}}',
    parts(("f", {"messageId": "m"})), parts(("3", "the model is overloaded")),
    "data: [DONE]", ": PROCESSING\n\n: PROCESSING\n\ndata: [DONE]\n\n",
    "event: error\ndata: the GPU is gone\n\nevent: done\ndata: {}",
])  # fmt: skip
def test_what_holds_no_answer_is_not_examined(written: str) -> None:
    found = unpack(written)
    assert found is not None and found.reason in (
        "error_body", "unknown_envelope", "no_answer", "stream_cut",
    )  # fmt: skip


@pytest.mark.parametrize("written", [
    "A reply looks like this:\n\n```json\n" + json.dumps({"choices": [{"message": {"content": "Hi"}}]}) + "\n```\n\nThat is all.",  # noqa: E501
    "Events look like this:\n\ndata: {\"a\": 1}\n\ndata: [DONE]\n\nand the client joins them.",
    '{"question": "Which?", "choices": ["a", "b"]}',
    "{'city': 'Oslo', 'country': 'Norway'}",
    '["Nile", "Amazon"]',
    "curl is a tool that moves data:\nit speaks HTTP.",
    '0:"zero"\n1:"one"\n2:"two"', "a:{b}\nc:{d}", '["0:", "d:"]',
    "data: the first\nAnd then it rained.\ndata: the last", '{"results": ["Oslo", "Bergen"]}',
    '{"status": "succeeded", "city": "Oslo"}', '{"results": {"oslo": 3}}',
])  # fmt: skip
def test_an_answer_that_shows_envelopes_is_itself(written: str) -> None:
    assert unpack(written) is None


def test_bodies_under_one_id_are_answers_of_their_own() -> None:
    body = {
        "id": "a",
        "object": "chat.completion",
        "choices": [{"message": {"content": GOOD}, "finish_reason": "stop"}],
    }
    found = unpack(
        lines(body, {**body, "choices": [{"message": {"content": ""}, "finish_reason": "stop"}]})
    )
    assert found is not None and ["".join(a.content) for a in found.answers] == [GOOD, ""]


def test_every_reader_is_tried() -> None:
    assert {api for api, _ in forms("x").values()} | {"error", "archive"} >= set(FORMATS)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_graded_and_told_apart(tmp_path: Path, field: str) -> None:
    path = tmp_path / "out"
    path.write_text(sse(*chat_stream("Wait. " * 60, field, "length")))
    result = grade_file(str(path)).grade
    assert (result.label, result.part) == ("degenerate", "reasoning")


def test_a_refusal_is_the_text_and_tool_calls_are_put_together(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text(
        json.dumps(
            {
                "choices": [
                    {
                        "message": {"content": None, "refusal": "I cannot help with that."},
                        "finish_reason": "stop",
                    }
                ]
            }
        )
    )
    assert grade_file(str(path)).grade.label == "ok"
    pieces = ['{"text": "', *["la la di "] * 80, '"}']
    deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
    start = {
        "tool_calls": [{"index": 0, "id": "c", "function": {"name": "write", "arguments": ""}}]
    }
    path.write_text(sse(chunk(start), *map(chunk, deltas), chunk({}, "tool_calls")))
    result = grade_file(str(path)).grade
    assert (result.label, result.part) == ("degenerate", "tool_calls")
    path.write_text(
        json.dumps(
            {
                "choices": [
                    {
                        "message": {
                            "content": None,
                            "tool_calls": [
                                {"function": {"name": "f", "arguments": '{"city": "Os'}}
                            ],
                        },
                        "finish_reason": "tool_calls",
                    }
                ]
            }
        )
    )
    assert grade_file(str(path)).grade.kind == "malformed_arguments"


ERRORS = {
    "openai": '{"error": {"message": "model overloaded", "type": "server_error", "code": 503}}',
    "ollama": '{"error": "model overloaded"}',
    "vllm": (
        '{"object": "error", "message": "model overloaded", "type": "BadRequestError", "code": 400}'
    ),
    "fastapi": '{"detail": "model overloaded"}',
    "anthropic": (
        '{"type": "error", "error": {"type": "overloaded_error", "message": "model overloaded"}}'
    ),
    "gateway": '{"message": "Service Unavailable: model overloaded"}',
    "problem": '{"type": "about:blank", "title": "model overloaded", "status": 503}',
    "llama": '{"code": 503, "message": "model overloaded", "type": "unavailable_error"}',
    "flag": '{"success": false, "message": "model overloaded"}',
    "fault": '{"fault": {"faultstring": "model overloaded", "detail": {"errorcode": "x"}}}',
    "nginx": "<html>\r\n<head><title>503 model overloaded</title></head>\r\n<body></body></html>",
    "stream": 'data: {"error": {"message": "model overloaded", "code": 500}}\n\n',
    "batch": '{"custom_id": "q", "response": null, "error": {"message": "model overloaded"}}',
}


@pytest.mark.parametrize("body", ERRORS.values(), ids=ERRORS)
def test_an_error_body_is_not_examined_and_its_message_is_quoted(
    tmp_path: Path, capsys, body: str
) -> None:
    path = tmp_path / "out"
    path.write_text(body)
    assert invoke(["grade", str(path), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    (row,), (finding,) = report["results"]["files"], report["findings"]
    assert (row["label"], row["kind"], row["onset_char"]) == ("not_examined", "error_body", None)
    assert finding["id"] == "coherence.not_examined" and "model overloaded" in finding["title"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (
            '{"usage": {"prompt_tokens": 3, "completion_tokens": 8}, "result_ref": "s3"}',
            "unknown_envelope",
        ),
        (
            '{"output_ids": [1, 2], "meta_info": {"finish_reason": {"type": "stop"}}}',
            "unknown_envelope",
        ),
        (sse({"frame": 1}, {"frame": 2}), "unknown_envelope"),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "no_answer"),
        (sse(chunk({"role": "assistant"}), done=False), "stream_cut"),
    ],
)
def test_what_is_not_understood_is_not_examined(
    tmp_path: Path, capsys, body: str, kind: str
) -> None:
    path = tmp_path / "out"
    path.write_text(body)
    assert invoke(["grade", str(path)]) == 3
    assert "not examined" in capsys.readouterr().out
    result = grade_file(str(path)).grade
    assert (result.label, result.kind) == ("not_examined", kind)


@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Oslo", "population": 700000}',
        "[1, 2, 3]",
        '{"a": 1}\n{"a": 2}\n',
        "data:\n  key: value\n  other: 3\n",
        '{"question": "Which?", "choices": ["a", "b"], "answer": "a"}',
        "{not json",
        "",
        "Not all who wander are lost.",
        '{"error_rate": 0.5, "detail_level": 3}',
        "event: the opening of the bridge\ndate: 3 May",
    ],
)
def test_an_answer_that_is_json_itself_is_text(text: str) -> None:
    assert unpack(text) is None


# What is broken: one line each, and what can be read is graded.


def part(path: Path) -> str:
    report = json.loads(_json(path))
    found = [f["title"] for f in report["findings"] if f["id"] == "coherence.not_all_examined"]
    assert len(found) == 1 and "\n" not in found[0]
    return found[0]


def _json(path: Path) -> str:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        invoke(["grade", str(path), "--json"])
    return out.getvalue()


def test_a_stream_that_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    stream = sse(*chat_stream(GOOD))
    path.write_text(stream[: len(stream) // 2])
    assert "breaks off" in part(path) and grade_file(str(path)).grade.label == "ok"
    stream = sse(*chat_stream(FLOOD))
    path.write_text(stream[: 9 * len(stream) // 10])
    assert "breaks off" in part(path) and grade_file(str(path)).grade.label == "degenerate"


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_a_body_that_breaks_off(tmp_path: Path, share: float) -> None:
    path = tmp_path / "out"
    body = json.dumps(
        {
            "choices": [
                {"message": {"content": "A line.\n" + "é!" + "!" * 900}, "finish_reason": "stop"}
            ]
        }
    )
    path.write_text(body[: int(share * len(body))])
    assert "breaks off" in part(path) and grade_file(str(path)).grade.kind == "single_char_flood"


def test_interleaved_streams_are_told_apart_by_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "out"
    one, two = chat_stream(GOOD, id="one"), chat_stream(FLOOD, id="two")
    mixed = (
        [event for pair in zip(one, two, strict=False) for event in pair]
        + one[len(two) :]
        + two[len(one) :]
    )
    path.write_text(sse(*mixed))
    choices = dict(grade_file(str(path)).choices)
    assert [g.label for g in choices.values()] == ["ok", "degenerate"]
    nameless = [{k: v for k, v in event.items() if k != "id"} for event in one]
    path.write_text(sse(*(event for event in nameless for _ in range(2))))
    assert grade_file(str(path)).grade.kind == "interleaved_streams"
    path.write_text(sse(*nameless, *nameless))
    assert [g.label for _, g in grade_file(str(path)).choices] == ["ok", "ok"]
    ollama = [{"model": "q", "response": w, "done": False} for w in WORDS] + [
        {"model": "q", "response": "", "done": True}
    ]
    path.write_text(lines(*(event for event in ollama for _ in range(2))))
    assert grade_file(str(path)).grade.kind == "interleaved_streams"
    path.write_text(lines(*ollama, *ollama))
    assert [g.label for _, g in grade_file(str(path)).choices] == ["ok", "ok"]
    events = anthropic_stream(GOOD).split("\n\n")
    path.write_text("\n\n".join(event for event in events for _ in range(2)))
    assert grade_file(str(path)).grade.kind == "interleaved_streams"


def test_events_out_of_order_and_lines_that_are_no_json(tmp_path: Path) -> None:
    path = tmp_path / "out"
    events = chat_stream(GOOD)
    path.write_text(sse(events[-1], *events[:-1]))
    assert grade_file(str(path)).grade.label == "ok"
    path.write_text(
        sse(*events, done=False).replace('data: {"id"', 'data: {"id', 1)
        + "curl: (18) transfer closed\n"
    )
    assert "no whole JSON" in part(path) and grade_file(str(path)).grade.label == "ok"


def test_an_error_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text(
        sse(*chat_stream(GOOD)[:-3], {"error": {"message": "engine died", "code": 500}})
    )
    assert "engine died" in part(path) and grade_file(str(path)).grade.label == "ok"


def test_nuls_and_broken_bytes_in_a_body(tmp_path: Path) -> None:
    path = tmp_path / "out"
    body = json.dumps(
        {"choices": [{"message": {"content": GOOD + " caf@"}, "finish_reason": "stop"}]}
    ).encode()
    path.write_bytes(bytes(4096) + body + bytes(7))
    assert "4,103 NUL bytes" in part(path) and grade_file(str(path)).grade.label == "ok"
    path.write_bytes(body.replace(b"@", b"\xe9"))
    assert grade_file(str(path)).grade.label == "ok"
    assert [f["id"] for f in json.loads(_json(path))["findings"]] == ["coherence.invalid_utf8"]


def test_a_large_body_is_bounded_and_says_what_was_left_out(tmp_path: Path, monkeypatch) -> None:
    from assay.coherence import decoding, grading

    monkeypatch.setattr(decoding, "MAX_BYTES", 200_000)
    monkeypatch.setattr(grading, "MAX_CHARS", 50_000)
    path = tmp_path / "out"
    path.write_text(
        json.dumps(
            {"choices": [{"message": {"content": " ".join(WORDS) * 9000}, "finish_reason": "stop"}]}
        )
    )
    title = part(path)
    assert "were read" in title and "50,000 of" in title


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "message",
                    "content",
                    "delta",
                    "text",
                    "type",
                    "done",
                    "response",
                    "output",
                    "error",
                    "role",
                    "stop",
                    "meta_info",
                    "generated_text",
                    "details",
                    "candidates",
                    "parts",
                    "tool_calls",
                    "function",
                    "arguments",
                    "id",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=25,
)


@given(st.lists(JSON, min_size=1, max_size=4), st.booleans(), st.integers(0, 400))
@settings(deadline=None, max_examples=300)
def test_any_json_is_taken_without_an_error(values: list[Any], stream: bool, cut: int) -> None:
    written = sse(*values) if stream else lines(*values)
    found = unpack(written[: len(written) - cut] if cut < len(written) else written)
    assert found is None or found.answers or found.reason or found.api


def token(number: int, text: str) -> dict[str, Any]:
    return {"index": number, "token": {"text": text, "special": False}, "generated_text": None}


def test_streams_of_tgi_are_told_apart_by_their_numbers() -> None:
    pairs = [
        t for i, word in enumerate(WORDS) for t in (token(i + 1, word), token(i + 1, word.upper()))
    ]
    cut = unpack(sse(*pairs, done=False))
    assert cut is not None and cut.reason == "interleaved_streams"
    ends = [{**token(9, ""), "generated_text": text} for text in (GOOD, FLOOD)]
    whole = unpack(sse(*pairs, *ends, done=False))
    assert whole is not None and ["".join(a.content) for a in whole.answers] == [GOOD, FLOOD]
    both = unpack(
        sse(*(token(i + 1, w) for _ in range(2) for i, w in enumerate(WORDS)), done=False)
    )
    assert both is not None and both.reason is None and len(both.answers) == 2


def test_streams_of_the_ai_sdk_that_break_off_interleave_or_call_tools(tmp_path: Path) -> None:
    begin, end = ("f", {"messageId": "m"}), ("e", {"finishReason": "stop", "isContinued": False})
    words = [("0", w) for w in WORDS]
    cut = unpack(parts(begin, *words)[:-4])
    assert (
        cut is not None and cut.partial and "".join(cut.answers[0].content).startswith("The mill")
    )
    two = unpack(parts(begin, ("f", {"messageId": "n"}), *words, *words, end, end))
    assert two is not None and two.reason == "interleaved_streams"
    call = ("9", {"toolCallId": "c", "toolName": "weather", "args": {"city": "Oslo"}})
    stop = ("e", {"finishReason": "tool-calls", "isContinued": False})
    steps = unpack(
        parts(
            begin,
            call,
            ("a", {"toolCallId": "c", "result": 4}),
            stop,
            begin,
            *words,
            end,
            ("d", {"finishReason": "stop"}),
        )
    )
    assert steps is not None and not steps.partial
    assert [a.finish_reason for a in steps.answers] == ["tool_calls", "stop"]
    path = tmp_path / "out"
    path.write_text(parts(begin, *words, ("3", "the engine died")))
    assert "engine died" in part(path) and grade_file(str(path)).grade.label == "ok"


def test_a_sample_without_text_is_said_beside_those_that_have_it(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text(
        lines(
            {"doc_id": 1, "doc": {}, "resps": [[GOOD]]},
            {"doc_id": 2, "doc": {}, "resps": [[["-1", "False"]]]},
        )
    )
    assert "1 of 2 JSON values hold no text" in part(path)


def test_events_out_of_order_are_said_or_sorted() -> None:
    events = chat_stream(GOOD)
    found = unpack(sse(events[0], events[-1], *events[1:-1]))
    assert found is not None and found.partial and "out of order" in found.notes[0]
    numbered = [{**e, "sequence_number": i} for i, e in enumerate(responses_stream(GOOD))]
    sorted_ = unpack(sse(*numbered[:2], *reversed(numbered[2:]), done=False))
    assert sorted_ is not None and "".join(sorted_.answers[0].content) == GOOD


def test_the_event_in_which_a_stream_breaks_off_counts(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text(sse(*chat_stream(GOOD)[:-1], chunk({"content": "!" * 300}), done=False)[:-12])
    graded = grade_file(str(path))
    assert graded.grade.kind == "single_char_flood"
    assert graded.unpacked is not None and graded.unpacked.partial


def test_nuls_within_a_body_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "out"
    body = json.dumps({"choices": [{"message": {"content": GOOD}, "finish_reason": "stop"}]})
    path.write_bytes(body.replace("rye", "r\0ye").encode())
    graded = grade_file(str(path))
    assert (graded.grade.label, graded.reading.nul_bytes) == ("ok", 1)
