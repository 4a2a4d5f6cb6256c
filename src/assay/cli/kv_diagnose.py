"""`assay kv diagnose`."""

from __future__ import annotations

from typing import Annotated

import typer

from assay.cli.kv_options import Batch, Calibration, CodecSpec, Length, Model, Text, Windows, layers_of
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv diagnose")
def command(
    model: Model,
    codec: CodecSpec,
    stream: Annotated[str, typer.Option(help="kv, k or v.")] = "kv",
    skip_layers: Annotated[str | None, typer.Option(help="Layers that are left out: 0,1,28-29.")] = None,
    text: Text = None,
    windows: Windows = 8,
    length: Length = 512,
    batch: Batch = 4,
    queries: Annotated[int, typer.Option(min=1, help="Queries of each window that read the cache.")] = 64,
    calibration: Calibration = None,
) -> Report:
    """Say where a codec's error comes from: by layer, head and stage, and what attention makes of it."""
    from assay.cli.progress import show
    from assay.kv.diagnose import DiagnosisPlan, run_diagnose

    plan = DiagnosisPlan(
        model=model,
        codec=codec,
        streams=stream,
        skip_layers=layers_of(skip_layers),
        text=tuple(text or ()),
        windows=windows,
        length=length,
        batch=batch,
        queries=queries,
        calibration=str(calibration) if calibration else None,
    )
    return run_diagnose(plan, show)
