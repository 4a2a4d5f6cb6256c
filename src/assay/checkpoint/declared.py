"""What a checkpoint declares about its quantisation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from assay.checkpoint.matching import listed
from assay.checkpoint.storage import PLAIN, Kind
from assay.checkpoint.tensors import Params

UNQUANTISED = re.compile(
    r"(^|\.)(eh_proj|weights_proj|mtp_linear_proj\.\d+|mtp_layers\.\d+\.input_proj"
    r"|compressor\.w(kv|gate)|\w+_res_proj)$"
)
"""Modules that engines build in full precision in any case (vLLM 0.32: a plain Linear, or
no quant_config): the entry of a draft head, the weighting of a sparse indexer, compressors.
Official FP8 releases of DeepSeek V3 and GLM-5 store them as bfloat16 and list them nowhere."""

Accepts = Callable[[str], "frozenset[Kind] | None"]

Geometry = Callable[[str, Params], "str | None"]

BitsOf = Callable[[str], "int | None"]

Names = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True)
class Declared:
    """A quantisation as the checkpoint declares it.

    `accepts(module)` gives the storage kinds that agree with the declaration, `{PLAIN}` for a
    module that it leaves out, or None where it does not say. `geometry(module, params)` is a
    complaint about packed shapes, or None. `bits_of(module)` is the width of its packed integers,
    `needs(module)` and `unwanted(module)` name parameters that a quantised module must, or must
    not, have beside its weight. `unexamined` says what of it assay does not know.
    """

    method: str
    source: str
    raw: Mapping[str, Any]
    accepts: Accepts
    geometry: Geometry = lambda module, params: None
    bits: float | None = None
    group_size: int | None = None
    algorithm: str | None = None
    bits_of: BitsOf = lambda module: None
    needs: Names = lambda module: ()
    unwanted: Names = lambda module: ()
    unexamined: str = ""

    def kinds(self, module: str) -> frozenset[Kind] | None:
        """What `accepts` says, and plain for modules that engines never quantise."""
        accepted = self.accepts(module)
        return accepted | {Kind.PLAIN} if accepted and UNQUANTISED.search(module) else accepted


def accepting(
    kinds: frozenset[Kind] | None, hits: Callable[[str], bool], head: frozenset[Kind] | None = None
) -> Accepts:
    """Plain for what an ignore list hits, `head` for the output head, and `kinds` for all the
    rest.
    """

    def accepts(module: str) -> frozenset[Kind] | None:
        if module.endswith("lm_head") and not hits(module):
            return head
        return PLAIN if listed(module, hits) else kinds

    return accepts
