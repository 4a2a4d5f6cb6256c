"""The secrets of this run, which no output may hold.

A server can repeat the key that it was sent: in an error, as its version, in the text of a model.
Whoever sends a secret registers it here; every report passes `scrubbed` on its way out.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar
from urllib.parse import quote

HIDDEN = "***"
_LEAST = 8
"""Characters of a secret that is hidden wherever it occurs. A shorter one (`EMPTY`, as many local
servers want it) is a word of ordinary text, hidden only behind `Bearer`."""

_known: set[str] = set()
T = TypeVar("T")


def register_secret(secret: str | None, user: str = "") -> None:
    """Keep `secret`, and its form in a header of basic authentication for `user`, out of every
    output of this process.
    """
    if secret:
        pair = base64.b64encode(f"{user}:{secret}".encode()).decode("ascii")
        _known.update((secret, quote(secret, safe=""), pair))


@cache
def _pattern(known: frozenset[str]) -> re.Pattern[str]:
    """What to hide: each secret, and the part that is left of one where a text was cut in it."""
    parts = []
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) < _LEAST:
            parts.append(rf"(?<=Bearer ){re.escape(secret)}\b")
            continue
        parts.append(re.escape(secret))
        heads = [re.escape(secret[:n]) for n in range(len(secret) - 1, _LEAST - 1, -1)]
        tails = [re.escape(secret[n:]) for n in range(1, len(secret) - _LEAST + 1)]
        if heads:
            parts += [rf"(?:{'|'.join(heads)})(?=…|\Z)", rf"(?<=…)(?:{'|'.join(tails)})"]
    return re.compile("|".join(parts))


def scrub(text: str) -> str:
    """`text` without the secrets of this run."""
    return _pattern(frozenset(_known)).sub(HIDDEN, text) if _known else text


def scrubbed(value: T) -> T:
    """`value` with every text in it scrubbed: in dataclasses, mappings, their keys, and sequences.

    A dataclass is copied only where something in it changes.
    """
    return _scrubbed(value) if _known else value


def _scrubbed(value: Any) -> Any:
    if type(value) is str:
        return scrub(value)
    if isinstance(value, Mapping):
        return {_scrubbed(key): _scrubbed(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_scrubbed, value))
    if is_dataclass(value) and not isinstance(value, type):
        old = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        new = {name: _scrubbed(item) for name, item in old.items()}
        return replace(value, **new) if new != old else value
    return value
