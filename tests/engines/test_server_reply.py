from typing import Any

import pytest

from assay.engines import Reply, TextPiece, ToolCall
from assay.engines.server.errors import NotJson, StreamCut, StreamFailed
from assay.engines.server.stream_reply import StreamAssembler
from assay.engines.server.whole_reply import whole_reply


def delta(
    at: float, finish: str | None = None, usage: int | None = None, **part: Any
) -> tuple[dict[str, Any], float]:
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": part, "finish_reason": finish}]}
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 3, "completion_tokens": usage}
    return chunk, at


def assemble(*chunks: tuple[dict[str, Any], float]) -> Reply:
    assembler = StreamAssembler("stub", started=10.0)
    for chunk, at in chunks:
        assembler.feed(chunk, at)
    return assembler.reply(finished=99.0)


def call(index: int, **fields: Any) -> dict[str, Any]:
    function = {k: fields.pop(k) for k in ("name", "arguments") if k in fields}
    return {"index": index, "function": function, **fields}


def test_tool_calls_are_put_together_by_index() -> None:
    reply = assemble(
        delta(11, tool_calls=[call(0, id="a", name="get_weather", arguments="")]),
        delta(12, tool_calls=[call(0, arguments='{"city":')]),
        delta(
            13,
            tool_calls=[
                call(1, id="b", name="get_time", arguments="{"),
                call(0, arguments=' "Oslo"}'),
            ],
        ),
        delta(14, tool_calls=[call(1, arguments="}")], finish="tool_calls"),
    )
    assert reply.tool_calls == (
        ToolCall("get_weather", '{"city": "Oslo"}', "a"),
        ToolCall("get_time", "{}", "b"),
    )
    assert reply.finish_reason == "tool_calls"
    assert reply.content == ""


def test_a_server_may_repeat_the_name_or_send_arguments_as_an_object() -> None:
    reply = assemble(
        delta(11, tool_calls=[call(0, name="f", arguments="{")]),
        delta(12, tool_calls=[call(0, name="f", arguments="}")]),
        delta(
            13,
            tool_calls=[{"function": {"name": "g", "arguments": {"x": 1}}, "index": 1}],
            finish="stop",
        ),
    )
    assert reply.tool_calls == (ToolCall("f", "{}"), ToolCall("g", '{"x": 1}'))


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_apart_from_content(field: str) -> None:
    reply = assemble(
        delta(11, **{field: "let me "}),
        delta(12, **{field: "think"}),
        delta(13, content="42", finish="stop"),
    )
    assert (reply.reasoning, reply.content, reply.reasoning_field) == ("let me think", "42", field)


def test_timing_counts_tokens_of_the_first_chunk_from_running_usage() -> None:
    reply = assemble(
        delta(11.0, role="assistant", content="", usage=0),
        delta(12.0, content="a b c", usage=3),
        delta(13.0, content=" d", usage=4),
        delta(15.0, content="", usage=8, finish="stop"),
        ({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8}}, 16.0),
    )
    timing = reply.timing
    assert timing is not None
    assert (timing.ttft, timing.first_chunk_tokens, timing.first_chunk_source) == (2.0, 3, "usage")
    assert timing.chunk_times == (12.0, 13.0, 15.0)
    assert timing.decode_tokens_per_s(reply.completion_tokens or 0) == pytest.approx(5 / 3)


def test_chunks_of_one_network_read_are_the_first_tokens_together() -> None:
    reply = assemble(
        delta(12.0, content="a", usage=1),
        delta(12.0, content="b", usage=2),
        delta(13.0, content="c", usage=3, finish="length"),
    )
    assert reply.timing is not None
    assert reply.timing.first_chunk_tokens == 2


def test_tokens_without_text_still_have_a_time() -> None:
    """A broken model whose tokens are all special: billed, decoded to nothing."""
    reply = assemble(
        *(delta(10.0 + n, content="", usage=n) for n in range(1, 5)),
        delta(15.0, finish="length", usage=5),
    )
    assert reply.content == ""
    assert reply.timing is not None
    assert reply.timing.decode_tokens_per_s(5) == pytest.approx(1.0)


def test_without_usage_the_first_chunk_is_taken_for_one_token_and_says_so() -> None:
    reply = assemble(delta(12.0, content="a"), delta(13.0, content="b"), delta(14.0, finish="stop"))
    assert reply.completion_tokens is None
    assert reply.timing is not None
    assert (reply.timing.first_chunk_tokens, reply.timing.first_chunk_source) == (1, "assumed")
    # The end-of-text token is one more arrival.
    assert reply.timing.last_token == 14.0


def test_an_empty_stream_has_no_timing() -> None:
    reply = assemble(delta(12.0, role="assistant", content=""), delta(13.0, finish="stop"))
    assert reply.timing is None


def test_completions_carry_text_and_other_choices_are_left_alone() -> None:
    assembler = StreamAssembler("stub", started=0.0)
    assembler.feed({"choices": [{"index": 1, "text": "other"}]}, 1.0)
    assembler.feed({"choices": [{"index": 0, "text": "mine", "finish_reason": "length"}]}, 1.0)
    reply = assembler.reply(2.0)
    assert (reply.content, reply.finish_reason) == ("mine", "length")


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}},
        {"error": "EngineCore died"},
        {"object": "error", "message": "EngineCore died"},
    ],
)
def test_an_error_inside_the_stream_is_told_with_what_came_before(error: dict[str, Any]) -> None:
    assembler = StreamAssembler("stub", started=0.0)
    assembler.feed(*delta(1.0, content="so far"))
    with pytest.raises(StreamFailed, match="EngineCore died") as caught:
        assembler.feed(error, 2.0)
    assert caught.value.partial_text == "so far"


def test_a_stream_that_only_stops_is_cut() -> None:
    with pytest.raises(StreamCut) as caught:
        assemble(delta(11, content="half a sen"))
    assert caught.value.partial_text == "half a sen"


def test_the_end_mark_without_a_finish_reason_is_an_end() -> None:
    assembler = StreamAssembler("stub", started=0.0)
    assembler.feed(*delta(1.0, content="x"))
    assembler.is_done = True
    assert assembler.reply(2.0).finish_reason is None


def test_the_listener_hears_every_piece_and_its_field() -> None:
    heard: list[TextPiece] = []
    assembler = StreamAssembler("stub", 0.0, heard.append)
    assembler.feed(*delta(1.0, reasoning="hm"))
    assembler.feed(*delta(2.0, content="yes"))
    assembler.feed(*delta(3.0, tool_calls=[call(0, name="f", arguments="{}")]))
    assert heard == [
        TextPiece("reasoning", "hm"),
        TextPiece("content", "yes"),
        TextPiece("tool_call", "f{}"),
    ]


def test_whole_answers_of_both_routes() -> None:
    chat = whole_reply(
        {
            "choices": [
                {
                    "message": {
                        "content": None,
                        "reasoning_content": "hm",
                        "tool_calls": [call(0, name="f", arguments="{}", id="1")],
                    },
                    "finish_reason": "tool_calls",
                }
            ],
            "usage": {"prompt_tokens": 4, "completion_tokens": 5},
        },
        "stub",
    )
    assert (chat.content, chat.reasoning, chat.reasoning_field) == ("", "hm", "reasoning_content")
    assert chat.tool_calls == (ToolCall("f", "{}", "1"),)
    assert (chat.prompt_tokens, chat.completion_tokens) == (4, 5)
    plain = whole_reply(
        {
            "choices": [
                {"text": "abc", "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0]}}
            ]
        },
        "stub",
    )
    assert (plain.content, plain.completion_tokens, plain.token_logprobs) == ("abc", None, (-1.0,))


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    assert whole_reply({"choices": [{"message": {"content": parts}}]}, "stub").content == "ab"


@pytest.mark.parametrize(
    "answer", [{}, [], None, {"choices": []}, {"choices": "no"}, {"choices": [None]}, 3]
)
def test_json_that_is_no_completion_is_refused(answer: Any) -> None:
    with pytest.raises(NotJson):
        whole_reply(answer, "stub")
