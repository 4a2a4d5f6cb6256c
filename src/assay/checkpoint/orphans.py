"""Scales and zero-points that belong to no weight: engines drop them or stop."""

from __future__ import annotations

import re
from collections.abc import Iterator

from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.storage import Kind, carrier, stored_kind
from assay.checkpoint.subject import Checkpoint
from assay.checkpoint.tensors import Params
from assay.verdict import Finding

_SIDE = frozenset(
    {
        "scales",
        "qzeros",
        "g_idx",
        "weight_scale",
        "weight_scale_inv",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "weight_global_scale",
        "weight_scale_2",
        "weight_absmax",
        "SCB",
        "biases",
        "weight.absmax",
        "weight.quant_map",
    }
)

_FUSED = {
    "_scales": ("_blocks", "_qweight", "_packed", ""),
    "_scale_inv": ("",),
    "_weight_scale": ("", "_weight"),
}

_QUANTIZER = re.compile(r"\.\w+_quantizer\.\w+$")


def check_orphans(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Side information without a quantised weight beside it."""
    lost = [
        f"{module}.{parameter}"
        for module, params in checkpoint.modules.items()
        if len(params) > 1 or "weight" not in params
        for parameter in _orphans(params)
    ]
    leaked = [name for name in checkpoint.tensors if _QUANTIZER.search(name)]
    if leaked:
        title = (
            f"{plural(len(leaked), 'buffer')} of a quantiser that no engine loads: {some(leaked)}"
        )
        causes = ["the quantised model was saved with save_pretrained, not exported"]
        yield warned(
            "orphan_scale", title, causes=causes, tensors=leaked[:SHOWN], count=len(leaked)
        )
    if lost:
        title = (
            f"{plural(len(lost), 'scale or zero-point')} without a quantised weight: {some(lost)}"
        )
        causes = ["the weight was replaced by a plain one, or dropped, and its scales stayed"]
        remedies = ["take the checkpoint from its original repository again"]
        yield found(
            "orphan_scale",
            title,
            causes=causes,
            remedies=remedies,
            tensors=lost[:SHOWN],
            count=len(lost),
        )


def _orphans(params: Params) -> Iterator[str]:
    kind = stored_kind(params)
    if carrier(params) is None or kind is Kind.PLAIN:
        yield from (p for p in params if p in _SIDE)
    for parameter in params:
        if parameter in _SIDE or "." in parameter or parameter.startswith("_"):
            continue
        for suffix, stems in _FUSED.items():
            stem = parameter.removesuffix(suffix)
            if stem != parameter and stem and not any(stem + s in params for s in stems):
                yield parameter
