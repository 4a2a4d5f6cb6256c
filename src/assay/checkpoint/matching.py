"""How quantisation lists name modules: by name, glob, pattern, whole or part."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Parts by the name of the whole. Engines build the whole, so its parts must be quantised alike."""

_WHOLE = {part: whole for whole, parts in FUSED.items() for part in parts}


def listed(module: str, hits: Callable[[str], bool]) -> bool:
    """Whether a list names a module: itself, the whole that it is a part of, or all the parts that
    it is made of.

    `hits(name)` is the list's own way of matching one name.
    """
    if hits(module):
        return True
    parent, dot, last = module.rpartition(".")
    if last in _WHOLE and hits(f"{parent}{dot}{_WHOLE[last]}"):
        return True
    parts = FUSED.get(last)
    return parts is not None and all(hits(f"{parent}{dot}{part}") for part in parts)


def integer(raw: Mapping[str, Any], *keys: str) -> int | None:
    """The first of several keys that holds a whole number."""
    return next((raw[key] for key in keys if type(raw.get(key)) is int), None)


def strings(value: Any) -> tuple[str, ...]:
    """A list of strings, one string, or nothing, as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


@cache
def pattern(text: str) -> re.Pattern[str] | None:
    """A regular expression from a config; one that does not compile is read as a glob.

    None for one that could take for ever: a repeated group with a repetition inside, or more than
    six of them.
    """
    if (
        re.search(r"[*+}][^()]*\)[*+{]", text)
        or len(re.findall(r"[*+]|,\}", text)) > 6
        or len(text) > 2000
    ):
        return None
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return re.compile(re.escape(text).replace(r"\*", ".*"))


def named(names: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a module is on a list: by its name, below it, by the end of its name, by a glob or an
    `re:` pattern.

    Official lists have hundreds of names and models 100,000 modules, so that plain names are looked
    up by parts.
    """
    patterns = [p for n in names if n.startswith("re:") and (p := pattern(n[3:])) is not None]
    globs = [n for n in names if "*" in n and not n.startswith("re:")]
    exact, below = set(names), {n.rstrip("*") for n in names}

    def hits(module: str) -> bool:
        if module in exact:
            return True
        at = module.find(".")
        while at >= 0:
            if module[at + 1 :] in exact or module[:at] in below:
                return True
            at = module.find(".", at + 1)
        return any(fnmatch.fnmatchcase(module, g) for g in globs) or any(
            p.match(module) for p in patterns
        )

    return hits
