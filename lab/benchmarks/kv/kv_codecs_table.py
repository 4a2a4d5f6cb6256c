"""Rows of `kv_codecs.py` as tables, each codec beside the plain rotation at equal stored bytes.

    python kv_codecs_table.py kv-range.json kv-plain.json … [--merge OUT.json] > OUT.md

`hadamard at equal bytes` is the KL of plain `hadamard(bits=b)` interpolated between the two
measured rows on either side, linearly in bits a value and log KL, and not beyond them. The interval
of the share takes the outer ends of both intervals, as if they were independent: codecs were scored
on the same windows, so it is wide.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_PLAIN = re.compile(r"hadamard(\(bits=[\d.]+\))?")


def interval(estimate: Mapping[str, float], form: str, value: str = "value") -> str:
    """`+0.11 [+0.08, +0.14]`."""
    return f"{estimate[value]:{form}} [{estimate['lo']:{form}}, {estimate['hi']:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--merge", type=Path, help="all rows in one file")
    arguments = parser.parse_args()
    documents = [json.loads(f.read_text(encoding="utf-8")) for f in arguments.files]
    if len({d["model"] for d in documents}) > 1:
        raise SystemExit("these files are of several models: make one table of each")
    whole: dict[str, Any] = {"rows": []}
    for document in documents:
        for name in ("texts", "calibrations"):
            whole.setdefault(name, {}).update(document.get(name, {}))
        whole |= {k: v for k, v in document.items() if k not in ("rows", "texts", "calibrations")}
        gpu = document.get("machine", {}).get("gpu")
        for row in document["rows"]:
            # A row that was measured twice stands there once; what each layer comes to is left to
            # the parts.
            if not any(_same(row, other) for other in whole["rows"]):
                size = {k: v for k, v in row["bytes"].items() if k != "ratio_by_layer"}
                whole["rows"].append({**row, "bytes": size, "gpu": row.get("gpu", gpu)})
    if arguments.merge:
        arguments.merge.write_text(
            json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    print("\n".join(render(whole)))


def render(document: dict[str, Any]) -> Iterator[str]:
    """Markdown of all rows, one table for each text, mode, number of windows and type of the
    model.
    """
    yield f"# KV codecs, {document['model']}, windows of {document['length']} tokens\n"
    groups: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in document["rows"]:
        groups.setdefault((row["text"], row["mode"], row["windows"], _dtype(row)), []).append(row)
    for (text, mode, windows, dtype), rows in sorted(groups.items()):
        gpus = sorted({str(r["gpu"]) for r in rows})
        tokens = f"{rows[0]['tokens']:,} scored tokens"
        yield (
            f"## {text}, {mode}, {windows} windows, {tokens}, model in {dtype}"
            f" ({', '.join(gpus)})\n"
        )
        yield (
            "| codec | calibrated on | tables, MB | smaller | KL, nats | Δppl % | top-1 % | grade "
            "| hadamard at equal bytes | share of it |"
        )
        yield "|---|---|---:|---:|---|---|---|---|---|---|"
        plain = sorted(
            (r for r in rows if _PLAIN.fullmatch(r["codec"])),
            key=lambda r: r["bytes"]["bits_per_value"],
        )
        for row in sorted(rows, key=lambda r: r["bytes"]["ratio"]):
            yield _line(row, plain)
        yield ""


def at_equal_bytes(plain: Sequence[Row], bits: float, figure: str) -> float | None:
    """KL (`mean`, `lo` or `hi`) of the plain codec at `bits` a value; None outside the measured
    rows.

    `plain` are its rows in ascending order of bits.
    """
    for low, high in pairwise(plain):
        at = low["bytes"]["bits_per_value"], high["bytes"]["bits_per_value"]
        if at[0] <= bits <= at[1] and min(low["kld"][figure], high["kld"][figure]) > 0:
            share = (bits - at[0]) / (at[1] - at[0])
            ends = math.log(low["kld"][figure]), math.log(high["kld"][figure])
            return math.exp(ends[0] + share * (ends[1] - ends[0]))
    return None


def _calibration(row: Row) -> str:
    """The text it was calibrated on, where the codec learns from any."""
    return (
        str(row.get("calibration", "")) if "pca" in row["codec"] or "mean" in row["codec"] else ""
    )


def _dtype(row: Row) -> str:
    """The type that the model computes in; both models are bfloat16 as they are kept."""
    kind = str(row.get("dtype", "auto"))
    return "bfloat16" if kind == "auto" else kind


def _same(row: Row, other: Row) -> bool:
    def key(r: Row) -> tuple[Any, ...]:
        return (*map(r.get, ("codec", "text", "mode", "windows")), _calibration(r), _dtype(r))

    return key(row) == key(other)


def _line(row: Row, plain: Sequence[Row]) -> str:
    kl, bits = row["kld"], row["bytes"]["bits_per_value"]
    rival, share = "", ""
    here = {f: at_equal_bytes(plain, bits, f) for f in ("mean", "lo", "hi")}
    mean, lo, hi = here["mean"], here["lo"], here["hi"]
    if not _PLAIN.fullmatch(row["codec"]) and mean and lo and hi:
        rival = f"{mean:.4f}"
        share = f"{kl['mean'] / mean:.3f} [{kl['lo'] / hi:.3f}, {kl['hi'] / lo:.3f}]"
    cells = (
        f"`{row['codec']}`",
        _calibration(row),
        f"{row['bytes']['tables'] / 1e6:.1f}" if row["bytes"]["tables"] else "",
        f"{row['bytes']['ratio']:.2f}×",
        interval(kl, ".5f", "mean"),
        interval(row["dppl_pct"], "+.2f"),
        interval(row["top1_pct"], ".2f"),
        row["grade"],
        rival,
        share,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
