"""`assay kv sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli.kv_options import Model, plan_options
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv sweep")
@plan_options(
    mode="decode",
    stream="kv",
    skip_layers=None,
    text=None,
    windows=16,
    length=1024,
    batch=8,
    calibration=None,
    table_tokens=32_768,
    seed=0,
)
def command(
    shared: Mapping[str, Any],
    model: Model,
    codec: Annotated[list[str] | None, typer.Option("--codec", help="SPEC; give it several times.")] = None,
    specs: Annotated[Path | None, typer.Option(help="File with one SPEC a line.")] = None,
    fresh: Annotated[
        int, typer.Option(min=0, help="Further windows that the chosen one is measured on; 0: none.")
    ] = 16,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that fit the codecs.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="JSON file that keeps every row as it is measured.")
    ] = None,
) -> Report:
    """Measure many codecs on one reference: which are worth their bytes, and does the best one hold on fresh text?

    Goes on where an interrupted run stopped.
    """
    from assay.cli.progress import show
    from assay.kv.sweep import SweepPlan, run_sweep, specs_in

    codecs = (*(codec or ()), *(specs_in(specs) if specs else ()))
    return run_sweep(SweepPlan(model=model, codecs=codecs, fresh=fresh, **shared), show, out=out, jobs=jobs)
