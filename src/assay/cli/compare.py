"""`assay compare REFERENCE CANDIDATE...`: the same distribution within a declared margin, or not?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli.verb import verb
from assay.verdict import Report

_TOML = ".toml"


@verb("compare")
def command(
    engines: Annotated[
        list[str],
        typer.Argument(
            metavar="REFERENCE CANDIDATE... | PLAN.toml",
            help="hf:MODEL, vllm:MODEL, gguf:FILE, run:DIR or a URL, with options after '?'.",
        ),
    ],
    text: Annotated[
        list[str] | None,
        typer.Option(help="File, glob, FILE.jsonl, datasets:NAME, or self; may be given again."),
    ] = None,
    windows: Annotated[int | None, typer.Option(help="Passages that are scored. [default: 64]")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a passage. [default: 1024]")] = None,
    path: Annotated[
        str | None, typer.Option(help="prefill, chunked or decode (reads the KV cache). [default: prefill]")
    ] = None,
    scored: Annotated[
        str | None, typer.Option(help="all tokens but the first, or second-half. [default: all]")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens of a block on the chunked path.")] = None,
    batch: Annotated[int | None, typer.Option(help="Windows that run together.")] = None,
    margin_ppl: Annotated[str | None, typer.Option(help="ACCEPT within ± this. [default: 1%]")] = None,
    margin_top1: Annotated[str | None, typer.Option(help="ACCEPT from this up. [default: 95%]")] = None,
    marginal_ppl: Annotated[str | None, typer.Option(help="MARGINAL within ± this. [default: 3%]")] = None,
    marginal_top1: Annotated[str | None, typer.Option(help="MARGINAL from this up. [default: 85%]")] = None,
    margin_kl: Annotated[
        float | None, typer.Option(help="ACCEPT: mean KL at most this, in nats. [default: 0.010]")
    ] = None,
    marginal_kl: Annotated[
        float | None, typer.Option(help="MARGINAL: mean KL at most this, in nats. [default: 0.030]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the bootstrap, of noise and of sampled text.")
    ] = None,
    greedy: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Also let both sides generate N tokens greedily; 64 shows most. [default: 0]"
        ),
    ] = None,
    no_floors: Annotated[bool, typer.Option("--no-floors", help="Do not measure the floors.")] = False,
    allow_marginal: Annotated[
        bool, typer.Option("--allow-marginal", help="MARGINAL passes: exit code 0.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the scored windows after the run.")] = False,
) -> Report:
    """Score a reference and candidates on the same tokens; judge Δppl and top-1 by their 95 % intervals.

    Exit code 0 ACCEPT, 1 MARGINAL or REJECT, 2 could not be compared, 3 inconclusive.
    """
    from assay.cli.progress import say, show
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan import plan_from, read_plan

    given: dict[str, Any] = {
        "text": text or None,
        "windows": windows,
        "length": length,
        "path": path,
        "scored": scored,
        "chunk": chunk,
        "batch": batch,
        "margin_ppl": margin_ppl,
        "margin_top1": margin_top1,
        "marginal_ppl": marginal_ppl,
        "marginal_top1": marginal_top1,
        "margin_kl": margin_kl,
        "marginal_kl": marginal_kl,
        "seed": seed,
        "greedy": greedy,
        "floors": False if no_floors else None,
    }
    overrides = {name: value for name, value in given.items() if value is not None}
    if len(engines) == 1 and engines[0].endswith(_TOML):
        plan = read_plan(Path(engines[0]), overrides)
    else:
        reference, *candidates = engines
        plan = plan_from(
            {"reference": reference, "candidates": candidates}, overrides, where="the command line"
        )
    return run_compare(plan, show, say=say, allow_marginal=allow_marginal, keep=keep)


# -----------------------------------------------------------------------------
# `assay reference ENGINE --text FILE --out DIR`: store a reference once, compare with it many times.


@verb("reference")
def reference(
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
    from assay.fidelity.plan import plan_from
    from assay.fidelity.reference import keep_reference

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


# -----------------------------------------------------------------------------
# `assay rerun RESULT`: repeat the comparison that a result came from.


@verb("rerun")
def rerun(
    result: Annotated[Path, typer.Argument(help="JSON that `assay compare --json` wrote.")],
    allow_marginal: Annotated[bool, typer.Option("--allow-marginal", help="MARGINAL passes.")] = False,
) -> Report:
    """Run the comparison of an earlier result again, from the plan that it echoes.

    Exit codes as those of compare.
    """
    from assay.cli.progress import say, show
    from assay.errors import UsageError
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan import plan_from

    try:
        plan = json.loads(result.read_text(encoding="utf-8"))["subject"]["plan"]
        if not isinstance(plan, dict):
            raise TypeError
    except OSError as error:
        raise UsageError(
            f"cannot read {result}: {error.strerror}", remedy="check the path", finding_id="fidelity.usage"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{result} is no result of assay compare: it holds no plan",
            remedy="give the JSON that assay compare --json wrote",
            finding_id="fidelity.usage",
        ) from error
    return run_compare(plan_from(plan, {}, where=str(result)), show, say=say, allow_marginal=allow_marginal)
