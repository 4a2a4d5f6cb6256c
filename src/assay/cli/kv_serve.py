"""`assay kv serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from assay.cli.kv_options import CodecSpec, plan_options
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv serve")
@plan_options(stream="kv", skip_layers=None, calibration=None)
def command(
    shared: Mapping[str, Any],
    model: Annotated[str, typer.Argument(help="Checkpoint that vLLM serves.")],
    codec: CodecSpec,
    options: Annotated[
        list[str] | None, typer.Argument(help="After `--`: options of vLLM's own server.")
    ] = None,
    mode: Annotated[
        str, typer.Option(help="inforward (all tokens coded) or decode (the prompt is prefilled exactly).")
    ] = "inforward",
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
        python=python,
        options=tuple(options or ()),
        **shared,
    )
    return run_serve(plan, lambda line: typer.echo(line, err=True), dry_run=dry_run)
