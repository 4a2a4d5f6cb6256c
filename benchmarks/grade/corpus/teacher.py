"""Bits per byte of every text of the corpus under the whole model: a salad is dear, whatever its
words look like.

    python benchmarks/grade/corpus/teacher.py

Writes `teacher_bpb.json` (id to bits per byte) beside this file; what is there already is kept.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from assay.demo.models import build_smollm2
from assay.engines.hf.engine import HfEngine

HERE = Path(__file__).parent
TARGET = HERE / "teacher_bpb.json"
LONGEST = 1500
"""Characters of a text that are scored: enough to tell, and the cost stays small."""


def main() -> None:
    known = json.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {}
    with gzip.open(HERE / "outputs.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    with HfEngine.load(f"hf:{build_smollm2()}") as engine:
        for row in rows:
            text = row["text"][:LONGEST]
            if row["id"] not in known and len(engine.tokenize(text)) >= 2:
                bits = engine.score(text).bits_per_byte
                known[row["id"]] = None if bits is None else round(bits, 3)
    kept = {row["id"]: known[row["id"]] for row in rows if row["id"] in known}
    TARGET.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(kept)} of {len(rows)} texts scored")


if __name__ == "__main__":
    main()
