"""Weights changed after loading: what a quantisation would make of them, as `?weights=NAME(option=value)`."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from typing import Any, get_type_hints

from assay.errors import UsageError

# name: `module:function(model, **options) -> int`, which changes the linear layers of a loaded model in place and
# returns the bytes that all its parameters would take as stored.
TRANSFORMS = {
    "polar": "assay.quant.polar:polar_quantise",
    "int": "assay.quant.rounding:quantise_model",
}


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters as they are held; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def transform_weights(model: Any, spec: str) -> int:
    """Apply `polar(bits=4)` or `int(bits=4, group=128)` to `model`; UsageError for what is not known.

    Returns the bytes that the weights would take as stored.
    """
    name, options = parse_transform(spec)
    module, _, function = TRANSFORMS[name].partition(":")
    try:
        return int(getattr(import_module(module), function)(model, **options))
    except TypeError as error:  # an option of the wrong kind
        raise UsageError(
            f"weights={spec}: {error}",
            remedy="look at the options in docs/compare.md",
            finding_id="fidelity.usage",
        ) from error


def parse_transform(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a transformation; UsageError for a name or an option that there is not."""
    name, options = _read(spec)
    module, _, function = TRANSFORMS[name].partition(":")
    known = list(inspect.signature(getattr(import_module(module), function)).parameters.values())[1:]
    hints = get_type_hints(getattr(import_module(module), function))
    odd = next((o for o, value in options.items() if o in hints and type(value) is not hints[o]), None)
    if odd:
        raise UsageError(
            f"weights={spec}: {odd} must be {hints[odd].__name__}, got {options[odd]!r}",
            remedy="look at the options in docs/compare.md",
            finding_id="fidelity.usage",
        )
    unknown = next((o for o in options if o not in {p.name for p in known}), None)
    missing = next((p.name for p in known if p.default is p.empty and p.name not in options), None)
    if unknown or missing:
        problem = f"unknown option {unknown!r}" if unknown else f"{missing} is missing"
        raise UsageError(
            f"weights={spec}: {problem}",
            remedy=f"options of {name} are {', '.join(p.name for p in known)}",
            finding_id="fidelity.usage",
        )
    return name, options


def _read(spec: str) -> tuple[str, dict[str, Any]]:
    try:
        call = ast.parse(spec, mode="eval").body
    except SyntaxError:
        call = None
    if isinstance(call, ast.Name):
        call = ast.Call(call, [], [])
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise UsageError(
            f"weights={spec!r} is not NAME(option=value, …)",
            remedy="write weights=polar(bits=4)",
            finding_id="fidelity.usage",
        )
    if call.func.id not in TRANSFORMS:
        raise UsageError(
            f"weights={spec!r}: unknown transformation {call.func.id!r}",
            remedy=f"one of {', '.join(TRANSFORMS)}",
            finding_id="fidelity.usage",
        )
    try:
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except ValueError as error:
        raise UsageError(
            f"weights={spec!r}: options must be plain numbers or strings", finding_id="fidelity.usage"
        ) from error
