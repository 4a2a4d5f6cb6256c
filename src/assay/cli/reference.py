"""`assay reference ENGINE --text FILE --out DIR`: store a reference once, compare with it many times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.verb import verb
from assay.verdict import Report


@verb("reference")
def command(
    engine: Annotated[str, typer.Argument(help="hf:MODEL, vllm:MODEL or gguf:FILE, with options after '?'.")],
    out: Annotated[Path, typer.Option(help="Folder of the store, or file with --format llama.cpp.")],
    text: Annotated[
        list[str] | None,
        typer.Option(help="File, glob, FILE.jsonl, datasets:NAME, or self; may be given again."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Passages that are scored.")] = 64,
    length: Annotated[int, typer.Option(min=8, help="Tokens of a passage.")] = 1024,
    path: Annotated[str, typer.Option(help="prefill, chunked or decode.")] = "prefill",
    scored: Annotated[str, typer.Option(help="all tokens but the first, or second-half.")] = "all",
    batch: Annotated[int, typer.Option(min=1, help="Windows that run together.")] = 4,
    dtype: Annotated[
        str, typer.Option(help="Type of the stored states: as the engine has them, or bfloat16.")
    ] = "engine",
    no_floors: Annotated[bool, typer.Option("--no-floors", help="Do not measure the floors.")] = False,
    format: Annotated[
        str, typer.Option(help="assay (final states), or llama.cpp (its file of log-probabilities).")
    ] = "assay",
) -> Report:
    """Score a reference and store its final states and its output head, so that `run:DIR` needs no reference model.

    Goes on where an interrupted run stopped. Exit code 0 stored, 2 could not be stored.
    """
    from assay.cli.progress import show
    from assay.fidelity.keep_reference import keep_reference
    from assay.fidelity.plan import plan_from

    plan = plan_from(
        {
            "reference": engine,
            "candidates": [engine],
            "text": text or [],
            "windows": windows,
            "length": length,
            "path": path,
            "scored": scored,
            "batch": batch,
            "floors": not no_floors,
        },
        {},
        where="the command line",
    )
    return keep_reference(plan, out, dtype=dtype, form=format, progress=show)
