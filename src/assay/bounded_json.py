"""JSON from outside, within bounds: depth, digits, size, halves of surrogate pairs.

`json` accepts what breaks the code behind it: lists a thousand deep end recursive walks, an integer
of 401 digits fits no float, a lone surrogate fits no encoding. `loads` is `json.loads` without
these: it raises `BoundsError`, a `ValueError` with one clear line, so a caller that catches
`ValueError` handles broken JSON and hostile JSON alike.

>>> loads('{"a": [1, 2.5, "b"]}')
{'a': [1, 2.5, 'b']}
>>> loads("[" * 5000 + "]" * 5000)
Traceback (most recent call last):
    ...
assay.bounded_json.BoundsError: JSON nested deeper than 200 levels
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

MOST_DEPTH = 200
"""Lists and objects within one another. Real documents have under 30 levels."""
MOST_DIGITS = 40
"""Digits of an integer; 128 bits have 39."""

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_BRACKETS = re.compile(r"[\[{]+|[\]}]+")
_LONG_NUMBER = re.compile(rf"\d{{{MOST_DIGITS + 1}}}")
_HALF = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_LONE = re.compile(r"[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")

Numbers = Literal["refuse", "null"]
Halves = Literal["replace", "keep"]


class BoundsError(ValueError):
    """A JSON text beyond the bounds: too deep, too long, or with too large a number."""


def loads(
    text: str | bytes,
    *,
    strict: bool = True,
    most_bytes: int | None = None,
    numbers: Numbers = "refuse",
    halves: Halves = "replace",
) -> Any:
    """Read one JSON value within the bounds.

    Args:
        text: The JSON text; bytes are UTF-8, with or without a byte order mark.
        strict: Whether raw line breaks and control characters within strings are errors.
        most_bytes: The longest text that is read, in bytes or code points; None for any.
        numbers: What an integer of more than `MOST_DIGITS` digits becomes: an error, or None.
        halves: What a lone half of a surrogate pair becomes: U+FFFD, or itself, for a caller that
            joins the pieces of a stream with `join_halves`.

    Returns:
        The value, as `json.loads` gives it.

    Raises:
        BoundsError: The text is too long or too deep, or holds a number beyond the bounds.
        ValueError: The text is no JSON (`json.JSONDecodeError`) or no UTF-8.
    """
    if most_bytes is not None and len(text) > most_bytes:
        raise BoundsError(f"JSON of more than {most_bytes:,} bytes")
    if isinstance(text, bytes | bytearray):
        text = bytes(text).decode("utf-8-sig")
    decoder = Decoder(strict=strict, numbers=numbers, halves=halves)
    start = len(text) - len(text.lstrip(" \t\r\n\ufeff"))
    value, end = decoder.value_at(text, start)
    if text[end:].strip(" \t\r\n"):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


class Decoder:
    """Reads the JSON values in a text one after the other; the options are those of `loads`."""

    def __init__(
        self, *, strict: bool = True, numbers: Numbers = "refuse", halves: Halves = "replace"
    ) -> None:
        self._plain = json.JSONDecoder(strict=strict)
        self._careful = json.JSONDecoder(
            strict=strict, parse_int=_bounded_int if numbers == "refuse" else _int_or_none
        )
        self._halves = halves

    def value_at(self, text: str, start: int) -> tuple[Any, int]:
        """Read the value that begins at `start`.

        Returns:
            The value, and the position after it.

        Raises:
            BoundsError: The value is beyond the bounds.
            json.JSONDecodeError: No JSON value begins there; its `pos` says how far it was read.
        """
        try:
            value, end = self._plain.raw_decode(text, start)
        except RecursionError:
            raise BoundsError(_TOO_DEEP) from None
        except json.JSONDecodeError:
            raise
        except ValueError:  # more digits than Python turns into an integer
            value, end = self._again(text, start)
        written = text[start:end]
        if (
            max(written.count("["), written.count("{")) > MOST_DEPTH // 2
            and depth(written) > MOST_DEPTH
        ):
            raise BoundsError(_TOO_DEEP)
        if _LONG_NUMBER.search(written):
            value, end = self._again(text, start)
        if self._halves == "replace" and _HALF.search(written):
            value = _mended(value)
        return value, end

    def _again(self, text: str, start: int) -> tuple[Any, int]:
        try:
            return self._careful.raw_decode(text, start)
        except RecursionError:
            raise BoundsError(_TOO_DEEP) from None


_TOO_DEEP = f"JSON nested deeper than {MOST_DEPTH} levels"


def depth(text: str) -> int:
    """How deep lists and objects lie within one another in a JSON text, in linear time.

    >>> depth('{"a": [[1], "[[["]}')
    3
    """
    level = deepest = 0
    for brackets in _BRACKETS.finditer(_STRING.sub("", text)):
        run = brackets.group()
        level += len(run) if run[0] in "[{" else -len(run)
        deepest = max(deepest, level)
    return deepest


def join_halves(text: str) -> str:
    """Join halves of surrogate pairs that are neighbours; a half without a partner becomes U+FFFD.

    >>> join_halves("\\ud83d" + "\\ude00") == "\\U0001f600", join_halves("a\\ud83d")
    (True, 'a\ufffd')
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        lone = _LONE.sub("\ufffd", text)
        return lone.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    return text


def _mended(value: Any) -> Any:
    """A value with `join_halves` of every string in it. Its depth is bounded."""
    if isinstance(value, str):
        return join_halves(value)
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        return {join_halves(key): _mended(item) for key, item in value.items()}
    return value


def _bounded_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS + 1:
        raise BoundsError(f"JSON with an integer of {len(digits):,} digits")
    return int(digits)


def _int_or_none(digits: str) -> int | None:
    return int(digits) if len(digits) <= MOST_DIGITS + 1 else None
