"""A stored tensor, and how tensor names group into modules and layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits per element of every dtype that the safetensors format names."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes that hold a weight as it is, with no scale beside it."""

FP8 = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: `start` and `end` are byte offsets from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.end - self.start


Params = Mapping[str, Tensor]
"""The tensors of one module by parameter name, e.g. `{"qweight": …, "scales": …}`."""

# bitsandbytes hangs its state below the weight: `q_proj.weight.absmax` belongs to the module
# `q_proj`.
_NESTED = re.compile(r"^(.+)\.(weight\.(?:absmax|quant_map|nested_\w+|quant_state\.\w+))$")

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d{1,7})\.")


def split_name(name: str) -> tuple[str, str]:
    """(module, parameter) of a tensor name; the module is empty for a name without a dot."""
    if ".weight." in name and (nested := _NESTED.match(name)):
        return nested.group(1), nested.group(2)
    module, _, parameter = name.rpartition(".")
    return module, parameter


def modules(tensors: Iterable[Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors grouped by module, then by parameter name."""
    grouped: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        module, parameter = split_name(tensor.name)
        grouped.setdefault(module, {})[parameter] = tensor
    return grouped


def layer_index(name: str) -> int | None:
    """Index of the decoder layer that a tensor belongs to, or None."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def layer_role(name: str) -> str:
    """The name with its layer and expert numbers replaced by `*`, so that peers share it."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)
