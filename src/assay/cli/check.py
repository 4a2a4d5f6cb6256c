"""`assay check URL`: does the running server write sane text, and how fast, counted only if it does?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from assay.cli.verb import verb
from assay.verdict import Report


@verb("check")
def command(
    url: Annotated[str, typer.Argument(help="Root of an OpenAI-compatible server, or its /v1.")],
    model: Annotated[
        str | None, typer.Option(help="Model to ask; default: the first the server lists.")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=1, max=1000, help="Sampled texts a probe, beside a greedy one.")
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="First seed; recorded in the result.")] = 0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=512, help="Streams whose speed is measured at once.")
    ] = 1,
    parallel: Annotated[int, typer.Option(min=1, max=512, help="Probes that run at once.")] = 8,
    repeats: Annotated[int, typer.Option(min=3, max=1000, help="Timed rounds after the warm-up.")] = 5,
    reference: Annotated[
        Path | None, typer.Option(help="Result of an earlier healthy run (its --json) to compare with.")
    ] = None,
    reference_engine: Annotated[
        str | None, typer.Option(help="Trusted model to run here on the same prompts: hf:PATH.")
    ] = None,
    probe: Annotated[list[str] | None, typer.Option(help="Run this probe only; may be given again.")] = None,
    longest_needle: Annotated[
        int,
        typer.Option(
            min=256, max=10_000_000, help="Longest context that is searched for a needle, in tokens."
        ),
    ] = 8192,
    token_budget: Annotated[
        float,
        typer.Option(
            min=0.1, max=100, help="Factor on every length limit, for models that reason at length."
        ),
    ] = 1.0,
    no_thinking: Annotated[
        bool, typer.Option("--no-thinking", help="Ask the chat template not to reason.")
    ] = False,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Run the code that the model wrote, in a sandboxed subprocess.")
    ] = False,
    no_throughput: Annotated[bool, typer.Option("--no-throughput", help="Do not measure speed.")] = False,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable that holds the API key.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds that one answer may take.")
    ] = 300.0,
) -> Report:
    """Probe a running server: is its text sane, and how fast is it, counted only if it is?

    Exit code 0 pass, 1 fail, 2 could not be examined, 3 inconclusive.
    """
    from assay.cli.progress import show
    from assay.coherence.check import CheckOptions, run_check
    from assay.coherence.measure import Plan
    from assay.coherence.probes import check_names
    from assay.errors import UsageError

    if reference is not None and reference_engine is not None:
        raise UsageError("give --reference or --reference-engine, not both", remedy="leave one of them out")
    plan = Plan(
        samples=samples,
        seed=seed,
        concurrency=concurrency,
        parallel=parallel,
        repeats=repeats,
        longest_needle=longest_needle,
        token_budget=token_budget,
        thinking=not no_thinking,
        only=check_names(probe or ()),
        run_code=run_code,
        throughput=not no_throughput,
    )
    options = CheckOptions(
        model=model,
        plan=plan,
        reference=reference,
        reference_engine=reference_engine,
        api_key_env=api_key_env,
        timeout=timeout,
    )
    return run_check(url, options, show)
