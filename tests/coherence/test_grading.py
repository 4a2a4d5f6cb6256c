from __future__ import annotations

import time

import pytest
from grade_texts import DEGENERATE, GOOD_START, LEGITIMATE, function_salad, soup
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.coherence.grading import Label, grade
from assay.engines import ToolCall


@pytest.mark.parametrize(("text", "kind"), [pytest.param(t, k, id=n) for n, t, k in DEGENERATE])
def test_flags(text: str, kind: str) -> None:
    result = grade(text)
    assert (result.label, result.kind) == (Label.DEGENERATE, kind)


@pytest.mark.parametrize("text", [pytest.param(t, id=n) for n, t in LEGITIMATE])
@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_leaves_alone(text: str, finish_reason: str | None) -> None:
    result = grade(text, finish_reason=finish_reason)
    assert result.label is Label.OK, result


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", [function_salad, soup])
def test_flags_salads(make, seed: int) -> None:
    assert grade(make(seed)).label is Label.DEGENERATE


@pytest.mark.parametrize("seed", range(4))
def test_salad_after_good_text_has_its_onset(seed: int) -> None:
    good = (
        GOOD_START * 1
        + "She asked him where the boats had gone, but he only shook his head and went home. " * 1
    )
    result = grade(good + soup(seed))
    assert result.label is Label.DEGENERATE
    assert abs(result.onset_char - len(good)) < 200


@pytest.mark.parametrize(
    ("tail", "tolerance"), [("!" * 80, 0), (" the" * 40, 1), ("of the sea " * 40, 1)]
)
def test_onset_is_where_the_collapse_begins(tail: str, tolerance: int) -> None:
    result = grade(GOOD_START + tail)
    assert abs(result.onset_char - len(GOOD_START)) <= tolerance
    assert result.coherent_chars == result.onset_char


@pytest.mark.parametrize("period", range(2, 65))
def test_word_loops_of_every_period(period: int) -> None:
    unit = " ".join(f"{chr(97 + i // 26)}{chr(97 + i % 26)}x" for i in range(period))
    assert grade("Hello there. " + f"{unit} " * 12).label is Label.DEGENERATE


@pytest.mark.parametrize("period", range(2, 65))
def test_character_loops_of_every_period(period: int) -> None:
    unit = "".join(chr(0x4E00 + 7 * i) for i in range(period))
    assert grade("开始:" + unit * max(24, 240 // period)).label is Label.DEGENERATE


def test_request_that_ends_is_told_from_a_loop_that_is_cut() -> None:
    line = "I will not forget my umbrella again.\n"
    assert grade(line * 20, finish_reason="stop").label is Label.OK
    assert grade(line * 20 + line[:12], finish_reason="length").label is Label.DEGENERATE


def test_every_part_is_graded_in_its_own_right() -> None:
    result = grade("", reasoning="Let me see." + "!" * 500, finish_reason="length")
    assert (result.label, result.part, result.onset_char) == (Label.DEGENERATE, "reasoning", 11)
    call = ToolCall("write", '{"text": "' + "la la di " * 100 + '"}')
    assert grade("", tool_calls=[call]).part == "tool_calls"


def test_repeated_tool_calls() -> None:
    same = [ToolCall("weather", '{"city": "Fes"}')] * 3
    assert grade("", tool_calls=same).kind == "repeated_tool_call"
    other = [ToolCall("weather", f'{{"city": "{c}"}}') for c in ("Fes", "Oslo", "Lima")]
    assert grade("", tool_calls=other).label is Label.OK
    dicts = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}] * 3
    assert grade(None, tool_calls=dicts).kind == "repeated_tool_call"


def test_nothing_said() -> None:
    assert (grade("").label, grade("").kind) == (Label.EMPTY, "no_text")
    assert (grade(" \n ").label, grade(" \n ").kind) == (Label.EMPTY, "blank_text")
    assert grade("", reasoning="So 42.", finish_reason="stop").kind == "answer_in_reasoning_field"


def test_reasoning_that_is_cut() -> None:
    cut = grade("", reasoning="The user asks for", finish_reason="length")
    assert (cut.label, cut.kind) == (Label.TRUNCATED_REASONING, "reasoning_cut")
    tag = grade("<think>\nOkay, the user asks")
    assert (tag.label, tag.kind, tag.onset_char) == (Label.TRUNCATED_REASONING, "open_think_tag", 0)
    assert grade("<think>Fine.</think>The answer is 4.").label is Label.OK
    loop = grade("<think>" + "wait what now " * 60, finish_reason="length")
    assert loop.label is Label.DEGENERATE


TEXT = st.one_of(
    st.text(),
    st.text(alphabet="ab \n*", max_size=400),
    st.lists(
        st.sampled_from(
            ["the ", "a ", "!", "\n", "<|im_end|>", "0", "\ufffd", "**:", "的", "x_", "foo. "]
        )
    ).map("".join),
)


@given(
    text=TEXT,
    reasoning=st.none() | st.text(),
    finish=st.sampled_from([None, "stop", "length", "odd"]),
)
@settings(deadline=None, max_examples=200)
def test_never_raises_and_keeps_its_promises(
    text: str, reasoning: str | None, finish: str | None
) -> None:
    result = grade(text, reasoning=reasoning, finish_reason=finish)
    total = len(text) + len(reasoning or "")
    assert 0 <= result.coherent_chars <= total
    if result.label is Label.OK:
        assert result.kind is None and result.onset_char is None
    else:
        part = {"content": text, "reasoning": reasoning or ""}.get(result.part, "")
        assert result.kind and 0 <= result.onset_char <= len(part)


@given(st.text(alphabet=st.characters(), min_size=1, max_size=30), st.integers(0, 3))
@settings(deadline=None, max_examples=50)
def test_lone_surrogates_are_graded(text: str, count: int) -> None:
    grade(text + "\ud800" * count)


@pytest.mark.parametrize(
    "unit",
    [
        "plain words of no great interest, said once ",
        "x",
        " ",
        "\n",
        "!a",
        "|-",
        "<pad>",
        "1,",
        "a_",
        "x'",
        "的字",
    ],
)
def test_time_grows_with_length_and_not_faster(unit: str) -> None:
    def seconds(size: int) -> float:
        text = (unit * (size // len(unit) + 1))[:size]
        best = 1e9
        for _ in range(2):
            began = time.process_time()
            grade(text)
            best = min(best, time.process_time() - began)
        return best

    assert seconds(80_000) < 14 * seconds(8_000) + 0.25


def test_copied_tail_counts_only_where_the_server_cut_the_text() -> None:
    from pydoc_data.topics import topics

    paragraph = " ".join(topics["objects"].split()[:150])
    twice = f"{paragraph}\n\n{paragraph}"
    assert grade(twice[:-20], finish_reason="length").kind == "copied_tail"
    assert grade(twice, finish_reason="stop").label is Label.OK
    assert grade(topics["objects"][:3000], finish_reason="length").label is Label.OK
    assert grade("0 1 0 1 1 1 0 0\n" * 30, finish_reason="length").kind != "copied_tail"


def test_a_letter_that_crowds_out_the_others() -> None:
    mixed = "M" * 30 + "m" + "M" * 40 + "g" + "M" * 50
    result = grade(GOOD_START + mixed)
    assert (result.kind, result.onset_char) == ("single_char_flood", len(GOOD_START))
    assert grade("Hmmmmmm. " + GOOD_START * 2).label is Label.OK


def test_long_sane_text_stays_ok_and_a_salad_in_it_is_found() -> None:
    from pydoc_data.topics import topics

    book = "\n\n".join(page for _, page in sorted(topics.items()))[:300_000]
    assert grade(book).label is Label.OK
    result = grade(
        book[:100_000] + "\n" + " ".join(soup(s) for s in range(6)) + "\n" + book[100_000:200_000]
    )
    assert result.label is Label.DEGENERATE
    assert 99_800 < result.onset_char < 101_500
