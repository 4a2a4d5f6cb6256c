"""Stutter over a run: doubled words, syllables and pieces are counted; what a language doubles by
right is not.
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import pytest

from assay.coherence.detectors.stutter import Counts, judge_stutter, stutter_counts

STUTTERS = [
    ("The information information was sent to the control control room.", 2),
    ("It is used for the the transport of water.", 1),
    ("The informationation of the system is stored here for the users.", 1),
    (
        (
            "The ciclo hidrológico es lento. El ciclo hidrológico sigue, y el hidrológógico también"
            " cambia."
        ),
        1,
    ),
    ("Los ríos y y y lagos cambian, y los mares y las nubes y el viento y la tierra también.", 1),
    ("He asked Wh Whether the road was open and the bridge too.", 1),
    ("The cat sat on the mat,, and the dog slept.", 1),
]
BY_RIGHT = [
    "He had had enough, and that that was true was very very clear.",
    "Duran Duran played in Walla Walla, and Sing Sing is a prison near New New York.",
    "Anak-anak itu berjalan pelan pelan ke sekolah dan membawa buku.",
    "Twende pole pole, kwa sababu barabara ni mbaya sana na mvua inanyesha.",
    "慢慢地走，天天都好，人人都高兴。",
    (
        "Banana bread and couscous are what Mississippi remembers; the murderer and the wanderer"
        " ate cocoa."
    ),
    "```\nx x y y\nfor for in in\n```\nThat is all there is to say about it.",
    "    x x x\n    return return\n\nThe code above does nothing.",
    "| word | word |\n| the | the the |\n\nIs a table.",
    "No no no, wait wait, knock knock, bye bye!",
]


@pytest.mark.parametrize(("text", "count"), STUTTERS)
def test_stutters_are_counted(text: str, count: int) -> None:
    assert stutter_counts(text).total == count, stutter_counts(text)


@pytest.mark.parametrize("text", BY_RIGHT)
def test_what_is_doubled_by_right_is_not_counted(text: str) -> None:
    assert stutter_counts(text).total == 0, stutter_counts(text)


def test_a_run_is_judged_over_all_texts() -> None:
    healthy = [stutter_counts(page) for page in topics.values()]
    assert judge_stutter(healthy).verdict == "good"
    bad = [Counts(100, 1 if n % 3 == 0 else 0) for n in range(60)]
    found = judge_stutter(bad)
    assert (
        found.verdict == "bad"
        and found.lo < found.rate < found.hi
        and math.isclose(found.rate, 20 / 6000)
    )
    rate, _, _, verdict = found
    assert (rate, verdict) == (found.rate, "bad")


def test_too_few_words_and_one_odd_text_prove_nothing() -> None:
    assert judge_stutter([]).verdict == "unclear"
    assert judge_stutter([Counts(0)]).verdict == "unclear"
    assert judge_stutter([Counts(30, 1), Counts(40)]).verdict == "unclear"
    assert judge_stutter([Counts(200, 12), *[Counts(200)] * 20]).verdict != "bad"
