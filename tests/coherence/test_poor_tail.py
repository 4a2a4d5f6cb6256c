"""Floods of few characters, with blanks, line breaks and other characters between them."""

from __future__ import annotations

import random

import pytest
from grade_texts import GOOD_START

from assay.coherence.grading import Label, grade


def of(chars: str, weights: list[int], count: int, joint: str = "") -> str:
    return joint.join(random.Random(chars).choices(chars, weights, k=count))


FLOODS = {
    "lines": "?\n" * 50 + "Yes\n?\n?\n",
    "stops": of(".,I(", [9, 6, 1, 1], 60, " "),
    "dollars": of("$'\"\n", [12, 3, 1, 1], 120),
    "half": of("~$abcdefghij", [14] + [1] * 11, 150, " "),
    "bars": of("|cat ", [12, 1, 1, 1, 3], 150),
    "ones": of("1 23", [8, 4, 1, 1], 400),
    "blanks": of(" \n", [3, 1], 90) + "by" + of(" \n", [1, 3], 110) + "with" + " \n" * 40,
    "letters": of("yYjm", [12, 3, 1, 1], 90),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
@pytest.mark.parametrize("start", ["", GOOD_START], ids=["alone", "late"])
def test_flood_of_few_characters(start: str, flood: str) -> None:
    result = grade(start + flood, finish_reason="length")
    assert result.label is Label.DEGENERATE
    if result.kind in {
        "few_characters",
        "single_char_flood",
    }:  # a salad detector may name it too, from where it looks odd
        assert abs(result.onset_char - len(start)) < 80


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            "\n".join(" ".join(random.Random(i).choices("01", k=16)) for i in range(12)), id="bits"
        ),
        pytest.param(">seq\n" + "\n".join(of("GGACTA", [1] * 6, 60) for _ in range(6)), id="dna"),
        pytest.param(
            "\n".join("".join("#."[(r + c) % 2] for c in range(18)) for r in range(9)), id="chess"
        ),
        pytest.param(
            "```\n" + "\n".join(" " * (9 - i) + "*" * (2 * i + 1) for i in range(9)), id="tree"
        ),
        pytest.param(
            "\n".join(f"{i:08x}  " + "00 " * 16 + "|" + "." * 16 + "|" for i in range(9)),
            id="hexdump",
        ),
        pytest.param("1 Start " + "." * 60 + " 3\n2 Middle " + "." * 58 + " 15\n", id="contents"),
        pytest.param("Name: " + "_" * 40, id="form"),
        pytest.param(
            "```\n" + "\n".join(" " * (5 - i) + "*" * (2 * i + 1) for i in range(5)) + "\n```",
            id="fir",
        ),
        pytest.param("x = [" + ", ".join(["0"] * 9 + ["1"] * 9), id="zeros"),
    ],
)
def test_data_and_drawings_have_few_characters_by_right(text: str) -> None:
    assert grade(text).label is Label.OK
    assert grade(text, finish_reason="length").kind not in {"few_characters", "single_char_flood"}
