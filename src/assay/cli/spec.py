"""`assay spec`: does speculative decoding pay, or is its head dead?"""

from __future__ import annotations

from typing import Annotated

import typer

from assay.cli.verb import verb
from assay.verdict import Report

SERVER, LOSSLESS = "Running server", "Losslessness"


def spec_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Log files (plain, gzip, bz2, xz; rotated parts together), a /metrics text, JSON responses, a URL, or `-`.",
        ),
    ],
    baseline: Annotated[
        list[str] | None, typer.Option(help="A source of the same kind to compare with. May be repeated.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Keep reading a log as it grows.")] = False,
    seconds: Annotated[
        float | None, typer.Option("--for", help="Stop following after this many seconds.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The checkpoint: its head is examined as `assay verify` does.")
    ] = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(help="Cost of one draft token in target steps (default: measured, or 0.1)."),
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between the two scrapes.", rich_help_panel=SERVER)
    ] = 10.0,
    requests: Annotated[
        int, typer.Option(help="Requests of our own to send between the scrapes.", rich_help_panel=SERVER)
    ] = 0,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the API key.", rich_help_panel=SERVER)
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each request.", rich_help_panel=SERVER)] = 120.0,
    lossless: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The same model without speculation: is the text the same?",
            rich_help_panel=LOSSLESS,
        ),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Greedy prompts.", rich_help_panel=LOSSLESS)] = 6,
    samples: Annotated[
        int, typer.Option(help="Sampled texts from each server.", rich_help_panel=LOSSLESS)
    ] = 48,
) -> Report:
    """Judge speculative decoding from what an engine leaves: healthy, degraded, broken, off, or too little to tell.

    Exit code 0 healthy, 1 degraded or broken, 3 off or insufficient, 2 if a source cannot be read.
    """
    from assay.errors import UsageError
    from assay.speculation.judge import Options
    from assay.speculation.spec import examine

    options = Options(
        baseline=tuple(baseline or ()), model=model, cost_ratio=cost_ratio, interval=interval, requests=requests,
        lossless=lossless, prompts=prompts, samples=samples, api_key_env=api_key_env, timeout=timeout,
    )  # fmt: skip
    if seconds is not None and not (follow and 0 < seconds < float("inf")):
        raise UsageError("--for takes the seconds that --follow lasts", finding_id="speculation.usage")
    if not follow:
        return examine(sources, options)
    if len(sources) != 1 or baseline or lossless:
        raise UsageError("--follow takes one log and nothing to compare with", finding_id="speculation.usage")
    from assay.speculation.live import follow as follow_log

    return follow_log(sources[0], options, seconds)


command = verb("spec")(spec_command)
