"""Arguments and options that the commands of `assay kv` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(help="hf:MODEL or a folder, with options after '?'.")]
AnyModel = Annotated[
    str, typer.Argument(help="hf:MODEL (or a folder) or vllm:MODEL, with options after '?'.")
]
CodecSpec = Annotated[str, typer.Option("--codec", help="SPEC, such as sinks(n=4)+hadamard(bits=4).")]
Text = Annotated[list[str] | None, typer.Option(help="File, glob, FILE.jsonl or datasets:NAME.")]
Calibration = Annotated[Path | None, typer.Option(help="File of `assay kv calibrate`.")]
SkipLayers = Annotated[str | None, typer.Option(help="Layers that stay exact: 0,1,28-29.")]
Windows = Annotated[int, typer.Option(min=1, help="Passages that are scored.")]
Length = Annotated[int, typer.Option(min=8, help="Tokens of a passage.")]
Batch = Annotated[int, typer.Option(min=1, help="Windows that run together.")]


def layers_of(text: str | None) -> tuple[int, ...]:
    """`0,1,28-29` as numbers; UsageError where it is not."""
    from assay.errors import UsageError

    found: list[int] = []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        lo, dash, hi = part.strip().partition("-")
        if not lo.isdigit() or (dash and not hi.isdigit()):
            raise UsageError(
                f"--skip-layers {text!r}: {part.strip()!r} is no layer",
                remedy="write 0,1,28-29",
                finding_id="kv.usage",
            )
        found += range(int(lo), int(hi or lo) + 1)
    return tuple(dict.fromkeys(found))
