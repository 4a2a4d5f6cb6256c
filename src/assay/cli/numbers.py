"""Lists of small numbers on the command line: `0,1,28-29`."""

from __future__ import annotations

_MOST = 9999
"""No model has so many layers; a slip such as 0-1000000000 should not fill the memory."""


def numbers_of(text: str, option: str, example: str) -> tuple[int, ...]:
    """`0,1,28-29` as numbers, each once, in the order written; UsageError where it is no such list."""
    from assay.errors import UsageError

    found: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        lo, dash, hi = (side.strip() for side in part.partition("-"))
        last = hi if dash else lo
        if not (_is_number(lo) and _is_number(last)) or not int(lo) <= int(last) <= _MOST:
            raise UsageError(f"{option} {text!r}: {part!r} is no number or range", remedy=f"write {example}")
        found += range(int(lo), int(last) + 1)
    return tuple(dict.fromkeys(found))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9
