from __future__ import annotations

import random
from pydoc_data.topics import topics

import pytest
from grade_texts import DEGENERATE, GOOD_START, LEGITIMATE
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.coherence.grading import grade
from assay.coherence.streaming import STRIDE, TAIL, StreamingGrader


def feed(text: str, seed: int = 0, widest: int = 9) -> tuple[StreamingGrader, int | None]:
    """Push `text` in random pieces; also how much had been pushed when a fault was first
    reported.
    """
    rng = random.Random(seed)
    grader, at, seen = StreamingGrader(), 0, None
    while at < len(text):
        size = rng.randint(1, widest)
        if grader.push(text[at : at + size]) and seen is None:
            seen = at + size
        at += size
    return grader, seen


LOOPS = {
    "!": "!" * 3000,
    "word": "garden " * 600,
    "phrase": "of the sea " * 400,
    "sentence": "The cat sat on the roof. " * 200,
    "pad": "<pad>" * 400,
    "newlines": "\n" * 2000,
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(
    "start", [GOOD_START, topics["objects"][:9000] + "\n"], ids=["early", "late"]
)
def test_loop_is_stopped_in_flight(start: str, loop: str) -> None:
    grader, seen = feed(start + loop)
    assert seen is not None and seen < len(start) + 2 * STRIDE + 1100
    assert abs(grader.detection.onset_char - len(start)) < 60
    assert grader.finish("length").label == "degenerate"


@pytest.mark.parametrize("text", [pytest.param(t, id=n) for n, t in LEGITIMATE])
def test_sane_text_is_let_through(text: str) -> None:
    grader, seen = feed(text)
    assert seen is None
    assert grader.finish("stop") == grade(text, finish_reason="stop")


def test_code_fence_is_remembered_past_the_tail() -> None:
    code = (
        "```\n"
        + "\n".join(f"print({i}, 'line of code number {i}')" for i in range(300))
        + "\n<|im_start|>user\n" * 2
    )
    assert len(code) > TAIL
    _, seen = feed(code)
    assert seen is None


@given(st.sampled_from([t for _, t, _ in DEGENERATE]), st.integers(0, 2**32), st.integers(1, 80))
@settings(deadline=None, max_examples=60)
def test_finish_is_grade_however_the_text_is_cut(text: str, seed: int, widest: int) -> None:
    grader, _ = feed(text, seed, widest)
    assert grader.finish("length") == grade(text, finish_reason="length")


@given(st.integers(0, 2**32), st.integers(1, 400))
@settings(deadline=None, max_examples=25)
def test_chunking_moves_the_alarm_by_less_than_the_stride(seed: int, widest: int) -> None:
    text = GOOD_START + "a fine day it was and " * 120
    _, one = feed(text, 0, 1)
    _, other = feed(text, seed, widest)
    assert one is not None and other is not None
    assert abs(one - other) <= STRIDE + widest


def test_work_per_token_is_bounded() -> None:
    grader = StreamingGrader()
    for index in range(3_000):
        grader.push(f"{index * 7919 % 10007} ")
    assert len(grader._tail) <= TAIL + STRIDE + 8
