from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.engines import ToolCall, call_remains, read_calls

NAMES = ("get_weather", "book_table")
PLAIN = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
TWO = (
    '[{"name": "get_weather", "arguments": {}}, {"name": "book_table", "parameters": {"seats": 2}}]'
)


@pytest.mark.parametrize(
    ("text", "called", "rest", "marked"),
    [
        (f"<tool_call>\n{PLAIN}\n</tool_call>", ["get_weather"], "", True),
        (f"Let me look.\n<tool_call>{PLAIN}</tool_call>", ["get_weather"], "Let me look.", True),
        (
            f"<tool_call>{PLAIN}</tool_call>\n<tool_call>{PLAIN}</tool_call>",
            ["get_weather"] * 2,
            "",
            True,
        ),
        (f"[TOOL_CALLS] {TWO}", ["get_weather", "book_table"], "", True),
        (f"<|python_tag|>{PLAIN}<|eom_id|>", ["get_weather"], "", True),
        (PLAIN, ["get_weather"], "", False),
        (f"  {PLAIN}\n", ["get_weather"], "", False),
        (f"```json\n{PLAIN}\n```", ["get_weather"], "", False),
        (f"{PLAIN}\n{PLAIN}", ["get_weather"] * 2, "", False),
        (TWO, ["get_weather", "book_table"], "", False),
        (
            json.dumps({"function": {"name": "book_table", "arguments": "{}"}}),
            ["book_table"],
            "",
            False,
        ),
    ],
)
def test_whole_calls_are_read(text: str, called: list[str], rest: str, marked: bool) -> None:
    read = read_calls(text, NAMES)
    assert ([c.name for c in read.calls], read.rest, read.marked) == (called, rest, marked)
    assert all(isinstance(json.loads(c.arguments), dict) for c in read.calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is sunny in Oslo.",
        '{"name": "other_tool", "arguments": {}}',
        '{"city": "Oslo"}',
        f"Here is the call: {PLAIN}",
        PLAIN[:-1],
        "[" * 100_000,
        "<tool_call></tool_call>",
        "[1, 2]",
    ],
)
def test_what_is_no_whole_call_stays_text(text: str) -> None:
    assert read_calls(text, NAMES).calls == ()
    assert read_calls(text, NAMES).rest == text


def test_plain_json_is_read_only_where_it_is_wanted() -> None:
    assert read_calls(PLAIN, NAMES, plain=False).calls == ()
    assert read_calls(f"<tool_call>{PLAIN}</tool_call>", NAMES, plain=False).calls


@pytest.mark.parametrize(
    "text",
    [
        '< "arguments": {"city": "Lima"}}]',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lima"}}',
        f"<tool_call>{PLAIN}</tool_call>",
        '{"name": "get_weather", "arguments": {"city": "Lima"',
        '{"name": "get_weather", "argu argu": {"city"}}',
        "<tool_ca</tool_call>",
        '"parameters": {"city": "Lima"}}',
        '[get_weather(city="Lima")]',
        'get_weather(city="Lima")',
        (
            '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city":'
            ' "Lima"}<|tool_call_end|>'
        ),
        (
            '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":'
            ' "Lima"}<|call|>'
        ),
        "<function=get_weather><parameter=city>Lima</parameter></function>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather",
        '<invoke name="get_weather"><parameter name="city">Lima</parameter></invoke>',
    ],
)
def test_parts_of_a_call_are_shown(text: str) -> None:
    remains = call_remains(f"One moment.\n{text}" if text[0] not in "[g" else text, NAMES)
    assert remains and remains in f"One moment.\n{text}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It is 18 degrees and cloudy in Oslo.",
        PLAIN,
        f"```json\n{PLAIN}\n```",
        "I cannot call a tool, but Oslo is usually cold in March (about 3 °C).",
        "The tool `get_weather` takes `arguments: {...}` and `<tool_call>` marks a call.",
        "```python\nweather = client.fetch('Oslo')\n```",
        'The answer is {"city": "Oslo", "temperature": 18}.',
        '{"name": "Oslo", "population": 700000}',
        (
            '{"type": "function", "function": {"name": "get_weather", "description": "Weather", '
            '"parameters": {"type": "object", "properties": {}}}}'
        ),
        "Use arguments and parameters with care; a function call (such as f(x)) needs both.",
    ],
)
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert call_remains(text, NAMES) == ""


@given(st.text(max_size=300))
def test_any_text_is_taken(text: str) -> None:
    read = read_calls(text, NAMES)
    assert read.calls or read.rest == text
    assert call_remains(text, NAMES) in text


@given(
    st.dictionaries(
        st.text(max_size=8), st.text(max_size=20) | st.integers() | st.booleans(), max_size=4
    )
)
def test_arguments_come_back_as_they_were_written(arguments: dict[str, object]) -> None:
    text = json.dumps({"name": "book_table", "arguments": arguments})
    (call,) = read_calls(f"<tool_call>\n{text}\n</tool_call>", NAMES).calls
    assert json.loads(call.arguments) == arguments
    assert call == ToolCall("book_table", call.arguments, "call_0")


@pytest.mark.engine
def test_a_model_in_this_process_takes_tools_where_its_template_does(
    smollm2: Path, qwen05: Path
) -> None:
    from assay.engines import Capability, Message, Request
    from assay.engines.hf.engine import HfEngine

    tool = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object"}},
    }
    call = ToolCall("get_weather", '{"city": "Oslo"}', "call_0")
    turns = (
        Message("user", "What is the weather in Oslo?"),
        Message("assistant", None, tool_calls=(call,)),
        Message("tool", '{"sky": "clear"}', tool_call_id="call_0", name="get_weather"),
    )
    with HfEngine.load(f"hf:{smollm2}") as engine:
        assert engine.capabilities.reason(Capability.TOOLS) == "the chat template takes no tools"
    with HfEngine.load(f"hf:{qwen05}") as engine:
        assert Capability.TOOLS in engine.capabilities
        reply = engine.generate(Request(messages=turns, tools=(tool,), max_tokens=4))
        bare = engine.generate(Request(messages=turns[:1], max_tokens=4))
    assert (reply.prompt_tokens or 0) > 2 * (bare.prompt_tokens or 0)
