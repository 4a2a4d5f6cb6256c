"""`assay kv noise`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from assay.cli.kv_options import Model, plan_options
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv noise")
@plan_options(
    stream="kv", mode="inforward", skip_layers=None, text=None, windows=8, length=512, batch=8, seed=0
)
def command(
    shared: Mapping[str, Any],
    model: Model,
    sigma: Annotated[
        str, typer.Option(help="Sizes of the noise over the rms of a token: 0.003,0.01.")
    ] = "0.003,0.01,0.03,0.1",
    each: Annotated[str, typer.Option(help="all together, each stream alone, or each layer alone.")] = "all",
) -> Report:
    """Put noise of known size into the KV cache: how much error does the model bear, and where?

    Goes on where an interrupted run stopped.
    """
    from assay.cli.progress import show
    from assay.kv.sensitivity import NoisePlan, run_noise

    return run_noise(NoisePlan(model=model, sigmas=sizes_of(sigma), each=each, **shared), show)


def sizes_of(text: str) -> tuple[float, ...]:
    """`0.003,0.01` as numbers; UsageError where one is none."""
    from assay.errors import UsageError

    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UsageError(
            f"--sigma {text!r} is no list of numbers",
            remedy="write 0.003,0.01,0.03,0.1",
            finding_id="kv.usage",
        ) from error
