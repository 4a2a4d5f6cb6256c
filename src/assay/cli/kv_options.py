"""Arguments and options that the commands of `assay kv` share, and how they become fields of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from assay.cli.numbers import numbers_of
from assay.verdict import Report

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
