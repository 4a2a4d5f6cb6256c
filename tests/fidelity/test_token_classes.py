"""Classes of tokens: what belongs to each, and what looks like it and does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.fidelity.breakdown.token_class import TokenClass, token_class, token_classes

EXAMPLES = {
    TokenClass.WORDS: [
        "the",
        " The",
        "ing",
        " don't",
        "é",
        " naïve",
        "U",
        " USA",
        "-based",
        " e.g",
        "ﬁ",
        "ß",
        "McDonald"[:2],
    ],
    TokenClass.DIGITS: ["7", " 2024", "3.14", "10,000", "12:30", "²", " 50%", "-1", "½", "٣"],
    TokenClass.PUNCTUATION: [
        ".",
        ",",
        " (",
        ")",
        '."',
        "—",
        " …",
        "''",
        "?!",
        "----",
        "****",
        ";",
        " -",
        "'",
        "§",
        "€",
        "“",
        "/",
        "###",
    ],
    TokenClass.CODE: [
        "{",
        "}",
        " ==",
        "()",
        "();",
        " snake_case",
        "camelCase",
        "__init__",
        "->",
        "=>",
        "&&",
        "::",
        "[i]",
        "x1",
        " print(",
        "\\n",
        "#include",
        "<div>"[:4],
        "+=",
        "*",
        "$",
        "HTMLParser",
        "utf8",
    ],
    TokenClass.OTHER_SCRIPTS: [
        "д",
        " привет",
        "中",
        "の",
        "한",
        "α",
        "م",
        "\ufffd",
        "\ufffd\ufffd",
        "हि",
        "ไ",
    ],
    TokenClass.SPECIAL: [
        "",
        " ",
        "\n",
        "\n\n",
        "\t\t",
        "<|endoftext|>",
        "<bos>",
        "<s>",
        "</s>",
        "<unused12>",
        "[PAD]",
        "<0x0A>",
        "\x00",
        "\u200b",
        "\u00a0",
    ],
}


@pytest.mark.parametrize(
    ("text", "expected"), [(text, kind) for kind, texts in EXAMPLES.items() for text in texts]
)
def test_examples(text: str, expected: TokenClass) -> None:
    assert token_class(text) is expected


@given(st.text(max_size=6))
def test_every_text_has_a_class_whatever_space_comes_before(text: str) -> None:
    assert isinstance(token_class(text), TokenClass)
    if text.strip():
        assert token_class(" " + text) is token_class(text)


@given(
    st.text(st.characters(min_codepoint=0x400, max_codepoint=0x4FF, categories=["L"]), min_size=1)
)
def test_cyrillic_is_another_script(text: str) -> None:
    assert token_class(text) is TokenClass.OTHER_SCRIPTS


def test_many_at_once() -> None:
    assert token_classes(["a", "1"]) == [TokenClass.WORDS, TokenClass.DIGITS]
