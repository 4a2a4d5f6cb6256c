"""Sets of known pairs and runs of characters, and the measures that rest on them."""

from __future__ import annotations

import numpy as np
import pytest
from grade_texts import GOOD_START, soup

from assay.coherence import language as lang
from assay.coherence.detectors import windows
from assay.coherence.grading import grade
from assay.coherence.text import TextView

HEX_DUMP = "\n".join(
    f"{16 * i:08x}  " + "3f a1 00 7c 9e 00 12 bb " * 2 + "|?..|....?..|....|" for i in range(12)
)


def measures(text: str) -> dict[str, float]:
    view = TextView(text)
    sums = windows.running_sums(view)
    assert sums is not None
    values = windows.measure(view, sums, 10_000, 1).values
    assert values.shape == (1, len(windows.FEATURES))
    return dict(zip(windows.FEATURES, values[0].tolist(), strict=True))


def test_what_is_put_into_a_filter_is_found_in_it() -> None:
    numbers = np.random.default_rng(0).integers(0, 2**63, 2000).astype(np.uint64)
    bits = np.zeros(lang.FILTER_BITS, dtype=bool)
    bits[lang.filter_bits(numbers[:1000]).ravel().astype(np.int64)] = True
    found = lang.is_in(numbers, np.packbits(bits, bitorder="little"))
    assert found[:1000].all() and not found[1000:].any()


def test_runs_of_characters_end_where_they_are_said_to_and_blanks_count_once() -> None:
    numbers, places = lang.gram_numbers(TextView("the  End of").codes)
    again, others = lang.gram_numbers(TextView("THE énd of").codes)  # case and accents aside
    assert numbers.tolist() == again.tolist() and len(numbers) == 10 - lang.GRAM + 1
    assert places.tolist() == [5, 6, 7, 8, 9, 10] and others.tolist() == [4, 5, 6, 7, 8, 9]
    assert [len(part) for part in lang.gram_numbers(TextView("abc").codes)] == [0, 0]


def test_pairs_and_runs_tell_prose_from_soup() -> None:
    prose, noise = measures(GOOD_START), measures(soup(3))
    assert prose["known_pairs"] > 0.5 > 0.2 > noise["known_pairs"]
    assert prose["known_grams"] > 0.9 > 0.6 > noise["known_grams"]


def test_brackets_without_a_partner_are_counted_by_kind() -> None:
    filler = "the boats had gone home and nobody asked him where they were "
    assert measures(filler * 2 + "(so it was [as ever] in {autumn})")["unmatched"] == 0
    tokens = len(TextView(filler * 2 + "( ( ] }").words)
    assert measures(filler * 2 + "( ( ] }")["unmatched"] == pytest.approx(4 / tokens)


def test_hex_dumps_weigh_nothing() -> None:
    assert measures(f"{HEX_DUMP}\n{GOOD_START}")["known_grams"] > 0.9
    assert grade(HEX_DUMP).label == "ok"


@pytest.mark.parametrize(
    "item", ['<li><a href="/p/1" class="p">First</a></li>\n', "    padding-left: 10px;\n"]
)
def test_code_that_repeats_exactly_is_a_loop_only_where_the_server_cut_it(item: str) -> None:
    text = "Here is the page:\n" + item * 5
    assert grade(text[:-6], finish_reason="length").label == "degenerate"
    assert grade(text, finish_reason="stop").label == "ok"
