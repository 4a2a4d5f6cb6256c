from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.coherence.detectors import floods, recycled_tail
from assay.coherence.grading import Label, grade
from assay.coherence.text import Ending, TextView


def changing_items(count: int, choices: int = 5) -> str:
    """List items of a page whose number is drawn from a few: no period fits them."""
    rng = random.Random(3)
    return "\n".join(
        f'    <li>\n      <a href="https://example.org/page/{rng.randint(1, choices)}"'
        ' class="item">Read more</a>\n    </li>'
        for _ in range(count)
    )


def test_a_loop_in_changing_copies_is_found_where_the_server_cut_it() -> None:
    text = "<ul>\n" + changing_items(40)
    found = recycled_tail.detect_recycled_tail(TextView(text, Ending.CUT))
    assert found is not None and found.onset_char < 200
    assert grade(text, finish_reason="length").label is Label.DEGENERATE


def test_items_with_contents_of_their_own_are_left_alone() -> None:
    names = [
        f"{a}{b}"
        for a in ("north", "south", "old", "new", "great")
        for b in ("field", "bridge", "gate", "well", "ham")
    ]
    text = "\n".join(
        f'<li><a href="https://example.org/{n}" class="item">Read more about {n}</a></li>'
        for n in names
    )
    assert recycled_tail.detect_recycled_tail(TextView(text, Ending.CUT)) is None


def test_a_numbered_list_of_equal_items_may_be_asked_for_but_comes_to_an_end() -> None:
    text = "\n".join(
        f"{i}. I shall water the plants in the hall every morning." for i in range(1, 31)
    )
    assert recycled_tail.detect_recycled_tail(TextView(text, Ending.STOPPED)) is None
    assert recycled_tail.detect_recycled_tail(TextView(text, Ending.CUT)) is not None


def test_nothing_is_concluded_from_an_open_text() -> None:
    assert recycled_tail.detect_recycled_tail(TextView(changing_items(40), Ending.OPEN)) is None


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 5))
def test_earlier_runs_are_those_of_a_dictionary(ids: list[int], length: int) -> None:
    seen: dict[tuple[int, ...], int] = {}
    expected = []
    for at in range(max(0, len(ids) - length + 1)):
        run = tuple(ids[at : at + length])
        expected.append(seen.get(run, -1))
        seen[run] = at
    assert recycled_tail.earlier_runs(np.array(ids, dtype=np.int64), length).tolist() == expected


def test_a_flood_shorter_than_a_rule_counts_where_the_server_cut_it() -> None:
    text = "The answer is " + "7" * 100
    assert floods.detect_flood(TextView(text, Ending.STOPPED)) is None
    found = floods.detect_flood(TextView(text, Ending.CUT))
    assert found is not None and (found.kind, found.onset_char) == ("single_char_flood", 14)


def test_a_line_to_fill_in_and_a_dotted_line_are_no_flood() -> None:
    form = "Name: " + "_" * 40 + "\nAddress: " + "_" * 30
    assert floods.detect_flood(TextView(form, Ending.CUT)) is None
    assert floods.detect_flood(TextView("7. The harbour " + "." * 62 + " 41", Ending.CUT)) is None


def mixed_table(rows: int, seed: int = 5) -> str:
    """A table with the same three words in every place: no row repeats with a period, no word is
    new.
    """
    rng = random.Random(seed)
    words = ["Cats", "Dogs", "Hamsters"]
    return "| one | two | three |\n|---|---|---|\n" + "".join(
        f"| {rng.choice(words)} | {rng.choice(words)} | {rng.choice(words)} |\n"
        for _ in range(rows)
    )


def test_an_end_of_characters_that_all_came_before() -> None:
    table = mixed_table(40)
    found = recycled_tail.detect_recycled_tail(TextView(table, Ending.CUT))
    assert found is not None and found.kind == "recycled_tail" and found.onset_char < len(table) / 2
    assert recycled_tail.detect_recycled_tail(TextView(table, Ending.STOPPED)) is None
    records = "".join(
        f"| {i} | {i * 7919 % 10007} | item {chr(97 + i % 26)}{i * 31 % 97} |\n" for i in range(60)
    )
    assert recycled_tail.detect_recycled_tail(TextView(records, Ending.CUT)) is None


def test_code_said_for_the_third_time() -> None:
    item = (
        "def area(width: int, height: int) -> int:\n    return width * height  # of one wall\n\n\n"
    )
    names = ["paint", "floor", "tile", "door", "room", "shed", "barn", "yard", "path", "gate"]
    other = "".join(
        f"def {n}(x: int) -> int:\n    return x * {k}\n\n\n" for k, n in enumerate(names, 2)
    )
    again = other + item * 5
    assert recycled_tail.detect_recycled_tail(TextView(again[:-9], Ending.CUT)) is not None
    assert recycled_tail.detect_recycled_tail(TextView(other + item, Ending.CUT)) is None


def test_the_padding_of_a_wide_table_and_the_line_under_a_title_are_no_floods() -> None:
    cells = [
        ("Option", "Default"),
        ("-" * 300, "-" * 7),
        ("flash attention, see the page of the backend for the types that it takes", "off"),
        ("all", "on"),
    ]
    table = "\n".join(f"| {a:<300} | {b:<7} |" for a, b in cells)
    assert grade(f"Options of the build:\n\n{table}\n\nBuild it then.").label is Label.OK
    title = (
        "Repeated captures (`issue 109 <https://example.org/owner/regex/issues/109>`_) "
        + "hold each what they matched in the order in which it came, the last one too, unlike"
        " those of the standard library"
    )
    for mark in "^~=":
        assert (
            grade(
                f"{title}\n{mark * len(title)}\n\nEvery capture is kept, not only the last one."
            ).label
            is Label.OK
        )


@pytest.mark.parametrize(
    "text",
    [
        "| So the answer is" + " " * 600 + "|",
        "The answer is here:\n" + "^" * 400,
        "^" * 200 + "\n" + "^" * 200,
    ],
)
def test_floods_beside_a_bar_or_below_a_short_line_are_found(text: str) -> None:
    assert grade(text).label is Label.DEGENERATE
