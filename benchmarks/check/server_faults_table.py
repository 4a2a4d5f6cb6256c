"""Write benchmarks/check/results/server_faults.md from the JSON results of server_faults.py.

    python benchmarks/check/server_faults_table.py

Every row says on which kind of machine it was measured.
"""

from __future__ import annotations

from typing import Any

from server_faults_results import RESULTS, load

PAGE = RESULTS.with_suffix(".md")


def row(name: str, result: dict[str, Any]) -> str:
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
        "GPU" if "accelerator" in result["machine"] else "CPU",
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    results = load(RESULTS)
    lines = [
        (
            "| served | degenerate texts | of the reference | bits per byte | of the reference |"
            " with a reference | by | alone | by | on |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        row(f"whole, seed {seed}", r) for seed, r in sorted(results["healthy"].items(), key=_number)
    ]
    lines += [row(r["description"], r) for r in results["damages"].values()]
    text = "\n".join(lines) + "\n"
    PAGE.write_text(text, encoding="utf-8")
    print(text)


def _number(item: tuple[str, Any]) -> int:
    return int(item[0])


if __name__ == "__main__":
    main()
