"""Values of options against their types, choices, bounds and registries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from difflib import get_close_matches

from assay.checkpoint.findings import SHOWN, found
from assay.checkpoint.flags.command import ServeArgs
from assay.checkpoint.flags.table import BOUNDS, FlagOption, options, registered
from assay.verdict import Finding

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_ELSEWHERE = frozenset({"--kv-cache-dtype", "--quantization", "--attention-backend"})
"""Options that other rules examine together with the checkpoint."""
_PLUGINS = {
    "--tool-call-parser": "--tool-parser-plugin",
    "--reasoning-parser": "--reasoning-parser-plugin",
}
_BY_PLUGIN = {"--load-format": {"gguf": "vllm-gguf-plugin", "bitsandbytes": "vllm-bnb-plugin"}}
BLOCK = 16
"""Attention backends take blocks of a multiple of this many tokens."""


def lint_values(args: ServeArgs) -> Iterator[Finding]:
    """A finding for every value that the engine refuses at start."""
    for name, text in args.options.items():
        option = options().get(name)
        if option is None or name in _ELSEWHERE:
            continue
        problem = value_problem(name, option, text, args)
        if problem:
            title = f"{name} {text}: {problem}" if text is not None else f"{name}: {problem}"
            allowed = sorted(option.choices or registered(name) or ())[: 3 * SHOWN]
            yield found("flag_rejected", title, flag=name, value=text, allowed=allowed)


def value_problem(name: str, option: FlagOption, text: str | None, args: ServeArgs) -> str | None:
    """Why the engine refuses a value, or None."""
    if option.takes == "switch":
        return None
    if text is None:
        return None if option.takes in {"optional", "many"} else "it needs a value"
    if option.choices and text not in option.choices:
        return f"not one of {_shown(text, option.choices)}"
    names = registered(name)
    plugin = _PLUGINS.get(name)
    if names is not None and text not in names and not (plugin and plugin in args.options):
        if module := _BY_PLUGIN.get(name, {}).get(text):
            return f"the engine knows it with {module} alone"
        return f"not registered; known are {_shown(text, names)}"
    if option.type in {"int", "float", "size", "size or auto"}:
        return _number_problem(name, option, text)
    return _json_problem(text) if option.type == "json" else None


def _number_problem(name: str, option: FlagOption, text: str) -> str | None:
    value = number_of(text, option.type)
    if value is None:
        kinds = {"int": "a whole number", "float": "a number"}
        return f"not {kinds.get(option.type, 'a whole number, or one with k, K, m or M')}"
    for bound, limit in option.bounds:
        holds = {
            "ge": value >= limit,
            "gt": value > limit,
            "le": value <= limit,
            "lt": value < limit,
        }[bound]
        if not holds:
            return f"not {BOUNDS[bound]} {limit:g}"
    if name == "--block-size" and value % BLOCK:
        return f"not a multiple of {BLOCK}, which attention backends need"
    return None


def number_of(text: str, kind: str) -> float | None:
    """A number as the engine reads it, None if it refuses it. `auto` is -1."""
    text = text.strip()
    if kind == "size or auto" and text.lower() == "auto":
        return -1
    if kind.startswith("size") and (sized := _SIZE.fullmatch(text)):
        digits, unit = sized.groups()
        if "." in digits and unit.isupper():
            return None
        return int(float(digits) * _FACTORS[unit])
    try:
        return float(text) if kind == "float" else int(text)
    except ValueError:
        return None


def _json_problem(text: str) -> str | None:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "not JSON"
    return None


def _shown(text: str, names: tuple[str, ...] | frozenset[str]) -> str:
    close = get_close_matches(text, sorted(names), n=1, cutoff=0.6)
    listed = ", ".join(sorted(names)[:6]) + (", …" if len(names) > 6 else "")
    return listed + (f"; did you mean {close[0]}?" if close else "")
