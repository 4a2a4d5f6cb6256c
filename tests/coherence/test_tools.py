from __future__ import annotations

import json
from typing import Any

import pytest

from assay.coherence.judge import judge
from assay.coherence.options import Plan
from assay.coherence.record import (
    AnswerCheck,
    CheckRecord,
    GradedReply,
    ProbeResult,
    Reference,
    ToolAnswer,
    ToolLevel,
)
from assay.coherence.report import build_report
from assay.coherence.results import record_json
from assay.coherence.rules.rule import Ruling
from assay.coherence.rules.tools import tools
from assay.coherence.tools import against, answer_of, cases, checked_answers, conforms, paired, same
from assay.engines import Reply, ToolCall
from assay.verdict import Severity, Table, jsonable

CALL = next(case for case in cases() if case.name == "create_user")
OBJECT = next(
    case
    for case in cases()
    if case.expect == {"city": "Bergen", "population": 291940, "capital": False}
)


def reply(content: str = "", *calls: ToolCall) -> Reply:
    return Reply(content=content, finish_reason="stop", tool_calls=calls)


def test_there_are_24_calls_and_24_objects_each_with_values_that_follow_its_schema() -> None:
    calls = [case for case in cases() if case.name]
    assert len(calls) == 24 == len({case.name for case in calls})
    assert len(cases()) == 48 == len({case.key for case in cases()})
    for case in cases():
        required = {name: case.expect[name] for name in case.schema["required"]}
        assert conforms(required, case.schema) and conforms(case.expect, case.schema), case.key
        # The question holds what the answer needs: every word of it that is no choice of the
        # schema, every number.
        for text in strings(required, case.schema):
            assert text in case.ask, (case.key, text)


def strings(value: Any, schema: Any) -> list[str]:
    if isinstance(value, str):
        return [] if "enum" in schema else [value]
    if isinstance(value, list):
        return [s for item in value for s in strings(item, schema["items"])]
    if isinstance(value, dict):
        return [
            s for name, item in value.items() for s in strings(item, schema["properties"][name])
        ]
    return []


def test_the_right_answer_of_every_case_is_right() -> None:
    for case in cases():
        text = json.dumps(case.expect)
        answer = answer_of(case, reply("", ToolCall(case.name, text)) if case.name else reply(text))
        assert (answer.parsed, answer.schema_valid, answer.right) == (True, True, True), case.key
        assert not answer.text_head


@pytest.mark.parametrize(
    ("said", "form", "parsed", "valid", "right"),
    [
        (
            reply("", ToolCall("create_user", '{"name": "Zoë Čapek", "age": 34}')),
            "parsed",
            True,
            True,
            True,
        ),
        (
            reply("", ToolCall("create_user", '{"name": "Zoë Čapek", "age": "34"}')),
            "parsed",
            True,
            False,
            False,
        ),
        (
            reply("", ToolCall("create_user", '{"name": "Zoe Capek", "age": 34}')),
            "parsed",
            True,
            True,
            False,
        ),
        (reply("", ToolCall("create_user", '{"name": "Zoë')), "parsed", False, False, False),
        (reply("", ToolCall("delete_user", "{}")), "parsed", False, False, False),
        (
            reply('{"name": "create_user", "arguments": {"name": "Zoë Čapek", "age": 34}}'),
            "unread",
            False,
            True,
            True,
        ),
        (
            reply('< "arguments": {"name": "Zoë Čapek", "age": 34}}]'),
            "remains",
            False,
            False,
            False,
        ),
        (reply("I have created the account."), "", False, False, False),
        (reply(""), "", False, False, False),
    ],
)
def test_calls(said: Reply, form: str, parsed: bool, valid: bool, right: bool) -> None:
    answer = answer_of(CALL, said)
    assert (answer.form, answer.parsed, answer.schema_valid, answer.right) == (
        form,
        parsed,
        valid,
        right,
    )


@pytest.mark.parametrize(
    ("text", "parsed", "valid", "right"),
    [
        ('{"city": "Bergen", "population": 291940, "capital": false}', True, True, True),
        (
            '```json\n{"city": "Bergen", "population": 291940.0, "capital": false}\n```',
            True,
            True,
            True,
        ),
        ('{"city": "Bergen", "population": 291940, "capital": 0}', True, False, False),
        (
            '{"city": "Bergen", "population": 291940, "capital": false, "more": 1}',
            True,
            False,
            False,
        ),
        ('{"city": "Bergen", "population": 29194, "capital": false}', True, True, False),
        ('{"city": "Bergen", "population": NaN, "capital": false}', True, False, False),
        (
            'Here it is: {"city": "Bergen", "population": 291940, "capital": false}',
            False,
            False,
            False,
        ),
        ("[" * 100_000, False, False, False),
        ("[]", False, False, False),
    ],
)
def test_objects(text: str, parsed: bool, valid: bool, right: bool) -> None:
    answer = answer_of(OBJECT, reply(text))
    assert (answer.parsed, answer.schema_valid, answer.right) == (parsed, valid, right)


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": ["number", "null"], "minimum": -2, "maximum": 2},
        "b": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[a-z]*$"},
            "minItems": 1,
            "maxItems": 2,
        },
        "c": {"type": "integer", "enum": [1, 3]},
    },
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ({"a": 1}, True), ({"a": None}, True), ({"a": -2.0, "b": ["x"], "c": 3.0}, True), ({"a": 0, "b": ["", "z"]}, True),  # noqa: E501
        ({}, False), ([], False), (None, False), ({"a": True}, False), ({"a": 2.1}, False), ({"a": "1"}, False),  # noqa: E501
        ({"a": 1, "b": []}, False), ({"a": 1, "b": ["a", "b", "c"]}, False), ({"a": 1, "b": ["A"]}, False),  # noqa: E501
        ({"a": 1, "c": 2}, False), ({"a": 1, "c": 1.5}, False), ({"a": 1, "d": 1}, False), ({"a": float("inf")}, False),  # noqa: E501
    ],
)  # fmt: skip
def test_validity(value: Any, valid: bool) -> None:
    assert conforms(value, SCHEMA) is valid


@pytest.mark.parametrize(
    ("value", "want", "equal"),
    [
        (3, 3.0, True), (True, 1, False), (1, True, False), (None, None, True), (0, None, False), ("e\u0301", "é", True),  # noqa: E501
        (" x ", "x", True), ("X", "x", False), ([1, 2], [2, 1], False), ({"a": 1}, {"a": 1, "b": 2}, False),  # noqa: E501
        (18.4, 18.40, True), (18.41, 18.4, False),
    ],
)  # fmt: skip
def test_sameness_of_values(value: Any, want: Any, equal: bool) -> None:
    assert same(value, want) is equal


def level(concurrency: int, right: int, form: str = "parsed", asked: int = 48) -> ToolLevel:
    """A level of which the first `right` answers are right."""
    return ToolLevel(
        concurrency,
        tuple(
            ToolAnswer(case.key, i < right, i < right, i < right, form if case.name else "")
            for i, case in enumerate(cases()[:asked])
        ),
    )


def measured(*levels: ToolLevel) -> CheckRecord:
    return CheckRecord(tools=levels)


def ruled(record: CheckRecord, reference: CheckRecord | None) -> Ruling:
    ruling = tools(record, reference)
    assert isinstance(ruling, Ruling)
    return ruling


def test_fewer_right_answers_than_the_reference_fail() -> None:
    ruling = ruled(measured(level(1, 30), level(8, 30)), measured(level(0, 44)))
    assert ruling.state == "bad" and {f.id for f in ruling.findings} == {"coherence.tools_wrong"}
    assert ruling.findings[0].evidence["levels"][0]["lost"] == 14
    ruling = ruled(measured(level(1, 43), level(8, 42)), measured(level(0, 44)))
    assert ruling.state == "good" and not ruling.findings


def test_what_breaks_only_under_load_is_named_so_without_a_reference() -> None:
    ruling = ruled(measured(level(1, 40), level(8, 38), level(32, 22)), None)
    assert ruling.state == "bad"
    (finding,) = ruling.findings
    assert finding.id == "coherence.tools_under_load" and finding.severity is Severity.ERROR
    assert "with 32 at a time 18 cases are lost and 0 gained" in finding.title


def test_nothing_right_and_no_reference_is_unclear_and_a_weak_model_served_faithfully_is_good() -> (
    None
):
    assert ruled(measured(level(1, 0), level(8, 0)), None).state == "unclear"
    assert ruled(measured(level(1, 0), level(8, 0)), measured(level(0, 0))).state == "good"


def test_a_server_without_tools_was_not_examined() -> None:
    assert ruled(CheckRecord(tools_skipped="no tools"), None).state == "not_examined"
    assert tools(CheckRecord(), None) is None


def test_pairs_are_of_the_same_cases() -> None:
    assert paired(level(1, 10, asked=20), level(0, 48)) == (0, 10, pytest.approx(2**-10))


def test_levels_survive_their_json_form() -> None:
    record = CheckRecord(probes=(), tools=(level(1, 12), ToolLevel(8, (), 3, "timed out")))
    back = CheckRecord.from_json(jsonable(record_json(record)))
    assert back.tools == record.tools


def test_each_count_is_held_against_the_reference_question_by_question() -> None:
    same = against(level(1, 40), level(0, 40), 0.01)
    assert set(same) == {"parsed", "schema_valid", "right"}
    assert same["right"]["decision"] == "undecided" and same["right"]["questions_needed"] == 381
    assert against(level(1, 40), level(0, 40), 0.1)["right"]["decision"] == "no_worse"
    worse = against(level(1, 30), level(0, 44), 0.01)["right"]
    assert (worse["decision"], worse["lost"], worse["gained"]) == ("worse", 14, 0)
    assert worse["questions_needed"] is None and worse["difference"]["hi"] < -0.01
    assert against(level(1, 40, asked=0), level(0, 40), 0.01) == {}


def test_a_question_that_was_asked_in_several_texts_counts_once() -> None:
    def probe(*passed: bool) -> CheckRecord:
        texts = tuple(
            GradedReply(
                "ok",
                None,
                None,
                "stop",
                5,
                "x",
                9,
                9,
                0.7,
                seed,
                checks=(AnswerCheck("paris", right),),
            )
            for seed, right in enumerate(passed)
        )
        return CheckRecord(probes=(ProbeResult("france", "France", texts),))

    asked = ("france", "", "paris")
    assert checked_answers(probe(True, True, False)) == {asked: True}
    assert checked_answers(probe(True, False)) == {asked: False}
    assert checked_answers(CheckRecord()) == {}


def test_the_report_carries_the_decision_and_shows_it() -> None:
    ours, theirs = measured(level(1, 40), level(8, 30)), measured(level(1, 44))
    reference = Reference(theirs, {"source": "run"})
    judgement = judge(ours, theirs)
    times = {"seconds": 1.0, "expected_s": {}, "stages_s": {}, "left_out": [], "budget_s": None}
    report = build_report({}, Plan(), ours, reference, judgement, times)
    one, eight = report.to_json()["results"]["tools"]
    assert (one["decision"], eight["decision"]) == ("undecided", "worse")
    assert one["questions_needed"] == one["paired"]["right"]["questions_needed"] > 48
    table = next(b for b in report.blocks if isinstance(b, Table))
    assert [row[-1].split(" (")[0] for row in table.rows] == ["undecided", "worse"]


def test_a_call_that_came_as_one_counts_whatever_the_model_writes_after_the_tools_result() -> None:
    from assay.coherence.conversation import GREEDY, Outcome, Task
    from assay.coherence.probes import ToolUse
    from assay.coherence.replies import grade_outcome

    first = reply("", ToolCall("get_weather", '{"city": "Oslo"}', "c1"))
    again = reply(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_response>'
    )
    for replies, form in (
        ([first, again], "parsed"),
        ([again, first], "remains"),
        ([reply("Hm."), again], "remains"),
    ):
        outcome = Outcome(Task(ToolUse(), "", GREEDY))
        outcome.replies, outcome.tools = list(replies), {"get_weather"}
        assert grade_outcome(outcome).tool_form == form
