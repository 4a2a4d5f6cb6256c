from __future__ import annotations

import pytest

from assay.coherence.conversation import GREEDY, Context, to_request
from assay.coherence.filler import filler
from assay.coherence.needle import Needle, needle_lengths
from assay.coherence.options import Plan
from assay.coherence.passages import passages
from assay.coherence.probes import (
    NAMES,
    SecondTurn,
    ToolUse,
    answers_in_spanish,
    code_parses,
    extract_code,
    names_paris,
    says_18_degrees,
    standard_probes,
    story_length,
    valid_json_list,
)
from assay.coherence.speed import timed_requests
from assay.engines import Reply, ToolCall
from assay.errors import UsageError


def reply(content: str = "", **fields: object) -> Reply:
    return Reply(content=content, finish_reason="stop", **fields)  # type: ignore[arg-type]


def test_every_probe_is_registered_under_its_name() -> None:
    probes = standard_probes(
        max_model_len=2048, longest_needle=8192, streams=8, seed=0, count_tokens=None
    )
    assert tuple(p.name for p in probes) == NAMES


def test_an_unknown_probe_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="stroy") as error:
        Plan(only=("stroy",))
    assert "story" in error.value.remedy


def test_paris() -> None:
    assert names_paris(reply("It is PARIS.")).passed
    assert names_paris(reply("", reasoning="Paris, I think.")).passed
    assert not names_paris(reply("London.")).passed


def test_story_length() -> None:
    assert story_length(reply("word " * 300)).passed
    assert not story_length(reply("word " * 20)).passed


def test_code() -> None:
    fenced = "Here:\n```python\ndef fibonacci(n):\n    return n\n```\nIt is fast."
    assert code_parses(reply(fenced)).passed
    assert extract_code(fenced) == "def fibonacci(n):\n    return n\n"
    assert code_parses(reply("def fibonacci(n):\n    return n\n")).passed
    assert not code_parses(reply("```python\ndef fibonacci(n:\n```")).passed
    assert not code_parses(reply("```python\nx = 1\n```")).passed
    assert not code_parses(reply("def f(): " + "(" * 100_000)).passed


def test_json_list() -> None:
    assert valid_json_list(reply('["Rhine", "Danube", "Elbe", "Loire", "Ebro"]')).passed
    assert not valid_json_list(reply('["Rhine"]')).passed
    assert not valid_json_list(reply("Rhine, Danube")).passed
    assert not valid_json_list(reply("[" * 100_000)).passed


def test_spanish() -> None:
    assert answers_in_spanish(
        reply("El agua de los ríos y del mar se evapora por el sol y forma las nubes.")
    ).passed
    assert not answers_in_spanish(
        reply("Water from rivers and the sea evaporates in the sun.")
    ).passed
    assert not answers_in_spanish(reply("")).passed


def test_second_turn_hands_the_first_answer_back() -> None:
    talk = SecondTurn().talk(Context(), "")
    next(talk)
    step = talk.send(reply("Keep him inside."))
    assert [m.role for m in step.messages] == ["user", "assistant", "user"]
    assert step.messages[1].content == "Keep him inside."
    assert SecondTurn().check([reply("x"), reply("Bruno is afraid.")], "")[0].passed


def test_tool_call_hands_the_result_back_only_after_a_call() -> None:
    talk = ToolUse().talk(Context(), "")
    next(talk)
    with pytest.raises(StopIteration):
        talk.send(reply("It is sunny."))
    talk = ToolUse().talk(Context(), "")
    next(talk)
    call = ToolCall("get_weather", '{"city": "Oslo"}', "c1")
    step = talk.send(reply(tool_calls=(call,)))
    assert step.messages[-1].role == "tool" and step.messages[-1].tool_call_id == "c1"
    checks = ToolUse().check([reply(tool_calls=(call,)), reply("It is 18 degrees.")], "")
    assert all(c.passed for c in checks) and len(checks) == 3
    assert not ToolUse().check([reply(tool_calls=(ToolCall("get_weather", "{"),))], "")[1].passed


@pytest.mark.parametrize(
    "text",
    [
        "It is 18 degrees.", "18.0", "18,0 °C und bewölkt", "18.00C", "eighteen degrees", "Eighteen.", "64.4 °F", "64°F today",  # noqa: E501
        "١٨ درجة", "１８度", "18°C.", "18, cloudy", "Il fait dix-huit degrés", "It's 18.", "気温は十八度です",  # noqa: E501
    ],
)  # fmt: skip
def test_any_sane_wording_of_the_temperature_counts(text: str) -> None:
    assert says_18_degrees(text)


@pytest.mark.parametrize(
    "text",
    ["", "180", "2018", "at 18:30", "-18 °C", "it is −18", "18.5", "118", "64 degrees", "1.18", "1,18", "17 °C", "flatten"],  # noqa: E501
)  # fmt: skip
def test_another_number_does_not(text: str) -> None:
    assert not says_18_degrees(text)


def test_a_whole_call_that_was_left_in_the_text_is_the_models_call() -> None:
    text = '```json\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n```'
    checks = {c.name: c.passed for c in ToolUse().check([reply(text)], "")}
    assert checks == {"calls_tool": True, "tool_arguments": True}
    assert not ToolUse().check([reply('< "arguments": {"city": "Oslo"}}]')], "")[0].passed


def test_needle_grid_comes_from_the_context_length() -> None:
    assert needle_lengths(2048) == (465, 930, 1860)
    assert max(needle_lengths(131072)) < 8192
    assert max(needle_lengths(131072, longest=32768)) > 30000
    assert needle_lengths(256) == ()


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_a_needle_lies_at_its_depth_in_a_text_of_its_length(depth: float) -> None:
    count = lambda text: len(text.split())  # noqa: E731
    needle = Needle(lengths=(800,), count_tokens=count)
    variant = f"800@{depth:g}"
    step = next(needle.talk(Context(), variant))
    text = str(step.messages[0].content)
    assert 700 <= count(text) <= 860
    place = text.index("The word that opens the store room") / len(text)
    assert abs(place - depth) < 0.08
    code = text[text.index("The word that opens the store room") :].split(".")[0].split()[-1]
    assert needle.check([reply(f"It is {code}.")], variant)[0].passed
    assert not needle.check([reply("It is unknown.")], variant)[0].passed


def test_fillers_differ_from_the_first_word_on_and_repeat_by_seed() -> None:
    assert filler("a", 200) == filler("a", 200)
    assert filler("a", 200)[:40] != filler("b", 200)[:40]
    assert len(filler("a", 200)) == 800


def test_timed_prompts_are_unique_and_seeded() -> None:
    requests = timed_requests(20, seed=3, chat=True)
    starts = {str(r.messages[0].content)[:12] for r in requests if r.messages}
    assert len(starts) == 20
    assert requests == timed_requests(20, seed=3, chat=True)
    assert requests != timed_requests(20, seed=4, chat=True)


def test_a_model_without_a_template_is_asked_to_continue() -> None:
    probes = standard_probes(
        max_model_len=2048, longest_needle=8192, streams=8, seed=0, count_tokens=None
    )
    step = next(probes[0].talk(Context(chat=False), ""))
    request = to_request(step, GREEDY, Context(chat=False))
    assert request.messages is None and str(request.prompt).endswith("The capital of France is")


def test_the_length_limit_follows_the_token_budget() -> None:
    step = next(SecondTurn().talk(Context(), ""))
    assert to_request(step, GREEDY, Context(token_budget=2.0)).max_tokens == 2 * step.max_tokens
    assert to_request(step, GREEDY, Context(thinking=False)).extra == {
        "chat_template_kwargs": {"enable_thinking": False}
    }


def test_twelve_fixed_texts_are_shipped() -> None:
    texts = passages()
    assert len(texts) == 12 and len(set(texts)) == 12
    assert all(300 < len(t) < 1200 and t == t.strip() for t in texts)
