"""What of the promised tensors is stored: missing names and wrong shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from assay.checkpoint.expectation import Expectation
from assay.checkpoint.pieces import Shape
from assay.checkpoint.storage import carrier, stored_kind, weight_shape
from assay.checkpoint.subject import Checkpoint

Wrong = Mapping[str, tuple[Shape, Shape]]
"""Stored and expected shape by name."""


@dataclass(frozen=True)
class Comparison:
    """The stored tensors against a list of promised ones.

    Attributes:
        origin: Source of the list.
        missing: Promised names that are not stored.
        wrong: Stored and expected shape of tensors with another shape.
        problem: Why there is no list; then nothing was compared.
        towers: Why there is no list for the towers beside the language model.
    """

    origin: str
    missing: tuple[str, ...] = ()
    wrong: Wrong = field(default_factory=dict)
    problem: str = ""
    towers: str = ""


def compare_tensors(checkpoint: Checkpoint, promised: Expectation) -> Comparison:
    """Compare a checkpoint with what its config promises."""
    if promised.problem:
        return Comparison(promised.origin, problem=promised.problem)
    missing = tuple(name for name in promised.shapes if not is_stored(checkpoint, name))
    return Comparison(promised.origin, missing, dict(_wrong_shapes(checkpoint, promised)))


def is_stored(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a promised tensor is there, as it is or quantised."""
    if name in checkpoint.tensors:
        return True
    module, _, parameter = name.rpartition(".")
    params = checkpoint.modules.get(module, {})
    if parameter == "weight":
        return carrier(params) is not None
    return any(
        p.startswith(f"{parameter}_") for p in params
    )  # fused experts: gate_up_proj_blocks, …_packed


def _wrong_shapes(
    checkpoint: Checkpoint, promised: Expectation
) -> Iterator[tuple[str, tuple[Shape, Shape]]]:
    for name, shape in promised.shapes.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None or tensor.shape == shape:
            continue
        module, _, parameter = name.rpartition(".")
        params = checkpoint.modules.get(module, {})
        packed = stored_kind(params) is None or weight_shape(params) is None
        if not (
            parameter == "weight" and len(shape) == 2 and packed
        ):  # a scheme checks what is packed
            yield name, (tensor.shape, shape)
