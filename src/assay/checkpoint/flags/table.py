"""The options of `vllm serve` as its own argument parser declares them.

`benchmarks/verify_flag_table.py` makes the table in vLLM's environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""Bounds of the table, in words."""
_PORT: Mapping[str, float] = {"ge": 0, "le": 65535}
_OWN_BOUNDS: Mapping[str, Mapping[str, float]] = {
    "--port": _PORT,
    "--grpc-port": _PORT,
    "--master-port": _PORT,
    "--data-parallel-supervisor-port": _PORT,
    "--sse-keep-alive-interval": {"ge": 0},
    "--spec-tokens": {"ge": 1},
}
"""Bounds that the engine checks elsewhere than in its configuration classes."""


@dataclass(frozen=True)
class FlagOption:
    """One option.

    Attributes:
        takes: `switch`, `value`, `optional` or `many`.
        type: `int`, `float`, `size` (with k, K, M …), `json` or `text`.
        choices: Allowed values, empty where any is.
        bounds: `ge`, `gt`, `le`, `lt` with their numbers.
    """

    takes: str
    type: str = "text"
    choices: tuple[str, ...] = ()
    bounds: tuple[tuple[str, float], ...] = ()


@cache
def _table() -> Mapping[str, Any]:
    text = resources.files(__package__ or "").joinpath("vllm_0_32_0.json").read_text("utf-8")
    table: Mapping[str, Any] = json.loads(text)
    return table


@cache
def options() -> Mapping[str, FlagOption]:
    """Every option of `vllm serve` 0.32 by name, short ones too."""
    return {
        name: FlagOption(
            row["takes"],
            row.get("type", "text"),
            tuple(row.get("choices", ())),
            tuple(
                ({k: row[k] for k in BOUNDS if k in row} | dict(_OWN_BOUNDS.get(name, {}))).items()
            ),
        )
        for name, row in _table()["options"].items()
    }


@cache
def known_options() -> Mapping[str, str]:
    """Options of `vllm serve` 0.32 and what they take: `switch`, `value`, `optional` or `many`."""
    return {name: option.takes for name, option in options().items()}


def registered(option: str) -> frozenset[str] | None:
    """The names that vLLM looks up in a registry for an option, None for any other option."""
    names = _table()["names"].get(option)
    return frozenset(names) if names is not None else None
