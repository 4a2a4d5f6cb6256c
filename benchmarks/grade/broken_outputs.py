"""Outputs of broken and healthy models with their labels, from corpus/outputs.jsonl.gz.

A label is given by rules, none by hand. Those of loops and floods look at copies and at the share
of one character, as detectors must, with measures of their own; that of salads shares nothing with
the detector under test:

- `empty`: no visible character.
- `flood`: one character makes up more than half of the last 200 visible ones, or blanks two thirds
  of the text.
- `loop`: of the last 400 characters at least 70 % begin a piece of 24 that stood in the text
  before, and 35 % one that
  stood there twice (what is said a second time may be a quotation, or a function like the last
  one); or the text ends
  in four exact copies, 40 characters and more; or deflate packs its last 400 characters to a
  quarter.
- `salad`: none of these, 100 characters and more, and the undamaged SmolLM2 needs 2 bits and more
  for each byte of it
  (`corpus/teacher.py`; the outputs of undamaged models on the tune half need 0.15 to 1.06).
- `subtle`: the same from 1.1 bits: partly sane; reported apart.
- `unsure`: of the last 400 characters 35 % and more stood before, or deflate packs them to a third,
  or four exact copies
  of a word or more, together 20 characters, stand anywhere (a loop that the model left again, or a
  short one), or the
  text is too short, or it was not scored.
- `ok`: the rest. `unsure` texts count neither as hits nor as false alarms.
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

import numpy as np

CORPUS = Path(__file__).parent / "corpus"
TAIL, PIECE = 400, 24
LOOP_SHARE, UNSURE_SHARE = 0.7, 0.35
LOOP_PACKING, UNSURE_PACKING = 4.0, 3.0
THRICE_SHARE = 0.35
COPIES, COPIED_CHARS = 4, 40
SHORT_COPIED_CHARS, LONGEST_COPIED = 20, 100
SALAD_BITS, SUBTLE_BITS = 2.0, 1.1
"""Bits per byte under the undamaged model."""
MIN_SALAD = 100


@dataclass(frozen=True)
class Output:
    """One output; `source` is the cause it came from, the unit of the tune/report split is `source`
    and prompt.
    """

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
            label = rule(row, teacher_bits().get(row["id"]))
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
def teacher_bits() -> Mapping[str, float | None]:
    """Bits per byte of the texts by id."""
    return json.loads((CORPUS / "teacher_bpb.json").read_text(encoding="utf-8"))


def rule(row: Mapping[str, Any], bits: float | None) -> str:
    """The label of one record, given its bits per byte under the undamaged model."""
    text = row["text"]
    visible = [c for c in text if not c.isspace()]
    if not visible:
        return "empty"
    last = visible[-200:]
    if (len(visible) > 8 and Counter(last).most_common(1)[0][1] > len(last) / 2) or len(
        text
    ) > 3 * len(visible) + 80:
        return "flood"
    share, packs = copied(text), packing(text)
    thrice = share >= LOOP_SHARE and copied(text, times=2) >= THRICE_SHARE
    if thrice or packs >= LOOP_PACKING or ends_in_copies(text):
        return "loop"
    if bits is None or (bits >= SUBTLE_BITS and len(text) < MIN_SALAD):
        return "unsure"
    if bits >= SUBTLE_BITS:
        return "salad" if bits >= SALAD_BITS else "subtle"
    return (
        "unsure" if share >= UNSURE_SHARE or packs >= UNSURE_PACKING or holds_copies(text) else "ok"
    )


def copied(text: str, times: int = 1) -> float:
    """Share of the last positions whose next `PIECE` characters stood in the text before, `times`
    times and more.
    """
    if len(text) < 150:
        return 0.0
    seen: Counter[str] = Counter()
    before = []
    for at in range(len(text) - PIECE + 1):
        piece = text[at : at + PIECE]
        before.append(seen[piece] >= times)
        seen[piece] += 1
    tail = before[-TAIL:]
    return sum(tail) / len(tail)


def packing(text: str) -> float:
    """How many times smaller deflate makes the end of the text."""
    data = text[-TAIL:].encode("utf-8", "surrogatepass")
    return len(data) / len(zlib.compress(data, 9)) if data else 0.0


def ends_in_copies(text: str) -> bool:
    """Whether the text ends in `COPIES` exact copies of a piece, together `COPIED_CHARS` characters
    and more.
    """
    text = text.rstrip()[-1000:]
    for period in range(1, len(text) // COPIES + 1):
        length = period
        while length < len(text) and text[-1 - length] == text[-1 - length + period]:
            length += 1
        if length >= max(COPIES * period, COPIED_CHARS):
            return True
    return False


def holds_copies(text: str) -> bool:
    """Whether `COPIES` exact copies of a piece with a letter or digit in it stand anywhere, one
    after the other.
    """
    codes = np.array([ord(c) for c in text])
    for period in range(1, min(LONGEST_COPIED, len(text) // COPIES) + 1):
        same = codes[period:] == codes[:-period]
        edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            copied_chars = end - start + period
            enough = copied_chars >= max(COPIES * period, SHORT_COPIED_CHARS)
            if enough and any(c.isalnum() for c in text[start : start + period]):
                return True
    return False
