"""The linter of words: what it reads, what it leaves alone, and that pages and sources pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from lint_words import WORDS, files, found, main

ROOT = Path(__file__).parents[1]


def test_pages_docstrings_and_comments_pass() -> None:
    assert [(path.name, *hit) for path in files() for hit in found(path)] == []


def test_pages_and_sources_of_both_distributions_are_read() -> None:
    read = {path.relative_to(ROOT).as_posix() for path in files()}
    assert read >= {
        "README.md",
        "docs/check.md",
        "docs/methods/fidelity.md",
        "lab/docs/kv.md",
        "src/assay/verdict.py",
        "lab/src/assay_lab/verbs.py",
    }


def test_make_lint_runs_it() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2]
    assert "docs/lint_words.py" in recipe.partition("\n\n")[0]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_found_in_a_page_with_its_line(word: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\nIt is {word.upper()} here.\n")
    assert found(page) == [(3, word)]


def test_code_of_a_page_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Take `--whatever`.\n\n```console\n$ run whatever\n```\n\nThen nobody\n")
    assert found(page) == [(7, "nobody")]


def test_a_phrase_is_found_across_the_end_of_a_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A value that is held\nagainst another.\n")
    assert found(page) == [(1, "held against")]


def test_docstrings_and_comments_of_a_source_are_read_and_its_strings_are_not(
    tmp_path: Path,
) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        '"""Tells nobody."""\n'
        "\n"
        'text = "nobody"  # whatever it is\n'
        "\n"
        "def nobody():\n"
        '    """One line.\n'
        "\n"
        "    Whatever comes.\n"
        '    """\n'
    )
    assert found(source) == [(1, "nobody"), (3, "whatever"), (8, "whatever")]


def test_it_names_file_line_word_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("To whom?\n")
    assert main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:1: whom: {WORDS['whom']}\n"


def test_without_a_hit_it_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("A plain sentence.\n")
    assert main([str(page)]) == 0
    assert capsys.readouterr().out == ""
