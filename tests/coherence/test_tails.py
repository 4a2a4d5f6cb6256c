"""Words, lines and calls that take turns without end: found; those that a task asks for: left
alone.
"""

from __future__ import annotations

import json
import random

import pytest

from assay.coherence.grading import Label, grade

THINGS = [
    "the kernel",
    "the block size",
    "the ring buffer",
    "the head count",
    "the scheduler",
    "the page table",
    "the cache",
]
MODALS = ["could be", "should be", "must be", "might be", "has to be"]
LINKS = ["derived from", "checked against", "aligned with", "bounded by", "compared to"]


def templated(seed: int, lines: int) -> str:
    """One template for pages, its terms drawn anew in each line."""
    rng = random.Random(seed)

    def clause() -> str:
        return f"{rng.choice(THINGS)} {rng.choice(MODALS)} {rng.choice(LINKS)} {rng.choice(THINGS)}"

    start = (
        "The user asks why the program is slow on his new machine, and whether a larger cache would"
        " help him.\n"
    )
    return start + "".join(
        f"Wait, let me think again. If {clause()}, then {clause()}. But that is not so.\n"
        for _ in range(lines)
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lines", [30, 120])
def test_a_few_terms_in_one_template_without_end(seed: int, lines: int) -> None:
    text = templated(seed, lines)
    for cut in (grade("", reasoning=text, finish_reason="length"), grade("<think>\n" + text)):
        assert cut.label is Label.DEGENERATE
        assert cut.onset_char < 400


def test_a_text_of_few_words_that_ends_by_itself_is_left_alone() -> None:
    song = "".join(
        f"{n} green bottles hanging on the wall, {n} green bottles hanging on the wall. And if one"
        f" green bottle should fall by chance, there will be {n - 1} green bottles hanging on the"
        " wall.\n"
        for n in range(20, 0, -1)
    )
    assert grade(song, finish_reason="stop").label is Label.OK


CALLS = [
    '{"name": "read_file", "arguments": {"path": "a.py"}}',
    '{"name": "grep", "arguments": {"q": "foo"}}',
    '{"name": "list_dir", "arguments": {"path": "."}}',
]


@pytest.mark.parametrize("seed", range(4))
def test_like_calls_in_turn(seed: int) -> None:
    rng = random.Random(seed)
    drawn = [CALLS[n % 3] if seed % 2 else rng.choice(CALLS) for n in range(18)]
    assert grade("Let me look.\n" + "\n".join(drawn)).kind == "repeated_tool_call"
    plain = [f"{json.loads(c)['name']}({json.loads(c)['arguments']})" for c in drawn * 2]
    assert grade("Let me look.\n" + "\n".join(plain)).label is Label.DEGENERATE
    calls = [
        {"name": json.loads(c)["name"], "arguments": json.dumps(json.loads(c)["arguments"])}
        for c in drawn
    ]
    assert grade("", tool_calls=calls, finish_reason="tool_calls").kind == "repeated_tool_call"


@pytest.mark.parametrize(
    "text",
    [
        "forward(100)\nleft(90)\n" * 8,
        "\n".join(
            f'{{"name": "read_file", "arguments": {{"path": "src/{n}.py"}}}}' for n in range(12)
        ),
        "I ran these:\n"
        + "\n".join(CALLS * 6)
        + "\n\nAll of them came back without an error, so the build is fine.",
        "\n".join(f'{{"name": "item {n % 3}", "on": true}}' for n in range(30)),
    ],
)
def test_calls_that_a_plan_may_hold(text: str) -> None:
    assert grade(text, finish_reason="stop").label is Label.OK
    other = [{"name": "read", "arguments": json.dumps({"path": f"{n}.py"})} for n in range(20)]
    assert grade("", tool_calls=other).label is Label.OK
