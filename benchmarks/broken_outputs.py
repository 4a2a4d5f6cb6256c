"""Outputs of broken and healthy models with their labels, from corpus/*.jsonl(.gz)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Output:
    source: str
    text: str
    label: str
    finish_reason: str | None = None


def broken() -> Iterator[Output]:
    return iter(())
