"""`assay kv noise`."""

from __future__ import annotations

from typing import Annotated

import typer

from assay.cli.kv_options import Batch, Length, Model, SkipLayers, Text, Windows, layers_of
from assay.cli.verb import verb
from assay.verdict import Report


@verb("kv noise")
def command(
    model: Model,
    sigma: Annotated[
        str, typer.Option(help="Sizes of the noise over the rms of a token: 0.003,0.01.")
    ] = "0.003,0.01,0.03,0.1",
    each: Annotated[str, typer.Option(help="all together, each stream alone, or each layer alone.")] = "all",
    stream: Annotated[str, typer.Option(help="kv, k or v.")] = "kv",
    mode: Annotated[str, typer.Option(help="decode, inforward or snapshot.")] = "inforward",
    skip_layers: SkipLayers = None,
    text: Text = None,
    windows: Windows = 8,
    length: Length = 512,
    batch: Batch = 8,
    seed: Annotated[int, typer.Option(help="Seed of the noise and of the bootstrap.")] = 0,
) -> Report:
    """Put noise of known size into the KV cache: how much error does the model bear, and where?

    Goes on where an interrupted run stopped.
    """
    from assay.cli.progress import show
    from assay.kv.sensitivity import NoisePlan, run_noise

    plan = NoisePlan(
        model=model,
        sigmas=sizes_of(sigma),
        each=each,
        streams=stream,
        mode=mode,
        skip_layers=layers_of(skip_layers),
        text=tuple(text or ()),
        windows=windows,
        length=length,
        batch=batch,
        seed=seed,
    )
    return run_noise(plan, show)


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
