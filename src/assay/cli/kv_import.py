"""`assay kv import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.kv_options import Model
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv import")
def command(
    model: Model,
    out: Annotated[Path, typer.Option(help="Calibration file that is written.")],
    moments: Annotated[
        Path | None, typer.Option(help="safetensors of layer_{l}_sigma, layer_{l}_chol, layer_{l}_inv_chol.")
    ] = None,
    levels_k: Annotated[
        list[Path] | None, typer.Option(help="Levels for keys, 2^b float32 (.f32); several times.")
    ] = None,
    levels_v: Annotated[
        list[Path] | None, typer.Option(help="Levels for values, 2^b float32 (.f32); several times.")
    ] = None,
) -> Report:
    """Make a calibration out of second moments and Lloyd-Max levels that older tools wrote."""
    from assay.kv.importing import run_import

    return run_import(model, out, moments=moments, levels_k=levels_k or (), levels_v=levels_v or ())
