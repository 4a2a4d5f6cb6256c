"""`assay kv serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from assay.cli.kv_options import Calibration, CodecSpec, SkipLayers, layers_of
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv serve")
def command(
    model: Annotated[str, typer.Argument(help="Checkpoint that vLLM serves.")],
    codec: CodecSpec,
    options: Annotated[
        list[str] | None, typer.Argument(help="After `--`: options of vLLM's own server.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="inforward (all tokens coded) or decode (the prompt is prefilled exactly).")
    ] = "inforward",
    stream: Annotated[str, typer.Option(help="kv, k or v; the other stays exact.")] = "kv",
    skip_layers: SkipLayers = None,
    calibration: Calibration = None,
    python: Annotated[str, typer.Option(help="A Python that has vLLM.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
) -> Report:
    """Serve a model with vLLM and a codec in its KV cache; refuses what would give wrong numbers.

    The command is printed and run: `assay kv serve MODEL --codec SPEC -- --port 8001 --max-model-len 4096`.
    """
    from assay.kv.serve import ServePlan, run_serve

    plan = ServePlan(
        model=model,
        codec=codec,
        mode=mode,
        calibration=str(calibration) if calibration else None,
        streams=stream,
        skip_layers=layers_of(skip_layers),
        python=python,
        options=tuple(options or ()),
    )
    return run_serve(plan, lambda line: typer.echo(line, err=True), dry_run=dry_run)
