"""The Markdown document, read back by an independent CommonMark parser."""

from __future__ import annotations

import pytest
from markdown_it import MarkdownIt
from report_samples import ATTACKS, full

from assay.report import markdown
from assay.report.text import one_line, visible
from assay.verdict import Finding, Quote, Report, Severity, Table, Verdict


def tokens(text):
    found = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        found += [token, *(token.children or ())]
    return found


def words(text):
    """What a reader sees of one line of Markdown."""
    return "".join(
        t.content for t in tokens(text) if t.type in ("text", "code_inline") and t.children is None
    )


def test_the_document_of_a_failing_report():
    text = markdown.render(full())
    found = tokens(text)
    fences = [t.content for t in found if t.type == "fence"]
    assert text.startswith("## ✗ assay check: FAIL\n\n14 of 18 texts degenerate")
    assert (
        "| decode speed | ~~183.2 tok/s~~ | **invalid**: 14 of 18 timed texts degenerate |" in text
    )
    assert any(
        c.startswith("vllm serve ./SmolLM2-135M --tensor") and c.count("\n") == 1 for c in fences
    )
    assert any("⟦goes wrong at character 219⟧the the" in c for c in fences)
    assert (
        sum(t.type == "table_open" for t in found) == 3
    )  # figures, a table, a chart as its numbers
    assert sum(t.type == "s_open" for t in found) == 1
    assert [t.attrs["href"] for t in found if t.type == "link_open"] == [
        "https://docs.example.org/coherence"
    ]
    assert "*(no text)*" in text


@pytest.mark.parametrize("attack", ATTACKS)
def test_prose_reads_as_the_text_it_was_given(attack):
    written = markdown.prose(attack)
    assert "\n" not in written
    assert words(written).replace("\u200b", "") == one_line(attack)
    kinds = {t.type for t in tokens(written)}
    assert kinds <= {"paragraph_open", "inline", "text", "text_special", "paragraph_close"}


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_reads_as_the_text_it_was_given(attack):
    spans = [t.content for t in tokens(markdown.code(attack)) if t.type == "code_inline"]
    assert spans == [one_line(attack)]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_fence_holds_the_text_it_was_given(attack):
    text = visible(attack)
    fences = [
        t.content for t in tokens(f"before\n\n{markdown.fence(text)}\n\nafter") if t.type == "fence"
    ]
    assert fences == [f"{text}\n"]


def test_a_fence_is_longer_than_any_inside():
    assert markdown.fence("```````").startswith("````````text\n")
    assert markdown.fence("plain").startswith("```text\n")


def test_mentions_and_references_name_nobody():
    text = markdown.prose("ask @octocat about #12 and GH-34, user@example.org")
    assert (
        "@octocat" not in text
        and "#12" not in text
        and "GH-34" not in text
        and "@example" not in text
    )
    assert (
        text.replace("\u200b", "").replace("\\", "")
        == "ask @octocat about #12 and GH-34, user@example.org"
    )


def test_cells_keep_their_columns():
    table = Table("t", ("a|b", "c"), (("1 | 2", "x\ny"), ("`|`", "\\|")), frozenset({1}))
    text = markdown.render(Report("check", Verdict.PASS, blocks=(table,)))
    found = tokens(text)
    assert sum(t.type == "td_open" for t in found) == 4
    assert sum(t.type == "th_open" for t in found) == 2
    cells = [found[i + 1].content for i, t in enumerate(found) if t.type == "td_open"]
    assert cells[0].replace("\\", "") == "1 | 2"


def test_a_remedy_keeps_its_words_and_its_command_apart():
    finding = Finding(
        "server.x", Severity.WARNING, "t", remedies=("set `x` and run `assay check --samples 9`",)
    )
    text = markdown.render(Report("check", Verdict.PASS, findings=(finding,)))
    assert "set `x` and run\n\n```text\nassay check --samples 9\n```" in text


def test_a_million_characters_are_cut_visibly():
    quote = Quote("q", "x" * 1_000_000)
    finding = Finding(
        "server.x", Severity.WARNING, "t" * 1_000_000, "d" * 1_000_000, {"e": "e" * 1_000_000}
    )
    text = markdown.render(Report("check", Verdict.PASS, findings=(finding,), blocks=(quote,)))
    # GitHub takes at most 65,536 characters.
    assert len(text) < 20_000
    assert "999,400 characters not shown" in text
