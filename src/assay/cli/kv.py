"""`assay kv …`: the laboratory of KV-cache codecs. One function a command; the work is done in `assay.lab.kv`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli.verb import check_writable, verb
from assay.verdict import Report

# -----------------------------------------------------------------------------
# Lists of small numbers on the command line: `0,1,28-29`.

_MOST = 9999
"""No model has so many layers; a slip such as 0-1000000000 should not fill the memory."""


def numbers_of(text: str, option: str, example: str) -> tuple[int, ...]:
    """`0,1,28-29` as numbers, each once, in the order written; UsageError where it is no such list."""
    from assay.errors import UsageError

    found: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        lo, dash, hi = (side.strip() for side in part.partition("-"))
        last = hi if dash else lo
        if not (_is_number(lo) and _is_number(last)) or not int(lo) <= int(last) <= _MOST:
            raise UsageError(f"{option} {text!r}: {part!r} is no number or range", remedy=f"write {example}")
        found += range(int(lo), int(last) + 1)
    return tuple(dict.fromkeys(found))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 9


# -----------------------------------------------------------------------------
# Arguments and options that the commands of `assay kv` share, and how they become fields of a plan.

Model = Annotated[str, typer.Argument(help="hf:MODEL or a folder, with options after '?'.")]
AnyModel = Annotated[
    str, typer.Argument(help="hf:MODEL (or a folder) or vllm:MODEL, with options after '?'.")
]
CodecSpec = Annotated[str, typer.Option("--codec", help="SPEC, such as sinks(n=4)+hadamard(bits=4).")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the bootstrap, and of noise.")]
Calibration = Annotated[Path | None, typer.Option(help="File of `assay kv calibrate`.")]
OneStream = Annotated[str, typer.Option(help="k or v.")]
Layer = Annotated[int, typer.Option(min=0, help="Layer, for codecs that need a calibration.")]


# How a command line writes what plans share.
_OPTIONS: Mapping[str, Any] = {
    "mode": Annotated[str, typer.Option(help="decode (what serving does), inforward or snapshot.")],
    "stream": Annotated[str, typer.Option(help="kv, k or v; the other stays exact.")],
    "skip_layers": Annotated[str | None, typer.Option(help="Layers that stay exact: 0,1,28-29.")],
    "text": Annotated[list[str] | None, typer.Option(help="File, glob, FILE.jsonl or datasets:NAME.")],
    "windows": Annotated[int, typer.Option(min=1, help="Passages that are scored.")],
    "length": Annotated[int, typer.Option(min=8, help="Tokens of a passage.")],
    "batch": Annotated[int, typer.Option(min=1, help="Windows that run together.")],
    "calibration": Calibration,
    "table_tokens": Annotated[
        int, typer.Option(min=1, help="Cache length that calibration tables are counted against.")
    ],
    "seed": Seed,
}

# What a plan holds in another form, or (streams) under another name.
_READ: Mapping[str, Callable[[Any], Any]] = {
    "skip_layers": lambda written: numbers_of(written or "", "--skip-layers", "0,1,28-29"),
    "text": lambda names: tuple(names or ()),
    "calibration": lambda path: str(path) if path else None,
}


def plan_options(**defaults: Any) -> Callable[[Callable[..., Report]], Callable[..., Report]]:
    """Add the shared options named in `defaults` to a command, which gets them as its first argument: fields of a plan.

    They follow the command's own in its help, in the order in which they are named.
    """

    def decorate(function: Callable[..., Report]) -> Callable[..., Report]:
        def command(**arguments: Any) -> Report:
            given = {option: arguments.pop(option) for option in defaults}
            fields = {option: _READ[option](v) if option in _READ else v for option, v in given.items()}
            if "stream" in fields:
                fields["streams"] = fields.pop("stream")
            return function(fields, **arguments)

        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        shared = [
            inspect.Parameter(
                option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_OPTIONS[option]
            )
            for option, default in defaults.items()
        ]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__doc__ = function.__doc__
        return command

    return decorate


# -----------------------------------------------------------------------------
# `assay kv diagnose`.


@verb("kv diagnose")
@plan_options(stream="kv", skip_layers=None, text=None, windows=8, length=512, batch=4, calibration=None)
def diagnose(
    shared: Mapping[str, Any],
    model: Model,
    codec: CodecSpec,
    queries: Annotated[int, typer.Option(min=1, help="Queries of each window that read the cache.")] = 64,
) -> Report:
    """Say where a codec's error comes from: by layer, head and stage, and what attention makes of it."""
    from assay.cli.progress import show
    from assay.lab.kv.diagnose import DiagnosisPlan, run_diagnose

    return run_diagnose(DiagnosisPlan(model=model, codec=codec, queries=queries, **shared), show)


# -----------------------------------------------------------------------------
# `assay kv import`.


@verb("kv import")
def import_(
    model: Model,
    out: Annotated[Path, typer.Option(help="Calibration file that is written.")],
    moments: Annotated[
        Path | None, typer.Option(help="safetensors of layer_{l}_sigma, layer_{l}_chol, layer_{l}_inv_chol.")
    ] = None,
    levels_k: Annotated[
        list[Path] | None, typer.Option(help="Levels for keys, 2^b float32 (.f32); several times.")
    ] = None,
    levels_v: Annotated[
        list[Path] | None, typer.Option(help="Levels for values, 2^b float32 (.f32); several times.")
    ] = None,
) -> Report:
    """Make a calibration out of second moments and Lloyd-Max levels that older tools wrote."""
    from assay.lab.kv.older_files import run_import

    return run_import(model, out, moments=moments, levels_k=levels_k or (), levels_v=levels_v or ())


# -----------------------------------------------------------------------------
# `assay kv noise`.


@verb("kv noise")
@plan_options(
    stream="kv", mode="inforward", skip_layers=None, text=None, windows=8, length=512, batch=8, seed=0
)
def noise(
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
    from assay.lab.kv.noise import NoisePlan, run_noise

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


# -----------------------------------------------------------------------------
# `assay kv serve`.


@verb("kv serve")
@plan_options(stream="kv", skip_layers=None, calibration=None)
def serve(
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
    from assay.lab.kv.serve import ServePlan, run_serve

    plan = ServePlan(
        model=model,
        codec=codec,
        mode=mode,
        python=python,
        options=tuple(options or ()),
        **shared,
    )
    return run_serve(plan, lambda line: typer.echo(line, err=True), dry_run=dry_run)


# -----------------------------------------------------------------------------
# `assay kv sweep`.


@verb("kv sweep")
@plan_options(
    mode="decode",
    stream="kv",
    skip_layers=None,
    text=None,
    windows=16,
    length=1024,
    batch=8,
    calibration=None,
    table_tokens=32_768,
    seed=0,
)
def sweep(
    shared: Mapping[str, Any],
    model: Model,
    codec: Annotated[list[str] | None, typer.Option("--codec", help="SPEC; give it several times.")] = None,
    specs: Annotated[Path | None, typer.Option(help="File with one SPEC a line.")] = None,
    fresh: Annotated[
        int, typer.Option(min=0, help="Further windows that the chosen one is measured on; 0: none.")
    ] = 16,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that fit the codecs.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="JSON file that keeps every row as it is measured.")
    ] = None,
) -> Report:
    """Measure many codecs on one reference: which are worth their bytes, and does the best one hold on fresh text?

    Goes on where an interrupted run stopped.
    """
    from assay.cli.progress import show
    from assay.lab.kv.sweep import SweepPlan, run_sweep, specs_in

    codecs = (*(codec or ()), *(specs_in(specs) if specs else ()))
    return run_sweep(SweepPlan(model=model, codecs=codecs, fresh=fresh, **shared), show, out=out, jobs=jobs)


# -----------------------------------------------------------------------------

app = typer.Typer(
    help="KV-cache codecs: evaluate, sweep, calibrate, diagnose, attribute, allocate, encode, decode.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command("diagnose")(diagnose)
app.command("noise")(noise)
app.command("serve")(serve)
app.command("sweep")(sweep)
app.command("import")(import_)


@app.command("list")
@verb("kv list")
def list_codecs() -> Report:
    """Name the codecs and wrappers, with their parameters."""
    from assay.lab.kv.spec import run_list

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
    from assay.lab.kv.evaluate import EvalPlan, run_eval

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
    from assay.lab.kv.calibrate import CalibrationPlan, run_calibrate

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
    from assay.lab.kv.attribute import AttributionPlan, run_attribute

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
    from assay.lab.kv.allocate import AllocationPlan, run_allocate

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
    from assay.lab.kv.files import Place, run_encode

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
    from assay.lab.kv.files import Place, run_decode

    return run_decode(source, out, Place(stream, layer, calibration))
