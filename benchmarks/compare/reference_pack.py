"""How large a reference pack is, and what comparing against it changes.

    python benchmarks/compare/reference_pack.py [--windows 8] [--length 512] [--out
    benchmarks/compare/results/reference_pack.json]

Three candidates are compared with the reference itself, with its store and with packs of it
(float16 and bfloat16 states, the head by digest, found in the checkpoint): mean KL of every window
must be the same but for rounding.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import assay
from assay.demo.models import build_smollm2
from assay.fidelity.pack.writer import PackOptions, write_pack

CANDIDATES = ("", "weights=int(bits=8,group=128)", "weights=polar(bits=6)")
"""Options of the candidates: bfloat16 as stored, and two formats."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "reference_pack.json"
    )
    arguments = parser.parse_args()
    model = build_smollm2()
    shape = {"windows": arguments.windows, "length": arguments.length}
    candidates = [f"hf:{model}{'?' if options else ''}{options}" for options in CANDIDATES]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        reference = f"hf:{model}?dtype=float32"
        assay.reference(reference, out=work / "store", **shape)
        packs = {}
        for dtype in ("float16", "bfloat16"):
            options = {"source": str(work / "store"), "out": work / f"{dtype}.pack", "dtype": dtype}
            packs[dtype] = write_pack(PackOptions.of(options)).results
        sides = {"live": (reference, shape), "store": (f"run:{work}/store", {})}
        sides |= {d: (f"pack:{work}/{d}.pack?head={model}", {}) for d in packs}
        rows: dict[str, Any] = {}
        for name, (side, size) in sides.items():
            report = assay.compare(side, *candidates, floors=False, **size)
            rows[name] = [
                {"grade": r["grade"], "kld": r["kld"]["mean"], "dppl_pct": r["dppl_pct"]["value"],
                 "per_window": [w["kld"] for w in r["per_window"]]}
                for r in report.results["candidates"]
            ]  # fmt: skip
    exactness = {
        name: [
            {
                "kld_mean_difference": row["kld"] - live["kld"],
                "largest_difference_of_a_window": float(
                    np.abs(np.subtract(row["per_window"], live["per_window"])).max()
                ),
                "dppl_pct_difference": row["dppl_pct"] - live["dppl_pct"],
                "same_grade": row["grade"] == live["grade"],
            }
            for row, live in zip(rows[name], rows["live"], strict=True)
        ]
        for name in sides
        if name != "live"
    }
    kept = ("tokens", "bytes", "bytes_per_token", "dtype", "rounding")
    found = {
        "model": "SmolLM2-135M, float32",
        "candidates": ["bfloat16, as stored", *CANDIDATES[1:]],
        **shape,
        "packs": {d: {k: r[k] for k in kept} for d, r in packs.items()},
        "live": rows["live"],
        "exactness": exactness,
        "environment": report.to_json()["environment"],
    }
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"packs": found["packs"], "exactness": exactness}, indent=1))


if __name__ == "__main__":
    main()
