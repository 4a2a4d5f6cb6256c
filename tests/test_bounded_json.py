"""JSON within bounds: depth, digits, size, halves of surrogate pairs; equal to `json` otherwise."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay import bounded_json
from assay.bounded_json import BoundsError, Decoder, depth, join_halves

texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)


@given(values, st.booleans())
def test_ordinary_json_is_read_as_json_reads_it(value: object, ascii_only: bool) -> None:
    written = json.dumps(value, ensure_ascii=ascii_only)
    assert bounded_json.loads(written) == value
    assert bounded_json.loads(written.encode()) == value


def test_brackets_in_strings_are_no_depth() -> None:
    text = json.dumps(["[" * 1000 + '\\"[' + "{" * 1000])
    assert depth(text) == 1
    assert bounded_json.loads(text) == json.loads(text)


@pytest.mark.parametrize("levels", [200, 201, 990, 5000, 200_000])
def test_depth_is_bounded(levels: int) -> None:
    text = "[" * levels + "]" * levels
    if levels <= bounded_json.MOST_DEPTH:
        assert bounded_json.loads(text) == json.loads(text)
        return
    with pytest.raises(BoundsError, match="nested deeper"):
        bounded_json.loads(text)


def test_large_integers_are_refused_or_null() -> None:
    huge = "1" + "0" * 400
    with pytest.raises(BoundsError, match="401 digits"):
        bounded_json.loads(f'{{"a": {huge}}}')
    assert bounded_json.loads(f'{{"a": {huge}, "b": 7}}', numbers="null") == {"a": None, "b": 7}
    assert bounded_json.loads(f'"{huge}"') == huge
    assert bounded_json.loads(f"0.{huge}") == 0.1
    assert bounded_json.loads("9" * 40) == int("9" * 40)


def test_size_is_bounded() -> None:
    assert bounded_json.loads("[1]", most_bytes=3) == [1]
    with pytest.raises(BoundsError, match="more than 2 bytes"):
        bounded_json.loads("[1]", most_bytes=2)


def test_halves_of_surrogate_pairs_fit_an_encoding_or_are_kept_for_the_next_piece() -> None:
    assert bounded_json.loads(r'{"\ud800": ["\udc00a", "\ud83d\ude00"]}') == {
        "\ufffd": ["\ufffda", "\U0001f600"]
    }
    pieces = [bounded_json.loads(half, halves="keep") for half in (r'"a\ud83d"', r'"\ude00b"')]
    assert join_halves("".join(pieces)) == "a\U0001f600b"
    assert join_halves("plain \U0001f600") == "plain \U0001f600"
    assert bounded_json.loads(r'"\\ud800"') == r"\ud800"


@pytest.mark.parametrize("text", ["", "{", "[1,]", "nul", '{"a" 1}', "[1] [2]", '"\n"'])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        bounded_json.loads(text)


def test_values_follow_one_another() -> None:
    decoder, text = Decoder(), '{"a": 1}[2]"c"'
    first, at = decoder.value_at(text, 0)
    second, at = decoder.value_at(text, at)
    assert (first, second, decoder.value_at(text, at)) == ({"a": 1}, [2], ("c", len(text)))


@pytest.mark.parametrize("text", ["[" * 4_000_000, "1" * 4_000_000, '{"a":' * 1_000_000])
def test_hostile_texts_cost_linear_time(text: str) -> None:
    """4 MB of each take seconds, where a quadratic reader would need hours."""
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"nested|digits"):
        bounded_json.loads(text)
    assert time.monotonic() - begun < 60


def test_brackets_within_a_long_string_cost_linear_time() -> None:
    begun = time.monotonic()
    assert bounded_json.loads('"' + "[\\\\" * 1_000_000 + '"') == "[\\" * 1_000_000
    assert time.monotonic() - begun < 60
