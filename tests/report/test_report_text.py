from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.report.text import (
    evidence_items,
    excerpt,
    is_command,
    one_line,
    safe_json,
    shorten,
    split_code,
    visible,
)
from assay.verdict import Quote


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("plain text, äöü ß €", "plain text, äöü ß €"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("\x1b[2J", "⟨ESC⟩[2J"),
        ("a\x00b\rc\x7f", "a⟨NUL⟩b⟨CR⟩c⟨U+007F⟩"),
        ("\x9b31m", "⟨U+009B⟩31m"),
        ("\u202eabc\u2066", "⟨U+202E⟩abc⟨U+2066⟩"),
        ("zero\u200bwidth\ufeff", "zero⟨U+200B⟩width⟨U+FEFF⟩"),
        ("line\u2028paragraph\u2029", "line⟨U+2028⟩paragraph⟨U+2029⟩"),
        ("soft\xadhyphen", "soft⟨U+00AD⟩hyphen"),
        ("\ud83d", "\ufffd"),
        ("\U000e0041", "⟨U+E0041⟩"),
        ("👩‍👩‍👧", "👩‍👩‍👧"),
        ("می‌خواهم", "می‌خواهم"),
        ("日本語 한국어 ไทย", "日本語 한국어 ไทย"),
    ],
)
def test_visible_writes_out_what_a_reader_would_obey_and_leaves_every_script_alone(raw, shown):
    assert visible(raw) == shown


@given(st.text(st.characters()))
def test_visible_is_idempotent_and_one_line_has_one_line(text):
    assert visible(visible(text)) == visible(text)
    assert len(one_line(text).splitlines()) <= 1


def test_shorten_says_how_much_it_left_out():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("x" * 1500, 100) == "x" * 100 + "… (1,400 more characters)"


def pieces(text, onset=None, head=10, around=3):
    return [(p.kind, p.text) for p in excerpt(Quote("q", text, onset=onset), head, around)]


def test_excerpt_of_a_short_text_is_the_text():
    assert pieces("abc") == [("text", "abc")]
    assert pieces("") == []
    assert pieces("", onset=0) == []


def test_excerpt_marks_the_onset_inside_the_head():
    assert pieces("good bad", onset=5) == [
        ("text", "good "),
        ("onset", "goes wrong at character 5"),
        ("after", "bad"),
    ]
    assert pieces("bad", onset=0) == [("onset", "goes wrong at character 0"), ("after", "bad")]


def test_excerpt_keeps_the_head_and_the_surroundings_of_a_late_onset():
    text = "h" * 10 + "." * 20 + "abc" + "XYZ" + "." * 1000
    assert pieces(text, onset=33) == [
        ("text", "h" * 10),
        ("gap", "20 characters not shown"),
        ("text", "abc"),
        ("onset", "goes wrong at character 33"),
        ("after", "XYZ"),
        ("gap", "1,000 characters not shown"),
    ]


@given(st.text(), st.none() | st.integers(-5, 60), st.integers(1, 40), st.integers(1, 20))
def test_excerpt_accounts_for_every_character(text, onset, head, around):
    found = excerpt(Quote("q", text, onset=onset), head, around)
    gaps = sum(int(p.text.split()[0].replace(",", "")) for p in found if p.kind == "gap")
    shown = "".join(p.text for p in found if p.kind in ("text", "after"))
    # What is shown, character by character, is the text less the gaps.
    assert len(shown) - len(visible(text)) <= 0
    raw_shown = len(text) - gaps
    assert raw_shown >= min(len(text), head)
    if gaps == 0:
        assert shown == visible(text)
    assert sum(p.kind == "onset" for p in found) == (onset is not None and bool(text))


@pytest.mark.parametrize(
    "command",
    [
        "assay check --help",
        "assay --help",
        "vllm serve ./m --kv-cache-dtype auto",
        "pip install assay",
        "HF_HOME=/tmp assay verify x",
        "curl http://127.0.0.1:8000/v1/models",
        "python -m http.server",
    ],
)
def test_commands_are_recognised(command):
    assert is_command(command)
    assert split_code(command) == [(True, command)]


@pytest.mark.parametrize(
    "text",
    [
        "assay cannot read it",
        "vllm is not running",
        "python version mismatch",
        "--kv-cache-dtype auto",
        "model.safetensors",
        "run assay check again",
        "",
    ],
)
def test_prose_is_no_command(text):
    assert not is_command(text)


def test_backticks_mark_code():
    assert split_code("run `assay check` on `x`, then wait") == [
        (False, "run "),
        (True, "assay check"),
        (False, " on "),
        (True, "x"),
        (False, ", then wait"),
    ]
    assert split_code("a stray ` tick") == [(False, "a stray ` tick")]


def test_an_interval_is_one_value():
    assert evidence_items({"rate": {"value": 0.5, "lo": 0.25, "hi": None}, "gone": {}}) == [
        ("rate", "0.5 [0.25, –]"),
        ("gone", "none"),
    ]


def test_evidence_is_flat_and_written_for_people():
    evidence = {
        "rate": 0.123456789,
        "ok": True,
        "none": None,
        "nan": float("nan"),
        "empty": [],
        "list": [1, 2.5, "x"],
        "inner": {"a": {"b": "c\nd"}},
        "matrix": [[1, 2]],
        "long": "z" * 1000,
        "count": 12,
    }
    assert evidence_items(evidence, limit=20) == [
        ("rate", "0.123457"),
        ("ok", "yes"),
        ("none", "–"),
        ("nan", "–"),
        ("empty", "none"),
        ("list", "1, 2.5, x"),
        ("inner.a.b", "c d"),
        ("matrix", "[[1, 2]]"),
        ("long", "z" * 20 + "… (980 more characters)"),
        ("count", "12"),
    ]


@given(st.text(st.characters()))
def test_safe_json_round_trips_and_hides_nothing(text):
    written = safe_json({"k": text})
    assert json.loads(written) == {"k": text.encode("utf-8", "replace").decode()}
    assert visible(written) == written
