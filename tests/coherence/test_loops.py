"""Exact loops: how they end decides; whole replies of a few characters; where a loop with line
breaks in it begins.
"""

from __future__ import annotations

import pytest

from assay.coherence.grading import Label, grade


@pytest.mark.parametrize("n", [31, 60, 100, 200, 300])
@pytest.mark.parametrize(
    "line",
    [
        "run_check: passed",
        '{"status": "ok"}',
        (
            "- [ok] the worker answered the probe of the balancer in time and reported no error at"
            " all today"
        ),
    ],
)
def test_equal_lines_that_end_in_a_conclusion(n: int, line: str) -> None:
    text = (
        "Results:\n"
        + f"{line}\n" * n
        + f"\nAll {n} came back without an error, so the branch can be merged"
    )
    assert grade(f"{text}.\n").label is grade(text).label is Label.OK
    cut = "Results:\n" + f"{line}\n" * n + line[:9]
    assert grade(cut, finish_reason="length").label is Label.DEGENERATE


def test_a_repetition_that_was_announced_and_left_again() -> None:
    text = "Sure, here are two hundred of them:\n\n" + "ho " * 200 + "\n\nThat makes two hundred."
    assert grade(text).label is Label.OK
    assert grade(text, finish_reason="length").label is Label.DEGENERATE
    assert grade("Here is what I found:\n\n" + "ho " * 200).label is Label.DEGENERATE
    assert (
        grade("Here they are:\n\n" + "ho " * 200 + "\n\nAnd so on " + "and so on " * 60).label
        is Label.DEGENERATE
    )


@pytest.mark.parametrize(
    "text",
    [
        "</" * 9,
        "?!" * 10,
        "/>" * 8,
        '{"' * 9,
        "n'" * 9,
        "\\n" * 8,
        "的是" * 12,
        "e/" * 9,
        "</ " * 7,
    ],
)
def test_a_whole_reply_of_two_or_three_characters(text: str) -> None:
    result = grade(text)
    assert (result.label, result.onset_char) == (Label.DEGENERATE, 0)
    assert (
        grade(f"The closing tag of a paragraph begins with {text[:2]} and ends with >.").label
        is Label.OK
    )


@pytest.mark.parametrize(
    "text",
    ["haha" * 6, "ha ha ha ha ha ha", "-=" * 12, "*-" * 12, "()" * 9, "0101010101010101", "x x x x x x x x", "A, B, A, B, A, B",  # noqa: E501
     "no no no no no no", "~*" * 10, "<>" * 8, "lalalalalala", "yesyesyes", "哈哈哈哈哈哈哈哈哈", "🎉🎊" * 8],  # noqa: E501
)  # fmt: skip
def test_short_replies_that_someone_may_have_asked_for(text: str) -> None:
    assert grade(text).label is Label.OK


@pytest.mark.parametrize(
    ("start", "unit"),
    [("Let me see.\n", "512  "), ("Well:\n", "0,1,"), ("Well:\n", "| - "), ("So: ", "ab cd ")],
)
@pytest.mark.parametrize("break_", ["\n", "\n\n"])
def test_a_loop_begins_before_the_line_break_in_it(start: str, unit: str, break_: str) -> None:
    result = grade(start + unit * 150 + break_ + unit * 60, finish_reason="length")
    assert result.label is Label.DEGENERATE
    assert abs(result.onset_char - len(start)) <= len(unit)
