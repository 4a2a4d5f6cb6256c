"""Types with bounds for the values of JSON documents."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One type with bounds. `serious` is False where engines do not need the value."""

    rule: str
    holds: Callable[[Any], bool]
    serious: bool = True


@dataclass(frozen=True)
class Each:
    """An object whose values (or a list whose entries) all follow one table."""

    table: Table
    form: type = dict


Table = Mapping[str, "Kind | Each | Table"]


class Nesting(dict[str, "Kind | Each | Table"]):
    """A table that holds for the objects inside too: rope settings of one kind of attention."""


@dataclass(frozen=True)
class Nonsense:
    """One value that is not what its key takes."""

    path: str
    value: Any
    rule: str
    serious: bool = True

    @property
    def text(self) -> str:
        """The end of a sentence: `sets KEY to VALUE, which is not RULE`."""
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
        return f"sets {self.path} to {shown}, which is not {self.rule}"


def whole(least: int, most: int) -> Kind:
    """A whole number (a bool is none)."""
    return Kind(
        f"a whole number from {least} to {most}", lambda v: type(v) is int and least <= v <= most
    )


def number(least: float, most: float) -> Kind:
    """A finite number."""
    return Kind(
        f"a number from {least:g} to {most:g}", lambda v: _is_number(v) and least <= v <= most
    )


def above(least: float, most: float) -> Kind:
    """A finite number greater than `least`."""
    return Kind(
        f"above {least:g} and at most {most:g}", lambda v: _is_number(v) and least < v <= most
    )


def one_of(*words: str) -> Kind:
    """One of a few words."""
    return Kind(f"one of {', '.join(words)}", lambda v: isinstance(v, str) and v in words)


def several(kind: Kind) -> Kind:
    """A list of such values, not empty."""
    rule = f"a list whose entries are each {kind.rule}"
    return Kind(rule, lambda v: isinstance(v, list) and bool(v) and all(map(kind.holds, v)))


def either(*kinds: Kind) -> Kind:
    """Any of several types."""
    return Kind(", or ".join(k.rule for k in kinds), lambda v: any(k.holds(v) for k in kinds))


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _is_dtype(value: Any) -> bool:
    return (
        isinstance(value, str)
        and re.fullmatch(r"auto|half|double|(torch\.)?(bfloat|float|u?int)\w*", value) is not None
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, dict) and isinstance(value.get("content"), str)
    )


def _is_recipe(value: Any) -> bool:
    """A torchao recipe: `{_type, _data}` throughout, down to plain values."""
    if not isinstance(value, dict) or not isinstance(value.get("_type"), str):
        return False
    inner = value.get("_data")
    return isinstance(inner, dict | str) and all(
        _is_recipe(v)
        for v in (inner.values() if isinstance(inner, dict) else ())
        if isinstance(v, dict | list)
    )


def _is_vocabulary(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(v) is int and 0 <= v < MOST_TOKENS for v in value.values())
    return isinstance(value, list) and all(
        isinstance(v, list) and len(v) == 2 and isinstance(v[0], str) and _is_number(v[1])
        for v in value
    )


MOST_LAYERS, MOST_TOKENS, MOST_POSITIONS = 4096, 1 << 24, 1 << 28

SWITCH = Kind("true or false", lambda v: isinstance(v, bool))

TEXT = Kind("text", lambda v: isinstance(v, str))

TEXTS = Kind(
    "a list of texts", lambda v: isinstance(v, list) and all(isinstance(t, str) for t in v)
)

NAMES = either(TEXT, TEXTS)

DTYPE = Kind("a type of numbers", _is_dtype)

OBJECT = Kind("an object", lambda v: isinstance(v, dict))

LIST = Kind("a list", lambda v: isinstance(v, list))

ANYTHING = Kind("anything", lambda v: True)

TOKEN = Kind("text, or an object with its content", _is_token)

TOKENS = Kind("a list of tokens", lambda v: isinstance(v, list) and all(map(_is_token, v)))

WIDTH, HEADS, ID = whole(1, 1 << 22), whole(1, 1 << 16), whole(0, MOST_TOKENS - 1)

WIDTHS, IDS = either(WIDTH, several(WIDTH)), either(ID, several(ID))

MAYBE, LAYER, LENGTH = whole(0, 1 << 22), whole(0, MOST_LAYERS), whole(1, MOST_POSITIONS)

MAYBES, LAYERS = either(MAYBE, several(MAYBE)), several(LAYER)

NUMBERS = several(number(-1e12, 1e12))

RECIPES = Kind(
    "text, or recipes by name",
    lambda v: isinstance(v, str) or (isinstance(v, dict) and all(map(_is_recipe, v.values()))),
)

VOCABULARY = Kind("ids by token, or pairs of token and score", _is_vocabulary)

FILES = Kind(
    "an object of tensor names to file names",
    lambda v: OBJECT.holds(v) and TEXTS.holds([*v.values()]),
)

TILE = Kind(
    "two whole numbers above 0",
    lambda v: isinstance(v, list) and len(v) == 2 and all(map(WIDTH.holds, v)),
)


def optional(table: Table) -> Table:
    """The same table, for values that engines can do without."""
    return {k: Kind(v.rule, v.holds, False) if isinstance(v, Kind) else v for k, v in table.items()}


def clean(
    document: Mapping[str, Any], table: Table, path: str = ""
) -> tuple[Document, list[Nonsense]]:
    """(the document without what is nonsense, what is nonsense). A null counts as a key that is not
    given.
    """
    kept: Document = {}
    found: list[Nonsense] = []
    for key, value in document.items():
        where = f"{path}.{key}" if path else key
        kind = table.get(key)
        if isinstance(table, Nesting) and (
            key.endswith("_attention") or (kind is None and isinstance(value, dict))
        ):
            kind = table
        if value is None:
            kept[key] = None
        elif isinstance(kind, Kind):
            if kind.holds(value):
                kept[key] = value
            else:
                found.append(Nonsense(where, value, kind.rule, kind.serious))
        elif isinstance(kind, Each):
            kept[key], inner = _clean_each(value, kind, where)
            found.extend(inner)
        elif kind is not None and not isinstance(value, dict):
            found.append(Nonsense(where, value, OBJECT.rule))
        elif kind is not None:
            kept[key], inner = clean(value, kind, where)
            found.extend(inner)
        else:
            kept[key] = value
            found.extend(
                Nonsense(p, v, "a finite number of 64 bits", False)
                for p, v in _impossible(value, where)
            )
    return kept, found


def _clean_each(value: Any, kind: Each, path: str) -> tuple[Any, list[Nonsense]]:
    """Each entry cleaned; what is no object is left out."""
    if not isinstance(value, dict | list) or not isinstance(value, kind.form):
        return None, [Nonsense(path, value, OBJECT.rule if kind.form is dict else LIST.rule)]
    kept: list[tuple[Any, Document]] = []
    found: list[Nonsense] = []
    entries: Iterable[tuple[Any, Any]] = (
        value.items() if isinstance(value, dict) else enumerate(value)
    )
    for key, entry in entries:
        if isinstance(entry, dict):
            inner, nonsense = clean(entry, kind.table, f"{path}.{key}")
            kept.append((key, inner))
            found.extend(nonsense)
        else:
            found.append(Nonsense(f"{path}.{key}", entry, OBJECT.rule))
    return (dict(kept) if isinstance(value, dict) else [entry for _, entry in kept]), found


def _impossible(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Numbers in values of unknown meaning that no engine can hold."""
    if isinstance(value, dict | list) and depth < 8:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list | float | int):
                yield from _impossible(inner, f"{path}.{key}", depth + 1)
    elif (isinstance(value, float) and not math.isfinite(value)) or (
        type(value) is int and abs(value) >= 1 << 63
    ):
        yield path, value
