"""The kind of text that a token is part of, told from its decoded text alone."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


class TokenClass(StrEnum):
    """Classes of tokens, as a breakdown lists them."""

    WORDS = "words"
    """Letters of the Latin script, with what holds words together (' - .)."""
    DIGITS = "digits"
    """Numbers, with the marks within them."""
    PUNCTUATION = "punctuation"
    """Marks and symbols of prose."""
    CODE = "code"
    """What prose does not have: operators, brackets other than (), names such as snake_case and
    camelCase.
    """
    OTHER_SCRIPTS = "other scripts"
    """Letters of any other script, also a part of a character (a lone byte of UTF-8)."""
    SPECIAL = "whitespace and special"
    """White space, control characters, and tokens such as <|endoftext|>."""


# A whole token in angle brackets or brackets of a kind that tokenizers use for themselves, and byte
# tokens.
_SPECIAL = re.compile(
    r"<\|[^|<>]*\|>|</?[a-z_]+\d*>|\[(?:BOS|EOS|PAD|UNK|SEP|CLS|MASK|/?INST)\]|<0x[0-9A-F]{2}>"
)


_CODE_MARKS = frozenset("{}[]<>=_\\|^~@#$&`*+")


_CODE_PAIRS = ("()", "::", "//", "/*", "--", "();", ").", "')", '")', "('", '("', "/>", "%s", "%d")


_CAMEL = re.compile(r"[a-z][A-Z]|[A-Z]{2,}[a-z]{2,}")


_NUMBER_MARKS = frozenset(".,:/-+%")


@lru_cache(maxsize=1 << 16)
def token_class(text: str) -> TokenClass:
    """The class of one token, given as its decoded text (leading space included)."""
    core = text.strip()
    if not core or _SPECIAL.fullmatch(core) or all(_is_control(c) for c in core):
        return TokenClass.SPECIAL
    if any(_is_foreign(c) for c in core):
        return TokenClass.OTHER_SCRIPTS
    letters = any(c.isalpha() for c in core)
    digits = any(c.isnumeric() for c in core)
    if letters:
        return TokenClass.CODE if _is_name(core, digits) else TokenClass.WORDS
    if digits:
        whole = all(c.isnumeric() or c in _NUMBER_MARKS for c in core)
        return TokenClass.DIGITS if whole else TokenClass.CODE
    marked = any(c in _CODE_MARKS for c in core) or any(pair in core for pair in _CODE_PAIRS)
    # A run of one mark (----, ****, ####) is a rule or a heading in prose; two of them are an
    # operator.
    run = len(core) > 2 and len(set(core)) == 1
    return TokenClass.CODE if marked and not run else TokenClass.PUNCTUATION


def token_classes(texts: Iterable[str]) -> list[TokenClass]:
    """The classes of many tokens."""
    return [token_class(text) for text in texts]


def _is_name(core: str, digits: bool) -> bool:
    """Whether something with Latin letters is code rather than a word or a part of one."""
    return digits or any(c in _CODE_MARKS for c in core) or "(" in core or bool(_CAMEL.search(core))


def _is_foreign(c: str) -> bool:
    """A letter or a mark outside the Latin script, or the sign for a broken character."""
    if c == "\ufffd":
        return True
    category = unicodedata.category(c)
    if category[0] not in "LM":
        return False
    if ord(c) < 0x250:
        return False
    # Combining marks (category M) up to U+036F belong to Latin; other letters say their script in
    # their name.
    return not (0x300 <= ord(c) < 0x370 or "LATIN" in unicodedata.name(c, ""))


def _is_control(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cf", "Co", "Cn", "Zs", "Zl", "Zp")
