"""`assay kv …`: the laboratory of KV-cache codecs. One function a command; the work is done in `assay.kv`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli import kv_diagnose, kv_import, kv_noise, kv_serve, kv_sweep
from assay.cli.kv_options import AnyModel, Calibration, CodecSpec, Layer, Model, OneStream, plan_options
from assay.cli.verb import check_writable, verb
from assay.verdict import Report

app = typer.Typer(
    help="KV-cache codecs: evaluate, sweep, calibrate, diagnose, attribute, allocate, encode, decode.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command("diagnose")(kv_diagnose.command)
app.command("noise")(kv_noise.command)
app.command("serve")(kv_serve.command)
app.command("sweep")(kv_sweep.command)
app.command("import")(kv_import.command)


@app.command("list")
@verb("kv list")
def list_codecs() -> Report:
    """Name the codecs and wrappers, with their parameters."""
    from assay.kv.listing import run_list

    return run_list()


@app.command("eval")
@verb("kv eval")
@plan_options(
    mode="decode",
    stream="kv",
    skip_layers=None,
    text=None,
    windows=32,
    length=1024,
    batch=8,
    calibration=None,
    table_tokens=32_768,
    seed=0,
)
def evaluate(
    shared: Mapping[str, Any],
    model: AnyModel,
    codec: CodecSpec,
    margin_ppl: Annotated[str, typer.Option(help="ACCEPT within ± this.")] = "1%",
    margin_top1: Annotated[str, typer.Option(help="ACCEPT from this up.")] = "95%",
    marginal_ppl: Annotated[str, typer.Option(help="MARGINAL within ± this.")] = "3%",
    marginal_top1: Annotated[str, typer.Option(help="MARGINAL from this up.")] = "85%",
    allow_marginal: Annotated[bool, typer.Option("--allow-marginal", help="MARGINAL passes.")] = False,
) -> Report:
    """Score a model with a codec in its KV cache against itself without; count the bytes of the streams.

    Exit code 0 ACCEPT, 1 MARGINAL or REJECT, 2 could not be examined, 3 inconclusive.
    """
    from assay.cli.progress import show
    from assay.fidelity.plan import fraction
    from assay.kv.evaluate import EvalPlan, run_eval

    plan = EvalPlan(
        model=model,
        codec=codec,
        margin_ppl=fraction(margin_ppl, "margin-ppl"),
        margin_top1=fraction(margin_top1, "margin-top1"),
        marginal_ppl=fraction(marginal_ppl, "marginal-ppl"),
        marginal_top1=fraction(marginal_top1, "marginal-top1"),
        **shared,
    )
    return run_eval(plan, show, allow_marginal=allow_marginal)


@app.command("calibrate")
@verb("kv calibrate")
@plan_options(text=None, windows=32, length=1024, batch=4)
def calibrate(
    shared: Mapping[str, Any],
    model: AnyModel,
    out: Annotated[Path, typer.Option(help="File that is written.")],
    tokens: Annotated[int, typer.Option(min=256, help="Sampled tokens that the file holds.")] = 4096,
    sensitivity: Annotated[
        int,
        typer.Option(
            min=0, help="Windows on which each layer and stream is coded alone, for weights=measured."
        ),
    ] = 0,
) -> Report:
    """Learn from text what codecs need to know of a model's keys and values. Never evaluate on that text."""
    from assay.cli.progress import show
    from assay.kv.calibrate import CalibrationPlan, run_calibrate

    check_writable("out", out)
    plan = CalibrationPlan(model=model, tokens=tokens, sensitivity=sensitivity, **shared)
    return run_calibrate(plan, out, show)


@app.command("attribute")
@verb("kv attribute")
@plan_options(mode="inforward", skip_layers=None, text=None, windows=8, length=512, batch=8, calibration=None)
def attribute(
    shared: Mapping[str, Any],
    model: Model,
    codec: CodecSpec,
    each: Annotated[str, typer.Option(help="stream (K and V of a layer apart) or layer.")] = "stream",
) -> Report:
    """Code every layer and stream alone, then all together: what hurts, and does it add up?

    Goes on where an interrupted run stopped.
    """
    from assay.cli.progress import show
    from assay.kv.attribution import AttributionPlan, run_attribute

    return run_attribute(AttributionPlan(model=model, codec=codec, each=each, **shared), show)


@app.command("allocate")
@verb("kv allocate")
@plan_options(mode="inforward", text=None, windows=8, length=512, batch=8, calibration=None)
def allocate(
    shared: Mapping[str, Any],
    model: Model,
    codec: CodecSpec,
    target_ratio: Annotated[float, typer.Option(help="Stored bytes: how many times smaller than bf16.")],
    fresh: Annotated[int, typer.Option(min=8, help="Further windows that the choice is measured on.")] = 16,
    step: Annotated[float, typer.Option(help="Bits are given out in steps of this.")] = 0.25,
    least: Annotated[float, typer.Option(help="Fewest bits a value.")] = 1.0,
    most: Annotated[float, typer.Option(help="Most bits a value before a stream stays exact.")] = 8.0,
) -> Report:
    """Give every layer and stream its bits under a budget of bytes, from measured sensitivity; measure the choice again.

    Goes on where an interrupted run stopped.
    """
    from assay.cli.progress import show
    from assay.kv.allocation import AllocationPlan, run_allocate

    plan = AllocationPlan(
        model=model,
        codec=codec,
        target_ratio=target_ratio,
        fresh=fresh,
        step=step,
        least=least,
        most=most,
        **shared,
    )
    return run_allocate(plan, show)


@app.command("encode")
@verb("kv encode")
def encode(
    source: Annotated[
        Path, typer.Argument(help="KKTV file, or a safetensors file of [KV heads, tokens, head_dim].")
    ],
    codec: CodecSpec,
    out: Annotated[Path, typer.Option(help="Stream that is written.")],
    heads: Annotated[
        int, typer.Option(min=1, help="KV heads of a KKTV file, whose rows go token by token.")
    ] = 1,
    tensor: Annotated[
        str | None, typer.Option(help="Tensor of a safetensors file that holds several.")
    ] = None,
    stream: OneStream = "k",
    layer: Layer = 0,
    calibration: Calibration = None,
) -> Report:
    """Encode a tensor of keys or values to its serialised stream, and say what was lost."""
    from assay.kv.files import Place, run_encode

    return run_encode(source, codec, out, Place(stream, layer, calibration), heads=heads, tensor=tensor)


@app.command("decode")
@verb("kv decode")
def decode(
    source: Annotated[Path, typer.Argument(help="Stream that `assay kv encode` wrote.")],
    out: Annotated[Path, typer.Option(help="Tensor that is written: .safetensors, else KKTV.")],
    stream: OneStream = "k",
    layer: Layer = 0,
    calibration: Calibration = None,
) -> Report:
    """Decode a stream with the codec that its header names."""
    from assay.kv.files import Place, run_decode

    return run_decode(source, out, Place(stream, layer, calibration))
