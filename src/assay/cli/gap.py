"""`assay gap REFERENCE CANDIDATE --codec SPEC`: two deployments differ; how much is due to what?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli.kv import numbers_of
from assay.cli.verb import verb
from assay.verdict import Report


@verb("gap")
def command(
    reference: Annotated[str, typer.Argument(help="hf:MODEL or vllm:MODEL, with options after '?'.")],
    candidate: Annotated[str, typer.Argument(help="The same, for the other side.")],
    codec: Annotated[str, typer.Option("--codec", help="SPEC of `assay kv`, such as hadamard(bits=4).")],
    quick: Annotated[
        bool, typer.Option("--quick", help="8 windows of 256 tokens, layers in 5 groups, fewer noise levels.")
    ] = False,
    mode: Annotated[
        str, typer.Option(help="What the total is measured in: decode, inforward, snapshot.")
    ] = "decode",
    base_mode: Annotated[str, typer.Option(help="What engine and codec are told apart in.")] = "inforward",
    phases: Annotated[
        str | None,
        typer.Option(help="1 baseline, 2 residual, 3 noise, 4 layers, 5 harness, 6 calibration: 1,4."),
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="File, glob, FILE.jsonl or datasets:NAME.")] = None,
    windows: Annotated[int | None, typer.Option(help="Passages of the decomposition. [default: 32]")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a passage. [default: 1024]")] = None,
    fresh: Annotated[
        int | None, typer.Option(help="Further passages, for recommendations. [default: 16]")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Windows that run together. [default: 8]")] = None,
    groups: Annotated[
        int | None, typer.Option(help="Attribute to so many groups of layers; 0: each alone. [default: 0]")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="File of `assay kv calibrate`.")] = None,
    other_calibration: Annotated[
        Path | None, typer.Option(help="The same from the candidate's engine, for phase 6.")
    ] = None,
    margin_ppl: Annotated[str, typer.Option(help="The total must lie within ± this.")] = "3%",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the noise.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what was scored after the run.")] = False,
) -> Report:
    """Take the difference of two deployments apart into buckets that sum, with intervals, and measure what would help.

    Exit code 0 explained and within the margin, 1 outside it or another set-up, 2 could not be examined, 3 inconclusive.
    """
    from assay.cli.progress import show
    from assay.fidelity.plan import fraction
    from assay.lab.gap.gap import run_gap
    from assay.lab.gap.plan import QUICK, GapPlan, full_spec

    given: dict[str, Any] = {
        "windows": windows,
        "length": length,
        "fresh": fresh,
        "batch": batch,
        "groups": groups,
        "phases": None if phases is None else numbers_of(phases, "--phases", "1,3-5"),
    }
    settings = (QUICK if quick else {}) | {k: v for k, v in given.items() if v is not None}
    plan = GapPlan(
        reference=full_spec(reference),
        candidate=full_spec(candidate),
        codec=codec,
        mode=mode,
        base_mode=base_mode,
        text=tuple(text or ()),
        calibration=str(calibration) if calibration else None,
        other_calibration=str(other_calibration) if other_calibration else None,
        margin=fraction(margin_ppl, "margin-ppl"),
        seed=seed,
        **settings,
    )
    return run_gap(plan, show, keep=keep)
