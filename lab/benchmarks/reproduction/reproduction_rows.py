"""The rows of `reproduction.py`, read from what it writes or from the packed file that is kept of
them.

    python reproduction_rows.py ROWS_HF ROWS_VLLM --out
    results/reproduction_rows.npz

Packed, sums of windows keep 16 bits of their mantissa (1.5e-5 of each) and counts 16 bits; a fifth
of the size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.fidelity.windows import blocks_of

RESULTS = Path(__file__).parent / "results"
PARTS = ("all", "tail")
SUMS = ("kl", "dnll")
COUNTS = ("top1", "tokens")
ABSENT = -1
"""The count of tokens where a row has no such part."""
Sums = NDArray[np.float64]


class Rows:
    """Rows by `ENGINE NAME`, as sums of each window; one that failed is left out."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.rows: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        for file in files:
            document = (
                unpacked(file)
                if file.suffix == ".npz"
                else json.loads(file.read_text(encoding="utf-8"))
            )
            self.rows |= {k: r for k, r in document["rows"].items() if "tail" in r}
            self.facts |= document["facts"]
        places = self.facts.get("text", {}).get("places")
        self.blocks = np.unique(blocks_of(places), return_inverse=True)[1] if places else None

    def has(self, *names: str) -> bool:
        return all(name in self.rows for name in names)

    def sums(
        self, name: str, what: str, part: str = "all", each: bool = False, among: Sequence[str] = ()
    ) -> Sums:
        """Sums of one row by cluster, neighbouring windows together where their places are known;
        or of `each` window.

        Of the windows that were scored in this row and in all `among` which it stands.
        """
        use = np.all([np.asarray(self.rows[n][part]["tokens"]) > 0 for n in (name, *among)], axis=0)
        found: Sums = np.asarray(self.rows[name][part][what], dtype=np.float64)[use]
        if each or self.blocks is None:
            return found
        return np.bincount(
            np.unique(self.blocks[use], return_inverse=True)[1], weights=found
        ).astype(np.float64)

    def named(self, start: str, end: str = "") -> list[str]:
        return [n for n in self.rows if n.startswith(start) and n.endswith(end)]


def pack(rows: Rows, path: Path) -> None:
    """Write the rows, all of the same windows."""
    shape = (len(rows.rows), len(PARTS), 2, len(next(iter(rows.rows.values()))["tail"]["kl"]))
    sums, counts = np.zeros(shape, np.float32), np.full(shape, ABSENT, np.int16)
    about = {}
    for i, (name, row) in enumerate(rows.rows.items()):
        about[name] = {k: v for k, v in row.items() if k not in PARTS}
        for j, part in enumerate(PARTS):
            if part in row:
                sums[i, j] = [row[part][what] for what in SUMS]
                counts[i, j] = [row[part][what] for what in COUNTS]
    short = ((sums.view(np.uint32) + 0x40) & 0xFFFFFF80).view(np.float32)
    said = json.dumps({"facts": rows.facts, "rows": about}, ensure_ascii=False)
    np.savez_compressed(
        path, sums=short, counts=counts, about=np.frombuffer(said.encode(), np.uint8)
    )


def unpacked(path: Path) -> dict[str, Any]:
    """A packed file in the form that `reproduction.py` writes."""
    with np.load(path) as kept:
        document: dict[str, Any] = json.loads(kept["about"].tobytes())
        sums, counts = kept["sums"].astype(np.float64), kept["counts"]
    for i, row in enumerate(document["rows"].values()):
        for j, part in enumerate(PARTS):
            if (counts[i, j] != ABSENT).all():
                row[part] = dict(zip((*SUMS, *COUNTS), (*sums[i, j], *counts[i, j]), strict=True))
    return document


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "reproduction_rows.npz")
    given = parser.parse_args()
    pack(Rows(given.files), given.out)
