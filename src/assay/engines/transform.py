"""`weights=…`: a change of a model's weights after it was loaded, as an option of its engine."""

from __future__ import annotations

import ast
import inspect
from typing import Any, get_type_hints

from assay.errors import UsageError
from assay.plugins import get, names


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters as they are held; tied ones count once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def transform_weights(model: Any, spec: str) -> int:
    """Apply `polar(bits=4)` or `int(bits=4, group=128)` to `model`; UsageError for what is not
    known.

    Returns the bytes that the weights would take as stored.
    """
    name, options = parse_transform(spec)
    try:
        return int(get("assay.weights", name)(model, **options))
    except TypeError as error:  # an option of the wrong kind
        raise UsageError(
            f"weights={spec}: {error}",
            remedy="look at the options in docs/compare.md",
            finding_id="fidelity.usage",
        ) from error


def parse_transform(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a transformation; UsageError for a name or an option that
    there is not.
    """
    name, options = read_transform(spec)
    function = get("assay.weights", name)
    known = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function)
    odd = next(
        (o for o, value in options.items() if o in hints and type(value) is not hints[o]), None
    )
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


def read_transform(spec: str) -> tuple[str, dict[str, Any]]:
    """The function and the arguments that `weights=` names."""
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
    if get("assay.weights", call.func.id) is None:
        raise UsageError(
            f"weights={spec!r}: unknown transformation {call.func.id!r}",
            remedy=(
                f"one of {', '.join(names('assay.weights'))}, with options in parentheses:"
                " weights=int(bits=8)"
            ),
            finding_id="fidelity.usage",
        )
    try:
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except ValueError as error:
        raise UsageError(
            f"weights={spec!r}: options must be plain numbers or strings",
            remedy="write them like weights=int(bits=4,group=128)",
            finding_id="fidelity.usage",
        ) from error
