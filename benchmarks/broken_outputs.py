"""Outputs of broken and healthy models with their labels, from corpus/outputs.jsonl.gz.

A label is given by a rule that shares nothing with the detectors under test, and by hand where the rule is unsure or
wrong (corpus/labels.json: id to label, the hand's labels win):

- `flood`: one character makes up more than half of the last 200 that are not blank, or blanks more than half of the text.
- `loop`: a general-purpose compressor (zlib, level 9) shrinks the last 600 characters to under
  13 % of their size, and the same part of a sane story by the healthy model never below 30 %.
- `salad`: the trusted model (SmolLM2-135M, whole) gives the text more than `SALAD_BITS` bits per byte; the corpus
  holds that figure as `teacher_bpb` where it was measured.
- `empty`: no visible character.
- `ok`: the rest. What lies near a limit is left out of recall and of false alarms, and counted as `unsure`.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
TAIL = 600
LOOP_RATIO, UNSURE_RATIO = 0.13, 0.22
SALAD_BITS, UNSURE_BITS = 3.2, 2.4


@dataclass(frozen=True)
class Output:
    """One output; `source` is the cause it came from, the unit of the tune/report split is `source` and prompt."""

    id: str
    source: str
    cause: str
    text: str
    label: str
    finish_reason: str | None


def broken() -> Iterator[Output]:
    """Every output of the corpus; none where it has not been generated."""
    path = CORPUS / "outputs.jsonl.gz"
    if not path.exists():
        return
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            label = by_hand().get(row["id"]) or rule(row, teacher().get(row["id"]))
            # A prompt answered by one cause stays in one half; so do its samples.
            yield Output(row["id"], f"{row['source']}/{row['prompt_id']}", row["source"], row["text"], label, row["finish_reason"])


@cache
def by_hand() -> Mapping[str, str]:
    """Labels given by reading."""
    path = CORPUS / "labels.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@cache
def teacher() -> Mapping[str, float]:
    """Bits per byte of each text under the whole model."""
    path = CORPUS / "teacher_bpb.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rule(row: Mapping[str, Any], bits_per_byte: float | None) -> str:
    """The label of one record."""
    text = row["text"]
    visible = [c for c in text if not c.isspace()]
    if not visible:
        return "empty" if not text or len(text) < 40 else "flood"
    last = Counter(visible[-200:]).most_common(1)[0][1]
    if last > 0.5 * len(visible[-200:]) and len(visible) > 8 or len(text) > 2 * len(visible) + 80:
        return "flood"
    tail = text[-TAIL:].encode("utf-8", "replace")
    ratio = (len(zlib.compress(tail, 9)) - 8) / len(tail)
    if len(tail) >= 200 and ratio < LOOP_RATIO:
        return "loop"
    if bits_per_byte is not None and bits_per_byte > SALAD_BITS:
        return "salad"
    if (len(tail) >= 200 and ratio < UNSURE_RATIO) or (bits_per_byte is not None and bits_per_byte > UNSURE_BITS):
        return "unsure"
    return "ok"
