from __future__ import annotations

import numpy as np
import pytest
from grade_texts import GOOD_START, function_salad

from assay.coherence import language as lang
from assay.coherence.detectors import windows
from assay.coherence.text import Ending, TextView, ending_of


def measures(text: str) -> dict[str, float]:
    view = TextView(text)
    sums = windows.running_sums(view)
    values = windows.measure(view, sums, 64, 16).values.mean(axis=0)
    return dict(zip(windows.FEATURES, values.tolist(), strict=True))


def test_tables_are_probabilities() -> None:
    tables = lang.tables()
    # Stored in steps of bits and cut at 15.9: the sums stay near 1.
    assert np.allclose((2.0**-tables.shapes).sum(axis=-1), 1, atol=0.05)
    assert np.allclose((2.0**-tables.letters).sum(axis=-1), 1, atol=0.45)


def test_words_are_known_and_strings_are_not() -> None:
    bloom = lang.tables().bloom
    assert all(
        lang.is_known_word(w, bloom) for w in ("garden", "harbor", "the", "computer", "walked")
    )
    strings = [f"q{i}zx" for i in range(2000)]
    assert sum(lang.is_known_word(w, bloom) for w in strings) < 0.06 * len(strings)


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("aB1 \n", [lang.LOWER, lang.UPPER, lang.DIGIT, lang.SPACE, lang.BREAK]),
        ("éÉ", [lang.LOWER_LATIN, lang.UPPER_LATIN]),
    ],
)
def test_character_classes(text: str, classes: list[int]) -> None:
    assert lang.character_classes(TextView(text).codes).tolist() == classes


def test_letters_lose_accents_and_case() -> None:
    assert lang.letter_codes(TextView("aÉ-я").codes).tolist() == [0, 4, lang.EDGE, lang.FOREIGN]


def test_measures_tell_prose_from_salad() -> None:
    prose, salad = measures(GOOD_START * 3), measures(function_salad(1))
    assert prose["syntax"] > 0.3 > -0.2 > salad["syntax"]
    assert prose["odd_words"] < 0.2 and prose["known"] > 0.9
    glued = measures("ightarrow CdeFgh xqLmn zzpTr wvKj " * 8)
    assert glued["case_jumps"] > 0.5 and glued["letters"] > prose["letters"] + 1


def test_encoded_data_weighs_nothing() -> None:
    digest = "3f9a7c2be4d15a60c8e1f27b9d3046aa"
    assert measures(f"{GOOD_START} {digest} {digest}")["digit_jumps"] == 0


def test_too_short_a_text_is_not_measured() -> None:
    assert windows.running_sums(TextView("one two three")) is None


def test_view_of_a_text() -> None:
    view = TextView("Ab ab! 12 的字\n\nOne. Two?")
    assert list(view.words) == ["Ab", "ab", "!", "12", "的", "字", "One", ".", "Two", "?"]
    assert view.tokens.ids[0] == view.tokens.ids[1]
    assert [
        view.text[a:b].strip()
        for a, b in zip(view.segments.starts, view.segments.ends, strict=True)
    ] == ["Ab ab!", "12 的字", "One.", "Two?"]
    assert view.line_at(3) == (0, 12) and view.line_at(14) == (14, 23)
    assert not view.cut and TextView("and then he").cut


def test_fences_and_endings() -> None:
    text = "a\n```py\nx\n```\nb\n~~~\nrest"
    assert [text[a:b][:3] for a, b in TextView(text).fences] == ["```", "~~~"]
    assert [ending_of(r) for r in ("stop", "length", None, "?")] == [
        Ending.STOPPED,
        Ending.CUT,
        Ending.UNKNOWN,
        Ending.UNKNOWN,
    ]
