"""The draft head of a GGUF file."""

from __future__ import annotations

import re

from assay.checkpoint.gguf.header import Gguf
from assay.checkpoint.mtp import MtpReport, Status

MAX_HEADS = 64

_GLUE = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")

_LAYER_PART = re.compile(r"(attn|ffn|post)_")


def examine_gguf(gguf: Gguf) -> MtpReport:
    """The draft head of a GGUF file: the last `nextn_predict_layers` blocks, with their `nextn.*`
    tensors.

    Each is a whole layer: it owes attention and MLP, and what all layers of the backbone have in
    common.
    """
    depth, count, blocks = (
        gguf.setting("nextn_predict_layers"),
        gguf.setting("block_count"),
        gguf.blocks(),
    )
    heads = {i: names for i, names in blocks.items() if any(n.startswith("nextn.") for n in names)}
    name, key = (
        f"gguf {gguf.architecture}",
        f"{gguf.architecture}.nextn_predict_layers" if depth else None,
    )
    if not heads:
        return MtpReport(
            "absent" if depth else "none", name, depth, 0, False if depth else None, None, key
        )
    backbone = [names for i, names in blocks.items() if i not in heads and i < count - depth]
    owed = {n for n in set.intersection(*backbone) if _LAYER_PART.match(n)} if backbone else set()
    missing: list[str] = []
    for index in range(count - min(depth, MAX_HEADS), count):
        own = blocks.get(index, set())
        missing += [f"blk.{index}.{part}" for part in (*_GLUE, *sorted(owed)) if part not in own]
        for part, start in (("attention", "attn_"), ("MLP", "ffn_")):
            if not any(n.startswith(start) and "norm" not in n for n in own):
                missing.append(f"blk.{index}.{start}* ({part})")
    status: Status = "not_announced" if not depth else "partial" if missing else "ok"
    present = sum(map(len, heads.values()))
    return MtpReport(status, name, depth, present, not missing, None, key, missing=tuple(missing))
