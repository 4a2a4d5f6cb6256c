"""Find the words that make readers read twice, in the docs and in docstrings and comments.

    python docs/lint_words.py [FILE…]

Each line of `WORDS` names a word and why it is not used. Code is left alone, in sources and in
pages: names, strings, fenced blocks and text between backticks.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

WORDS = {
    "whatever": "hides what is meant: name it, or write *any* or *regardless of*",
    "nobody": "a person where none is meant: write *unknown*, *unused*, *none*",
    "everybody": "a person where none is meant: name who or what it is",
    "somebody": "a person where none is meant: name who or what it is",
    "whom": "makes a sentence of two: write a second sentence",
    "than which": "turns the comparison round: write *A may be no worse than B*",
    "next to no": "says neither none nor how much: write *hardly any*, or the figure",
    "hair apart": "a picture: write *nearly equal*, or the figure",
    "held against": "a picture, and of a judge: write *compared with* or *checked against*",
    "hold against": "a picture, and of a judge: write *compare with* or *check against*",
    "vouches for": "a picture: write *has a digest of*, *confirms*",
    "cry wolf": "a picture: write *false alarm*",
    "lies in the": "a place where none is meant: write *is in*",
}
"""Words and phrases with the reason why each is not used."""

_PATTERN = re.compile(
    r"\b(?:" + "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in WORDS) + r")\b", re.I
)
_FENCE = re.compile(r"^[ \t]*(```|~~~).*?^[ \t]*\1[ \t]*$", re.M | re.S)
_CODE = re.compile(r"`[^`\n]*`")


def files() -> list[Path]:
    """The pages of both distributions, and the sources whose docstrings and comments are read."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("lab/docs/**/*.md")]
    return sorted([*pages, *ROOT.glob("src/**/*.py"), *ROOT.glob("lab/src/**/*.py")])


def found(path: Path) -> list[tuple[int, str]]:
    """Lines (from 1) of a page or a source with the words that are not used, in lower case."""
    text = path.read_text(encoding="utf-8")
    parts = english_of_source(text) if path.suffix == ".py" else [(1, _without_fences(text))]
    return sorted(
        (line + part.count("\n", 0, match.start()), " ".join(match[0].lower().split()))
        for line, part in parts
        for match in _PATTERN.finditer(_CODE.sub(lambda code: " " * len(code[0]), part))
    )


def english_of_source(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, texts below a constant, and comments of a program, each with its first line."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _without_fences(text: str) -> str:
    return _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)


def main(arguments: list[str]) -> int:
    """Print `FILE:LINE: word: why` for every word that is not used; 1 if there is one."""
    hits = [
        f"{path}:{line}: {word}: {WORDS[word]}"
        for path in ([Path(name) for name in arguments] or files())
        for line, word in found(path)
    ]
    print("\n".join(hits), end="\n" if hits else "")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
