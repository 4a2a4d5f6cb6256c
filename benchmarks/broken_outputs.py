"""Outputs of broken and healthy models with their labels, from corpus/outputs.jsonl.gz.

A label is given by rules that share nothing with the detectors under test, and by hand where a rule was seen to be wrong
(corpus/labels.json: id to label; the hand wins):

- `empty`: no visible character.
- `flood`: one character makes up more than half of the last 200 visible ones, or blanks two thirds of the text.
- `loop`: of the last 400 characters at least 70 % begin a piece of 24 that stood in the text before; `unsure` from 35 %.
- `salad`: none of these, and the cause is one whose outputs, read in samples of six and more, were all salad.
- `subtle`: the same for a cause whose outputs are partly sane (scaled keys); reported apart.
- `ok`: the rest. `unsure` texts count neither as hits nor as false alarms.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
TAIL, PIECE = 400, 24
LOOP_SHARE, UNSURE_SHARE = 0.7, 0.35
SALAD_CAUSES = frozenset(
    [
        "norm_plus_one",
        "int2",
        "int3",
        "shifted_scales",
        "swapped_layers",
        "temperature5",
        "temperature2",
        "wrong_tokenizer",
    ]
)
SUBTLE_CAUSES = frozenset({"scaled_k"})


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
            label = by_hand().get(row["id"]) or rule(row)
            # A prompt answered by one cause stays in one half; so do its samples.
            yield Output(
                row["id"],
                f"{row['source']}/{row['prompt_id']}",
                row["source"],
                row["text"],
                label,
                row["finish_reason"],
            )


@cache
def by_hand() -> Mapping[str, str]:
    """Labels given by reading."""
    path = CORPUS / "labels.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def rule(row: Mapping[str, Any]) -> str:
    """The label of one record."""
    text = row["text"]
    visible = [c for c in text if not c.isspace()]
    if not visible:
        return "empty"
    last = visible[-200:]
    if (len(visible) > 8 and Counter(last).most_common(1)[0][1] > len(last) / 2) or len(text) > 3 * len(
        visible
    ) + 80:
        return "flood"
    cause = row["source"].partition(".")[0]
    share = copied(text)
    if share >= LOOP_SHARE:
        return "loop"
    if cause in SALAD_CAUSES:
        return "salad" if len(text) >= 100 else "unsure"
    if share >= UNSURE_SHARE:
        return "unsure"
    return "subtle" if cause in SUBTLE_CAUSES else "ok"


def copied(text: str) -> float:
    """Share of the last positions whose next `PIECE` characters stood in the text before."""
    first: dict[str, int] = {}
    last = len(text) - PIECE + 1
    for at in range(last):
        first.setdefault(text[at : at + PIECE], at)
    tail = range(max(0, last - TAIL), last)
    return sum(first[text[at : at + PIECE]] < at for at in tail) / len(tail) if len(text) >= 150 else 0.0
