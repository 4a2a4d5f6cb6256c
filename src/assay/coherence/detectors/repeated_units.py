"""What a repeated unit is: blanks, marks, numbers, words, a sentence; and the name of its loop."""

from __future__ import annotations

import re
from enum import StrEnum

from assay.coherence.detection import ENDLESS_BLANKS, WEAK, Family

_BLANK = re.compile(r"(?:\s|&nbsp;|&#160;|<br ?/?>)*")
_WORD = re.compile(r"[^\W\d_]+")
_DATA = re.compile(r"(?:0x|[\s\d.,;:|+/\\()\[\]{}<>\"'%a-fA-F=*-])+")
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff]")
_SENTENCE_END = re.compile(r"[.!?。！？]|\n")


class UnitClass(StrEnum):
    """Blanks; marks without letters and digits; numbers; words."""

    BLANK = "blank"
    DECORATION = "decoration"
    DATA = "data"
    WORDS = "words"


def classify(unit: str) -> UnitClass:
    """The class of a repeated unit."""
    if _BLANK.fullmatch(unit):
        return UnitClass.BLANK
    if not any(c.isalnum() for c in unit):
        return UnitClass.DECORATION
    if any(c.isdigit() for c in unit) and _DATA.fullmatch(unit):
        return UnitClass.DATA
    return UnitClass.WORDS


def is_sentence(unit: str) -> bool:
    """Whether the unit holds an end mark or a line break, so that a text may stop after it."""
    return _SENTENCE_END.search(unit) is not None


def word_count(unit: str) -> int:
    """Words in the unit."""
    return len(_WORD.findall(unit))


def loop_kind(unit: str) -> str:
    """The name of a loop of `unit`; the six patterns that the field's tool looks for keep names of
    their own.
    """
    marks = "".join(unit.split()).lower()
    if not marks:
        return "newline_loop" if "\n" in unit else "blank_flood"
    if set(marks) == {"*"}:
        return "asterisk_attractor"
    if classify(unit) is UnitClass.DECORATION:
        return "delimiter_loop"
    words = _WORD.findall(unit.lower())
    if marks == "the":
        return "the_the_the"
    if marks == "a":
        return "a_a_a"
    if is_sentence(unit.strip().rstrip(".!?。！？")) or (is_sentence(unit) and len(words) > 2):
        return "sentence_loop"
    one_word = (
        len(words) <= 1 and len(marks) < 24 and (len(marks) <= 2 or not _UNSPACED.search(marks))
    )
    return "single_token_loop" if one_word else "phrase_loop"


def family_of(kind: str) -> tuple[str, tuple[str, ...]]:
    """The family and causes of a loop or a flood by its kind: blanks and marks are no loops, since
    no model that is whole ends there.
    """
    if kind in ("newline_loop", "blank_flood"):
        return (Family.MARKS if kind == "newline_loop" else Family.FLOOD), (ENDLESS_BLANKS, WEAK)
    if kind in ("asterisk_attractor", "delimiter_loop", "few_characters"):
        return Family.MARKS, ()
    return (Family.FLOOD if kind == "single_char_flood" else Family.LOOP), ()
