"""`assay kv diagnose`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from assay.cli.kv_options import CodecSpec, Model, plan_options
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv diagnose")
@plan_options(stream="kv", skip_layers=None, text=None, windows=8, length=512, batch=4, calibration=None)
def command(
    shared: Mapping[str, Any],
    model: Model,
    codec: CodecSpec,
    queries: Annotated[int, typer.Option(min=1, help="Queries of each window that read the cache.")] = 64,
) -> Report:
    """Say where a codec's error comes from: by layer, head and stage, and what attention makes of it."""
    from assay.cli.progress import show
    from assay.kv.diagnose import DiagnosisPlan, run_diagnose

    return run_diagnose(DiagnosisPlan(model=model, codec=codec, queries=queries, **shared), show)
