"""`assay kv sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.kv_options import Batch, Calibration, Length, Model, SkipLayers, Text, Windows, layers_of
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv sweep")
def command(
    model: Model,
    codec: Annotated[list[str] | None, typer.Option("--codec", help="SPEC; give it several times.")] = None,
    specs: Annotated[Path | None, typer.Option(help="File with one SPEC a line.")] = None,
    mode: Annotated[str, typer.Option(help="decode (what serving does), inforward or snapshot.")] = "decode",
    stream: Annotated[str, typer.Option(help="kv, k or v; the other stays exact.")] = "kv",
    skip_layers: SkipLayers = None,
    text: Text = None,
    windows: Windows = 16,
    fresh: Annotated[
        int, typer.Option(min=0, help="Further windows that the chosen one is measured on; 0: none.")
    ] = 16,
    length: Length = 1024,
    batch: Batch = 8,
    calibration: Calibration = None,
    table_tokens: Annotated[
        int, typer.Option(min=1, help="Cache length that calibration tables are counted against.")
    ] = 32_768,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that fit the codecs.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="JSON file that keeps every row as it is measured.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
) -> Report:
    """Measure many codecs on one reference: which are worth their bytes, and does the best one hold on fresh text?

    Goes on where an interrupted run stopped.
    """
    from assay.cli.progress import show
    from assay.kv.sweep import SweepPlan, run_sweep, specs_in

    plan = SweepPlan(
        model=model,
        codecs=(*(codec or ()), *(specs_in(specs) if specs else ())),
        mode=mode,
        streams=stream,
        skip_layers=layers_of(skip_layers),
        text=tuple(text or ()),
        windows=windows,
        fresh=fresh,
        length=length,
        batch=batch,
        calibration=str(calibration) if calibration else None,
        table_tokens=table_tokens,
        seed=seed,
    )
    return run_sweep(plan, show, out=out, jobs=jobs)
