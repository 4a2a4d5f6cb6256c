"""Figures of speculation on pages of any form, and none on pages about something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_samples import SAMPLES, UNRELATED, Sample

from assay.errors import AssayError
from assay.speculation.pages import read_json_page, read_page
from assay.speculation.pages.cells import read_cell
from assay.speculation.pages.words import Role, meaning
from assay.speculation.spec import examine
from assay.verdict import Report


def report_of(tmp_path: Path, text: str) -> Report:
    path = tmp_path / "page"
    path.write_text(text)
    return examine([str(path)])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_what_a_person_would_read_is_read(sample: Sample, tmp_path: Path) -> None:
    report = report_of(tmp_path, sample.text)
    record = report.results["record"]
    assert report.exit_code == sample.exit_code, report.results["evidence"]
    for name, want in (
        ("accepted", sample.accepted),
        ("drafted", sample.drafted),
        ("acceptance_rate", sample.rate),
        ("tokens_per_step", sample.length),
    ):
        if want is not None:
            assert record[name] == pytest.approx(want, abs=0.006), name
    if sample.first is not None:
        assert record["per_position"][0] == pytest.approx(sample.first, abs=0.001)
    if sample.accepted is None:
        assert "printed, without counts" in report.results["evidence"]["reason"]


@pytest.mark.parametrize("text", UNRELATED, ids=lambda t: t[:30].strip())
def test_pages_about_something_else_are_not_read(text: str, tmp_path: Path) -> None:
    report = report_of(tmp_path, text)
    assert report.results["health"] in ("insufficient", "off", "unknown")
    assert report.results["record"]["engine"] is None
    assert report.exit_code == 3


def test_every_reading_says_from_which_words_it_came(tmp_path: Path) -> None:
    text = "| MTP, k = 2 | |\n|---|---|\n| Draft acceptance rate | 61.5% |\n| tok/s | 40 |\n"
    record = report_of(tmp_path, text).results["record"]
    assert record["read_from"] == ["Draft acceptance rate: 61.5% (table at line 1, column 2)"]
    assert record["definitions"].keys() == {"words"}


def test_a_label_that_is_not_understood_is_quoted_and_not_guessed(tmp_path: Path) -> None:
    text = "| draft-n-max | T/s | draft rate |\n|---|---|---|\n| 1 | 47.7 | 0.47 |\n| 2 | 45.5 | 0.31 |\n"  # noqa: E501
    report = report_of(tmp_path, text)
    assert (report.results["health"], report.exit_code) == ("unknown", 3)
    assert any("draft rate" in u["line"] for u in report.results["unrecognised"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "MTP draft acceptance rate: 2.41\ntokens per second: 3\n",
            "a rate above 1 without a unit",
        ),
        ("| accepted draft tokens | draft tokens |\n|--|--|\n| 90 | 40 |\n", "more than drafted"),
        (
            "| draft acceptance rate | accepted draft tokens | draft tokens |\n|--|--|--|\n"
            "| 90% | 10 | 100 |\n",
            "rate and counts disagree",
        ),
        ("EAGLE decoding\nacceptance length: 0.61\n", "no step emits less than one token"),
        ("speculative tokens\nmean accepted tokens: 1.10\n", "with the bonus token or without?"),
    ],
)
def test_what_may_mean_two_things_is_not_read(text: str, why: str) -> None:
    page = read_page(text)
    assert not page.observations, why
    assert page.unread


def test_units_are_those_of_the_whole_column() -> None:
    page = read_page("model,draft acceptance rate\na,61.0\nb,0.9\n")
    assert [o.printed.acceptance_rate for o in page.observations] == [0.61, pytest.approx(0.009)]
    page = read_page("model,draft acceptance rate\na,0.61\nb,0.9\n")
    assert [o.printed.acceptance_rate for o in page.observations] == [0.61, 0.9]


def test_a_row_of_sums_is_not_added_to_what_it_sums() -> None:
    rows = "| run | accepted draft tokens | draft tokens |\n|--|--|--|\n| a | 30 | 60 |\n| b | 50 | 90 |\n"  # noqa: E501
    for last in ("| total | 80 | 150 |\n", "| both | 80 | 150 |\n"):
        page = read_page(rows + last)
        assert sum(o.counts.drafted or 0 for o in page.observations) == 150


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("Acceptance rate (%)", Role.RATE),
        ("avg_draft_acceptance_rate", Role.RATE),
        ("draftAcceptanceRate", Role.RATE),
        ("spec_accept_length", Role.LENGTH),
        ("Mean acceptance length", Role.LENGTH),
        ("Decoded tokens/iteration", Role.LENGTH),
        ("#Mean accepted tokens", Role.MEAN_ACCEPTED),
        ("num_accepted_tokens", Role.ACCEPTED),
        ("total_draft_tokens", Role.DRAFTED),
        ("Draft tokens accepted", Role.ACCEPTED),
        ("verify steps", Role.DRAFTS),
        ("Position 3", Role.POSITION),
        ("acceptance rate per position", Role.POSITIONS),
        ("num_speculative_tokens", Role.DEPTH),
        ("Accepted throughput (tok/s)", None),
        ("train_accept_rate", None),
        ("target acceptance rate", None),
        ("price", None),
    ],
)
def test_the_vocabulary(label: str, role: Role | None) -> None:
    found = meaning(label)
    assert (found.role if found else None) is role


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,307", 1307),
        ("~2.9x", 2.9),
        (".61", 0.61),
        ("12:30", None),
        ("v1.2.3", None),
        ("-", None),
    ],
)
def test_cells(text: str, value: float | None) -> None:
    found = read_cell(text)
    assert (found.value if found else None) == value


LABELS = st.sampled_from(
    [
        "price",
        "city",
        "rain",
        "latency",
        "throughput",
        "model",
        "date",
        "score",
        "MMLU",
        "users",
        "tokens",
        "TTFT",
        "rank",
        "visitors",
    ]
)
CELLS = st.one_of(
    st.integers(-5, 10**6).map(str),
    st.floats(0, 1).map(lambda x: f"{x:.3f}"),
    st.floats(0, 100).map(lambda x: f"{x:.1f}%"),
    st.sampled_from(["", "n/a", "GPT", "3/4", "2026-01-01"]),
)
MARKS = st.sampled_from(["|", ",", "\t", ";", "  ", ": ", "│"])


@settings(max_examples=300, deadline=None)
@given(MARKS, st.lists(st.tuples(LABELS, CELLS, CELLS), min_size=1, max_size=6))
def test_ordinary_tables_are_never_read_as_drafts(
    mark: str, rows: list[tuple[str, str, str]]
) -> None:
    text = "\n".join(mark.join(row) for row in rows)
    assert not read_page(text).observations


WORDS = st.sampled_from(
    [
        "acceptance rate", "accept length", "draft tokens", "accepted", "position 0", "MTP", "τ",
        "position 5-2", "per position", "mean", "[", "]", "|", "61%", "1e999", "9" * 401, "0.5/0.2",
        "1307/1944", "\n", "\t", ",", ":", "=", "of", "{", "}", "'", '"', "nan", "-1", "é", "\ud7ff",  # noqa: E501
        "p99", "| --- |", "total", "tokens/step", "accept_lengths: [1, 2, 3]",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(WORDS, max_size=40), st.sampled_from(["", " ", "\n", " | "]))
def test_no_page_ends_in_a_bug(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], mark: str
) -> None:
    text = mark.join(words)
    path = tmp_path_factory.getbasetemp() / "page.txt"
    path.write_text(text)
    try:
        report = examine([str(path)])
    except AssayError as error:
        assert error.finding_id.startswith("speculation.source")
    else:
        json.loads(json.dumps(report.to_json(), default=str))
        for o in read_page(text).observations:
            assert o.source
            assert o.printed.acceptance_rate is None or 0 <= o.printed.acceptance_rate <= 1


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WORDS),
        lambda v: st.lists(v, max_size=5)
        | st.dictionaries(
            st.sampled_from(
                ["accept_lengths", "acceptance_rate", "accept_length", "mean", "draft_tokens",
                 "accepted_tokens", "per_position_acceptance_rates", "loss", "content", "p99"]
            ),
            v,
            max_size=6,
        ),
    )
)  # fmt: skip
def test_no_json_ends_in_a_bug(value: object) -> None:
    for o in read_json_page(value).observations:
        assert o.counts.accepted is None or o.counts.accepted >= 0
