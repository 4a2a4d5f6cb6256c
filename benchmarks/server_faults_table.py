"""Write benchmarks/results/server_faults.md from the JSON results of server_faults.py.

    python benchmarks/server_faults_table.py

A row that was measured on another machine says so; where both exist the later one (`server_faults_cpu.json`) counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict[str, Any]:
    path = RESULTS / name
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"healthy": {}, "damages": {}}
    return found


def row(name: str, result: dict[str, Any], where: str) -> str:
    bits = result["bits_per_byte"]
    theirs = result["reference_bits_per_byte"]
    cells = (
        name,
        f"{result['degenerate']} / {result['texts']}",
        str(result["reference_degenerate"]),
        "cannot be scored" if bits is None else f"{bits:.3f}",
        "" if theirs is None else f"{theirs:.3f}",
        result["with_reference"],
        ", ".join(dict.fromkeys(result["signals_with_reference"])),
        result["without_reference"],
        ", ".join(dict.fromkeys(result["signals_without_reference"])),
        where,
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    gpu, cpu = load("server_faults.json"), load("server_faults_cpu.json")
    lines = [
        "| served | degenerate texts | of the reference | bits per byte | of the reference | with a reference | by | alone | by | on |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for results, where in ((gpu, "GPU"), (cpu, "CPU")):
        lines += [row(f"whole, seed {seed}", r, where) for seed, r in results["healthy"].items()]
    merged = {name: (r, "GPU") for name, r in gpu["damages"].items()}
    merged |= {name: (r, "CPU") for name, r in cpu["damages"].items()}
    lines += [row(f"{r['description']}", r, where) for r, where in merged.values()]
    text = "\n".join(lines) + "\n"
    (RESULTS / "server_faults.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
